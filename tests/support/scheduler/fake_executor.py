"""An executor without a model: strict about the protocol, and able to notice when a block holds the wrong tokens."""

import asyncio
import contextlib
import hashlib
import itertools
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from executor.core.grammars import Grammars, Matcher
from executor.core.restrictions import unpacked
from executor.errors import (
    AdapterExistsError,
    AdaptersFixedError,
    SchedulerLeftError,
    StaleSchedulerError,
    UpdatingWeightsError,
    WrongExecutorEpochError,
)
from executor.rpc.convert import parse_grammar
from executor.rpc.sessions import UNKNOWN
from protos.execution.v1 import execution_pb2 as pb
from protos.execution.v1 import execution_pb2_grpc as rpc
from protos.kvcommon.v1 import kvcommon_pb2 as common
from protos.rpc.errors import InvalidField, ServiceError
from scheduler.request import Tier
from scheduler.sequence import Copy
from tests.support.patience import patience
from tests.support.scheduler.tokenizers import CHAT_TEMPLATE, EOS, byte_level_tokenizer

MODEL = "fake"
AWAIT_SECONDS = 0.02  # subject: as long as a real executor waits for copies


def _extended(before: int, token: int) -> int:
    """The content of a slot after a token is computed; `before` is the previous token's content."""
    digest = hashlib.blake2b(before.to_bytes(8, "big") + token.to_bytes(4, "big"), digest_size=8)
    return int.from_bytes(digest.digest(), "big")


def fingerprints(token_ids: Iterable[int], adapter_id: int = 0) -> list[int]:
    """Contents of a sequence's slots, token by token: each depends on all earlier tokens, and on the adapter."""
    return list(itertools.accumulate(token_ids, _extended, initial=adapter_id))[1:]


def next_token(last: int, vocab_size: int, seed: int = 0) -> int:
    """The model: a function of all earlier tokens by the last fingerprint. Never the end-of-sequence id."""
    token = (last ^ seed) % vocab_size
    return token if token != EOS else (token + 1) % vocab_size


def continuation(prompt: Sequence[int], count: int, vocab_size: int, seed: int = 0, adapter_id: int = 0) -> list[int]:
    """The output of the fake model for a prompt."""
    last, token_ids = fingerprints(prompt, adapter_id)[-1], []
    for _ in range(count):
        token_ids.append(next_token(last, vocab_size, seed))
        last = _extended(last, token_ids[-1])
    return token_ids


@dataclass
class Running:
    """A sequence of the running set."""

    token_ids: list[int]
    prompt_tokens: int
    computed: int
    tables: dict[int, list[int]]
    sampling: pb.SamplingParams
    adapter_id: int = 0
    stopped: bool = False
    # Follows the output, `matched` tokens of it so far.
    matcher: Matcher | None = None
    matched: int = 0

    def __post_init__(self) -> None:
        # Of token_ids.
        self.fingerprints = fingerprints(self.token_ids, self.adapter_id)

    @property
    def stop_ids(self) -> set[int]:
        """Ids that end the sequence: the end of a grammar always does."""
        return {*self.sampling.stop_token_ids, *([EOS] if self.sampling.HasField("structured_output") else [])}

    def append(self, token: int) -> None:
        """The next token, which is not computed yet."""
        self.token_ids.append(token)
        self.fingerprints.append(_extended(self.fingerprints[-1], token))


@dataclass
class StepLog:
    """The result of a step."""

    tokens: int
    sequences: list[int] = field(default_factory=list)


class ChokedError(Exception):
    """The step cannot be computed, now or ever."""


class FakeExecutor(rpc.ExecutorServiceServicer):
    """Answers steps while `gate` is open. Every contradiction of a step fails the session and is kept in `faults`.

    Copies from lower tiers to the device run beside the steps, while `copying` is open.
    """

    def __init__(
        self,
        *,
        block_size: int = 4,
        max_tokens: int = 400,
        max_positions: int = 1000,
        epoch: int = 1,
        special_tokens: Sequence[str] = (),
    ) -> None:
        self.executor_id = "executor"
        self.model_name = MODEL
        self.hub_id = ""
        self.model_fingerprint = b"f" * 32
        self.block_size = block_size
        self.max_tokens = max_tokens
        self.max_positions = max_positions
        self.epoch = epoch
        # The newest epoch of a scheduler that has opened a session.
        self.scheduler_epoch = 0
        # Epoch of the cache manager that the session has named last, sequences of another manager, which must leave
        # with the next step, and whether sessions are refused.
        self.manager_epoch = 0
        self._given_up: set[int] = set()
        self.cuts_off = False
        self.tokenizer = byte_level_tokenizer()
        self.tokenizer.add_special_tokens(list(special_tokens))
        self.tokenizer_json = self.tokenizer.to_str().encode()
        self.vocab_size = self.tokenizer.get_vocab_size()
        self.chat_template = CHAT_TEMPLATE
        # Forms of outputs that schedulers asked it to compile.
        self.compiled: list[common.StructuredOutput] = []
        self.grammars = Grammars(self.tokenizer_json, self.vocab_size, [EOS])
        self.eos_token_ids = [EOS]
        # Adapters by name; a restart keeps the adapters from its settings. Identities by path, if not the path's own.
        self.adapters: dict[str, pb.Adapter] = {}
        self.own_adapters: dict[str, pb.Adapter] = {}
        self.contents: dict[str, int] = {}
        self.loads_adapters = True
        # Version and path of its weights, the requested versions, the versions in use so far, and paths without
        # weights.
        self.weights = "", ""
        self.reads: list[str] = []
        self.updates: list[str] = []
        self.broken_weights: set[str] = set()
        # Weights are read while it is set.
        self.reads_weights = asyncio.Event()
        self.reads_weights.set()
        self.window = 0
        self.plain_rotary = False
        # If set, a process with another template replaces this one as soon as a scheduler asks for the model.
        self.restarts_when_described = False
        self.gate = asyncio.Event()
        self.gate.set()
        # Sessions can be opened while it is set.
        self.opens = asyncio.Event()
        self.opens.set()
        # The least time of each step.
        self.step_seconds = 0.0
        self.faults: list[str] = []
        # Whether it announces drafts, and the announced continuations of the sequences that joined.
        self.drafts = False
        self.continuations: list[list[int]] = []
        # How to sample the sequences that joined.
        self.samplings: list[pb.SamplingParams] = []
        # How many drafts each decoding sequence wants in later steps, and how many of the allowed drafts are accepted.
        self.wanted_drafts: Callable[[], int] = lambda: 0
        self.accepted_drafts: Callable[[int], int] = lambda allowed: allowed
        # Ends every session in which it has to compute a sequence with this token.
        self.chokes_on: int | None = None
        self.steps: list[StepLog] = []
        self.sessions = 0
        self.running: dict[int, Running] = {}
        self.copied_tickets: list[int] = []
        self.copying = asyncio.Event()
        self.copying.set()
        # The output of every sequence after its prompt, in place of the model's output.
        self.script: list[int] = []
        # Which copies to the device fail.
        self.fails: Callable[[Copy], bool] = lambda copy: False
        self.onloaded: list[Copy] = []
        # Reported seconds of steps per token, and of copies per block.
        self.token_seconds = 0.0
        self.host_block_seconds: float | None = None
        # Called for every copy, as for the cache manager: for successful copies, and for failed copies.
        self.confirm: Callable[[int], None] = lambda ticket: None
        self.refuse: Callable[[int], None] = lambda ticket: None
        # How often a scheduler's lease at the cache manager has ended: a session ends with its scheduler's lease.
        self.times_left: Callable[[str], int] = lambda scheduler_id: 0
        # Called for every fault, too.
        self.complain: Callable[[str], None] = lambda fault: None
        # The last step that wrote, by group and slot of the device; the copy's ticket, by group, tier and slot.
        self.written: dict[tuple[int, int], int] = {}
        self.generations: dict[tuple[int, int, int], int] = {}
        # Contents by group, tier, slot and offset.
        self._memory: dict[tuple[int, int, int, int], int] = {}
        self._under_way: list[Copy] = []
        # Tickets of copies that an earlier session asked for.
        self._forgotten: set[int] = set()
        # Ended onloads that no result has reported, and whether they succeeded.
        self._ended: dict[int, bool] = {}
        self._copied = asyncio.Event()
        self._copier: asyncio.Task[None] | None = None
        self._break = asyncio.Event()
        # The error that ends the session; None for the end of the stream.
        self._breaks_for: ServiceError | None = None
        self._last_step = 0
        self._stepped = asyncio.Condition()

    def expected(self, prompt: Sequence[int], count: int, seed: int = 0, adapter_id: int = 0) -> list[int]:
        """The expected answer to a request."""
        return continuation(prompt, count, self.vocab_size, seed, adapter_id)

    def say(self, text: str) -> None:
        """From now on every sequence outputs this text and ends."""
        self.script = [*self.tokenizer.encode(text).ids, EOS]

    def content(self, path: str) -> int:
        """The identity of the contents of an adapter's folder."""
        return self.contents.get(path) or int.from_bytes(hashlib.sha256(path.encode()).digest()[:8], "big")

    async def LoadAdapter(self, request: pb.LoadAdapterRequest, context: object) -> pb.LoadAdapterResponse:
        if not self.loads_adapters:
            raise AdaptersFixedError("no adapters are loaded at run time here")
        adapter = pb.Adapter(name=request.name, adapter_id=self.content(request.path), rank=8, path=request.path)
        if self.adapters.setdefault(request.name, adapter).adapter_id != adapter.adapter_id:
            raise AdapterExistsError("another adapter is loaded", fields={"name": "is that of another loaded adapter"})
        return pb.LoadAdapterResponse(adapter=adapter)

    async def UnloadAdapter(self, request: pb.UnloadAdapterRequest, context: object) -> pb.UnloadAdapterResponse:
        if not self.loads_adapters:
            raise AdaptersFixedError("no adapters are unloaded at run time here")
        if request.validate_only:
            return pb.UnloadAdapterResponse()
        used = [one for one in self.running.values() if one.adapter_id == self.adapters[request.name].adapter_id]
        if any(not one.stopped and len(one.token_ids) - one.computed > 1 for one in used):
            self._fault(f"{request.name} is unloaded while a sequence computes with it")
        del self.adapters[request.name]
        return pb.UnloadAdapterResponse()

    async def UpdateWeights(self, request: pb.UpdateWeightsRequest, context: object) -> pb.UpdateWeightsResponse:
        # As in the real executor, the work goes on without its caller.
        return await asyncio.shield(asyncio.create_task(self._update_weights(request)))

    async def _update_weights(self, request: pb.UpdateWeightsRequest) -> pb.UpdateWeightsResponse:
        self.reads.append(request.weight_version)
        if request.path in self.broken_weights:
            raise InvalidField("path", "has no weights")
        await self.reads_weights.wait()
        self.weights = request.weight_version, request.path
        self.updates.append(request.weight_version)
        self._breaks_for = UpdatingWeightsError("the executor is about to compute with other weights")
        self._break.set()
        return pb.UpdateWeightsResponse(other_blocks=7)

    async def CompileGrammar(self, request: pb.CompileGrammarRequest, context: object) -> pb.CompileGrammarResponse:
        await asyncio.to_thread(self.grammars.matcher, parse_grammar(request.structured_output))
        self.compiled.append(request.structured_output)
        return pb.CompileGrammarResponse()

    async def cut_off(self) -> None:
        """Like the real executor: ends the session and refuses new sessions."""
        self.cuts_off = True
        self.break_session()
        self.manager_epoch = 0

    def admit_again(self) -> None:
        """Sessions may be opened again."""
        self.cuts_off = False

    def restart(self) -> None:
        """Loses all memory and breaks the session, like a process that dies and starts again."""
        self.epoch += 1
        self.adapters = dict(self.own_adapters)
        self.weights = "", ""
        self._memory.clear()
        self.written.clear()
        self.generations.clear()
        self._under_way.clear()
        self._ended.clear()
        self._break.set()

    def break_session(self) -> None:
        """Ends only the session."""
        self._break.set()

    @property
    def model(self) -> pb.GetModelResponse:
        """The answer about its model."""
        return pb.GetModelResponse(
            model=self.model_name,
            vocab_size=self.vocab_size,
            max_positions=self.max_positions,
            eos_token_ids=self.eos_token_ids,
            tokenizer_json=self.tokenizer_json,
            chat_template=self.chat_template,
            special_tokens={"eos_token": "<eos>"},
            dtype="float32",
            hub_id=self.hub_id,
        )

    async def GetModel(self, request: pb.GetModelRequest, context: object) -> pb.GetModelResponse:
        if self.restarts_when_described:
            self.restarts_when_described = False
            self.chat_template += "!"
            self.restart()
        return self.model

    async def GetExecutor(self, request: pb.GetExecutorRequest, context: object) -> pb.GetExecutorResponse:
        return pb.GetExecutorResponse(
            executor_id=self.executor_id,
            executor_epoch=self.epoch,
            device="cpu",
            block_size=self.block_size,
            max_tokens=self.max_tokens,
            num_groups=1,
            attention_windows=[self.window],
            plain_rotary=self.plain_rotary,
            scheduler_epoch=self.scheduler_epoch,
            drafts=self.drafts,
            adapters=self.adapters.values(),
            max_adapters=4,
            weight_version=self.weights[0],
            weight_path=self.weights[1],
            model_digest=hashlib.sha256(self.model.SerializeToString(deterministic=True)).digest(),
        )

    async def _read(
        self, messages: AsyncIterator[pb.StreamStepsRequest], over: asyncio.Event
    ) -> pb.StreamStepsRequest | None:
        """The next message; None if there is none, or if the session ends before."""
        reading = asyncio.ensure_future(anext(messages, None))
        broken = asyncio.ensure_future(over.wait())
        await asyncio.wait({reading, broken}, return_when=asyncio.FIRST_COMPLETED)
        broken.cancel()
        if reading.done():
            return reading.result()
        reading.cancel()
        return None

    def _open(self, opening: pb.OpenSession) -> asyncio.Event:
        """Ends the earlier session; returns an event for the end of this session. Raises an executor's refusals."""
        if opening.executor_epoch != self.epoch:
            raise WrongExecutorEpochError(f"executor epoch {opening.executor_epoch} is not this one's, {self.epoch}")
        if opening.scheduler_epoch < self.scheduler_epoch:
            self._fault("a session of an older scheduler")
            raise StaleSchedulerError(f"scheduler epoch {opening.scheduler_epoch} is older")
        if self.cuts_off:
            raise SchedulerLeftError("the scheduler has not registered with the cache manager")
        self.scheduler_epoch = opening.scheduler_epoch
        self.manager_epoch = opening.manager_epoch or UNKNOWN
        self._break.set()
        self._break = asyncio.Event()
        self._breaks_for = None
        self.running = {}
        self._given_up.clear()
        self.sessions += 1
        self._forgotten.update(copy.ticket for copy in self._under_way)
        self._ended.clear()
        return self._break

    def _fault(self, fault: str) -> None:
        self.faults.append(fault)
        self.complain(fault)

    async def StreamSteps(
        self, request_iterator: AsyncIterator[pb.StreamStepsRequest], context: object
    ) -> AsyncIterator[pb.StreamStepsResponse]:
        messages = aiter(request_iterator)
        await self.opens.wait()
        opening = (await anext(messages)).open
        over, times_left = self._open(opening), self.times_left(opening.scheduler_id)
        yield pb.StreamStepsResponse(opened=pb.SessionOpened(first_step=self._last_step + 1))
        while (message := await self._read(messages, over)) is not None:
            if message.HasField("registered"):
                if self.manager_epoch not in (UNKNOWN, message.registered.manager_epoch):
                    self._given_up = set(self.running)
                self.manager_epoch = message.registered.manager_epoch
                continue
            await asyncio.sleep(self.step_seconds)
            open_gate = asyncio.ensure_future(self.gate.wait())
            broken = asyncio.ensure_future(over.wait())
            await asyncio.wait({open_gate, broken}, return_when=asyncio.FIRST_COMPLETED)
            open_gate.cancel()
            broken.cancel()
            if over.is_set():
                break
            if self.times_left(opening.scheduler_id) > times_left:
                raise SchedulerLeftError(f"the lease of scheduler {opening.scheduler_id} has ended")
            try:
                result = self.compute(message.step)
            except AssertionError as error:
                self._fault(str(error))
                return
            except ChokedError:
                return
            async with self._stepped:
                self._stepped.notify_all()
            if message.step.awaits_copies and self._under_way and not self._ended:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(AWAIT_SECONDS):
                        await self._copied.wait()
            self._report_copies(result)
            yield pb.StreamStepsResponse(result=result)
        if over.is_set() and self._breaks_for is not None:
            raise self._breaks_for

    async def stepped(self, count: int) -> None:
        """Waits until `count` steps are computed."""
        async with self._stepped, asyncio.timeout(patience(20)):
            await self._stepped.wait_for(lambda: len(self.steps) >= count)

    def compute(self, step: pb.Step) -> pb.StepResult:
        """Runs one step; asserts everything that the protocol promises."""
        assert step.step == self._last_step + 1, f"step {step.step} after {self._last_step}"
        assert not step.new_sequences or self.manager_epoch != UNKNOWN, "sequences of no cache manager"
        assert self._given_up <= set(step.removed_sequences), "a sequence of an earlier cache manager stays"
        self._given_up.clear()
        self._last_step = step.step
        result = pb.StepResult(step=step.step)
        self._apply_diff(step)
        chunks = dict(zip(step.chunk_sequences, step.chunk_tokens, strict=True))
        counts: dict[int, int] = {}
        for handle, sequence in self.running.items():
            remaining = len(sequence.token_ids) - sequence.computed
            if sequence.stopped:
                assert handle not in chunks, f"{handle} computes though it has stopped"
            elif remaining == 1:
                assert handle not in chunks, f"{handle} decodes by silence and needs no chunk"
                if handle not in step.idle_sequences:
                    counts[handle] = 1
            elif handle in chunks:
                assert 0 < chunks[handle] <= remaining, f"chunk of {chunks[handle]} with {remaining} left"
                counts[handle] = chunks[handle]
        if any(self.chokes_on in self.running[handle].token_ids for handle in counts):
            self._last_step -= 1
            raise ChokedError
        assert set(chunks) <= set(counts), "a chunk for a sequence that is not running"
        # A step after a stop that the scheduler had not seen yet may be empty.
        useful = counts or step.copy_tickets or step.awaits_copies
        assert useful or any(sequence.stopped for sequence in self.running.values()), "a step that does nothing"
        assert not (counts and step.awaits_copies), "a step that waits for copies and computes"
        drafts = dict(zip(step.draft_sequences, step.draft_tokens, strict=True))
        for handle, count in counts.items():
            self._write(handle, count)
        result.num_tokens = sum(counts.values())
        for handle, count in counts.items():
            self._sample(handle, count, result)
        for handle, allowed in drafts.items():
            assert allowed > 0, f"no drafts for {handle}"
            assert self.running[handle].stopped or counts.get(handle) == 1, f"drafts of {handle}, which does not decode"
            if handle in counts:
                self._draft(handle, allowed, result)
        result.compute_time.FromNanoseconds(int(result.num_tokens * self.token_seconds * 1e9))
        self.steps.append(StepLog(result.num_tokens, list(counts)))
        return result

    def _apply_diff(self, step: pb.Step) -> None:
        for handle in step.removed_sequences:
            assert self.running.pop(handle, None) is not None, f"{handle} removed though it is not running"
        for new in step.new_sequences:
            assert new.sequence not in self.running, f"{new.sequence} joins twice"
            assert new.num_computed_tokens < len(new.token_ids), "nothing left to compute"
            self.continuations.append(list(new.continuation_token_ids))
            self.samplings.append(new.sampling)
            assert 0 < new.num_prompt_tokens <= len(new.token_ids), "prompt tokens"
            tables = {table.group: list(table.slots) for table in new.block_tables}
            loaded = {adapter.adapter_id for adapter in self.adapters.values()}
            assert not new.HasField("adapter_id") or new.adapter_id in loaded, f"{new.sequence}: an unknown adapter"
            self.running[new.sequence] = Running(
                list(new.token_ids),
                new.num_prompt_tokens,
                new.num_computed_tokens,
                tables,
                new.sampling,
                new.adapter_id,
            )
        start = 0
        for handle, group, count in zip(step.table_sequences, step.table_groups, step.table_counts, strict=True):
            assert handle in self.running, f"table of {handle} grows though it is not running"
            self.running[handle].tables[group] += step.table_slots[start : start + count]
            start += count
        assert start == len(step.table_slots), "slots of no sequence"
        assert set(step.idle_sequences) <= set(self.running), "an idle sequence that is not running"
        for copy in _copies(step):
            busy = [place for other in self._under_way for place in (_source(other), _target(other))]
            assert _source(copy) not in busy or copy.is_onload, f"{copy} reads what a copy under way writes"
            assert _target(copy) not in busy, f"{copy} writes where a copy is under way"
            if copy.is_onload:
                self._under_way.append(copy)
                self._copier = self._copier or asyncio.ensure_future(self._copy())
            else:
                self._run(copy)
        arriving = {_target(copy) for copy in self._under_way}
        for handle, sequence in self.running.items():
            places = {(group, Tier.DEVICE, slot) for group, table in sequence.tables.items() for slot in table}
            assert not places & arriving, f"{handle} runs before its blocks are there"

    def transfer(self, copy: Copy) -> None:
        """Runs a copy of the cache manager itself; a copy without a source clears its target."""
        self._run(copy)

    @property
    def arriving(self) -> set[int]:
        """Slots of the device that copies under way write."""
        return {copy.target_slot for copy in self._under_way}

    @property
    def last_step(self) -> int:
        """Number of the newest step that has begun."""
        return self._last_step

    def _run(self, copy: Copy) -> None:
        self.copied_tickets.append(copy.ticket)
        if copy.target_tier == Tier.DEVICE:
            self.written[copy.group, copy.target_slot] = self._last_step
        else:
            self.generations[_target(copy)] = copy.ticket
        for offset in range(self.block_size):
            held = self._memory.get((*_source(copy), offset))
            if held is None:
                self._memory.pop((*_target(copy), offset), None)
            else:
                self._memory[(*_target(copy), offset)] = held
        self.confirm(copy.ticket)

    async def _copy(self) -> None:
        """Ends copies from lower tiers, one after the other, while `copying` is set."""
        while self._under_way:
            await self.copying.wait()
            await asyncio.sleep(0)
            if not self.copying.is_set() or not self._under_way:
                continue
            copy = self._under_way.pop(0)
            ended_well = not self.fails(copy)
            if copy.ticket in self._forgotten:
                self._forgotten.remove(copy.ticket)
            else:
                self._ended[copy.ticket] = ended_well
                self._copied.set()
            if ended_well:
                self._run(copy)
                self.onloaded.append(copy)
            else:
                self.refuse(copy.ticket)
        self._copier = None

    def _report_copies(self, result: pb.StepResult) -> None:
        result.copied_tickets.extend(self._ended)
        result.failed_tickets.extend(ticket for ticket, well in self._ended.items() if not well)
        if self._ended and self.host_block_seconds is not None:
            result.host_block_time.FromNanoseconds(int(self.host_block_seconds * 1e9))
        self._ended.clear()
        self._copied.clear()

    def _write(self, handle: int, count: int, *, wrong: bool = False) -> None:
        sequence = self.running[handle]
        for group, table in sequence.tables.items():
            assert sequence.computed + count <= len(table) * self.block_size, f"{handle} computes beyond its capacity"
            assert 0 not in table, "the null block in a table"
            for position in range(sequence.computed, sequence.computed + count):
                place = (group, Tier.DEVICE, table[position // self.block_size], position % self.block_size)
                self._memory[place] = -1 if wrong else sequence.fingerprints[position]
                self.written[group, place[2]] = self._last_step

    def _draft(self, handle: int, allowed: int, result: pb.StepResult) -> None:
        """Computes drafts after the token that was just sampled; some of them are right."""
        sequence, accepted = self.running[handle], self.accepted_drafts(allowed)
        result.num_drafts += allowed
        result.num_tokens += allowed
        for index in range(allowed):
            if index >= accepted or sequence.stopped:
                # A wrong draft leaves its own fingerprint in a slot without a computed token.
                self._write(handle, allowed - index, wrong=True)
                return
            self._write(handle, 1)
            self._sample(handle, 1, result)

    def _score(self, handle: int, count: int, result: pb.StepResult) -> None:
        """Log-probabilities of the prompt's tokens after those just computed: each encodes its token."""
        sequence, most = self.running[handle], self.running[handle].sampling.num_prompt_logprobs
        first, last = sequence.computed - count + 1, min(sequence.computed + 1, sequence.prompt_tokens)
        if first < last:
            scored = result.prompt_logprobs.add(sequence=handle)
            for position in range(first, last):
                scored.logprobs.add(
                    index=position,
                    logprob=-float(sequence.token_ids[position]),
                    top_token_ids=range(most),
                    top_logprobs=[-1.0 - rank for rank in range(most)],
                    rank=position,
                )

    def _next(self, sequence: Running, wanted: int) -> int | None:
        """The token that the model wants, or another token that its restrictions allow; None if its grammar fails."""
        if not sequence.sampling.HasField("structured_output"):
            return wanted
        if sequence.matcher is None:
            sequence.matcher = self.grammars.matcher(parse_grammar(sequence.sampling.structured_output))
        output = sequence.token_ids[sequence.prompt_tokens :]
        sequence.matcher.take(output[sequence.matched :])
        sequence.matched = len(output)
        [mask] = masks = np.zeros((1, self.grammars.words), dtype=np.uint32)
        if sequence.matcher.fill(masks, ()) is not None:
            return None
        allowed = np.flatnonzero(unpacked(mask, self.vocab_size))
        return wanted if wanted in allowed else int(allowed[wanted % len(allowed)])

    def _sample(self, handle: int, count: int, result: pb.StepResult) -> None:
        sequence = self.running[handle]
        sequence.computed += count
        for group, table in sequence.tables.items():
            for position in range(sequence.computed):
                place = (group, Tier.DEVICE, table[position // self.block_size], position % self.block_size)
                right = self._memory.get(place) == sequence.fingerprints[position]
                assert right, f"{handle} reads another sequence's token at {position}"
        if sequence.sampling.HasField("num_prompt_logprobs"):
            self._score(handle, count, result)
        if sequence.computed < len(sequence.token_ids):
            return
        seed = sequence.sampling.seed if sequence.sampling.temperature else 0
        said = len(sequence.token_ids) - sequence.prompt_tokens
        token = next_token(sequence.fingerprints[-1], self.vocab_size, seed)
        if self.script:
            token = self.script[said] if said < len(self.script) else EOS
        chosen = self._next(sequence, token)
        if chosen is None:
            result.failed_sequences.append(handle)
        token = EOS if chosen is None else chosen
        sequence.append(token)
        sequence.stopped = token in sequence.stop_ids
        result.sequences.append(handle)
        result.token_ids.append(token)
        result.stopped.append(sequence.stopped)
        wanted = self.wanted_drafts()
        if wanted and handle not in result.draft_sequences:
            result.draft_sequences.append(handle)
            result.draft_tokens.append(wanted)
        if sequence.sampling.HasField("num_logprobs"):
            count = sequence.sampling.num_logprobs
            likely = [-1.0 - rank for rank in range(count)]
            index = len(result.sequences) - 1
            result.logprobs.add(index=index, logprob=-0.5, top_token_ids=range(count), top_logprobs=likely)


def _source(copy: Copy) -> tuple[int, int, int]:
    return copy.group, copy.source_tier, copy.source_slot


def _target(copy: Copy) -> tuple[int, int, int]:
    return copy.group, copy.target_tier, copy.target_slot


def _copies(step: pb.Step) -> Iterator[Copy]:
    within = [Tier.DEVICE] * len(step.copy_tickets)
    columns = (step.copy_tickets, step.copy_groups, step.copy_source_slots, step.copy_target_slots)
    tiers = (map(Tier, step.copy_source_tiers or within), map(Tier, step.copy_target_tiers or within))
    return (Copy(*fields) for fields in zip(*columns, *tiers, strict=True))
