"""An executor without a model: strict about the protocol, and able to notice when a block holds the wrong tokens."""

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field

from protos.execution.v1 import execution_pb2 as pb
from protos.execution.v1 import execution_pb2_grpc as rpc
from scheduler.request import Tier
from scheduler.sequence import Copy
from tests.support.scheduler.tokenizers import CHAT_TEMPLATE, EOS, byte_level_tokenizer

MODEL = "fake"
AWAIT_SECONDS = 0.02


def fingerprint(token_ids: Sequence[int]) -> int:
    """What a block's slot holds once the last of these tokens is computed."""
    digest = hashlib.sha256(b"".join(token.to_bytes(4, "big") for token in token_ids))
    return int.from_bytes(digest.digest()[:8], "big")


def next_token(token_ids: Sequence[int], vocab_size: int, seed: int = 0) -> int:
    """The model: a function of everything before. Never the end-of-sequence id."""
    token = (fingerprint(token_ids) ^ seed) % vocab_size
    return token if token != EOS else (token + 1) % vocab_size


def continuation(prompt: Sequence[int], count: int, vocab_size: int, seed: int = 0) -> list[int]:
    """What the fake model generates for a prompt."""
    token_ids = list(prompt)
    for _ in range(count):
        token_ids.append(next_token(token_ids, vocab_size, seed))
    return token_ids[len(prompt) :]


@dataclass
class Running:
    """A sequence of the running set."""

    token_ids: list[int]
    prompt_tokens: int
    computed: int
    tables: dict[int, list[int]]
    sampling: pb.SamplingParams
    stopped: bool = False


@dataclass
class StepLog:
    """What a step computed."""

    tokens: int
    sequences: list[int] = field(default_factory=list)


class ChokedError(Exception):
    """The step cannot be computed, now or ever."""


class FakeExecutor(rpc.ExecutorServiceServicer):
    """Answers steps while `gate` is open. Every contradiction of a step fails the session and is kept in `faults`.

    Copies from lower tiers to the device run beside the steps, while `copying` is open.
    """

    def __init__(
        self, *, block_size: int = 4, max_tokens: int = 400, max_positions: int = 1000, epoch: int = 1
    ) -> None:
        self.executor_id = "executor"
        self.block_size = block_size
        self.max_tokens = max_tokens
        self.max_positions = max_positions
        self.epoch = epoch
        # Newest epoch of a scheduler that has opened a session.
        self.scheduler_epoch = 0
        self.tokenizer = byte_level_tokenizer()
        self.tokenizer_json = self.tokenizer.to_str().encode()
        self.vocab_size = self.tokenizer.get_vocab_size()
        self.chat_template = CHAT_TEMPLATE
        self.eos_token_ids = [EOS]
        self.window = 0
        self.plain_rotary = False
        # Another process with another template replaces it as soon as a scheduler asks for the model.
        self.restarts_when_described = False
        self.gate = asyncio.Event()
        self.gate.set()
        # How long each step takes at least.
        self.step_seconds = 0.0
        self.faults: list[str] = []
        # Ends every session in which it has to compute a sequence with this token.
        self.chokes_on: int | None = None
        self.steps: list[StepLog] = []
        self.sessions = 0
        self.running: dict[int, Running] = {}
        self.copied_tickets: list[int] = []
        self.copying = asyncio.Event()
        self.copying.set()
        # Which copies to the device fail.
        self.fails: Callable[[Copy], bool] = lambda copy: False
        self.onloaded: list[Copy] = []
        # Seconds that steps are said to have taken per token, and copies per block.
        self.token_seconds = 0.0
        self.host_block_seconds: float | None = None
        # Hears of every copy, as the cache manager does: those that ended well, and others.
        self.confirm: Callable[[int], None] = lambda ticket: None
        self.refuse: Callable[[int], None] = lambda ticket: None
        # By group, tier, slot and offset.
        self._memory: dict[tuple[int, int, int, int], int] = {}
        self._under_way: list[Copy] = []
        # Ended onloads that no result has reported, and whether they succeeded.
        self._ended: dict[int, bool] = {}
        self._copied = asyncio.Event()
        self._copier: asyncio.Task[None] | None = None
        self._break = asyncio.Event()
        self._last_step = 0
        self._stepped = asyncio.Condition()

    def expected(self, prompt: Sequence[int], count: int, seed: int = 0) -> list[int]:
        """What a request must answer."""
        return continuation(prompt, count, self.vocab_size, seed)

    def restart(self) -> None:
        """Loses all memory and breaks the session, as a process that dies and starts again."""
        self.epoch += 1
        self._memory.clear()
        self._under_way.clear()
        self._ended.clear()
        self._break.set()

    def break_session(self) -> None:
        """Ends the session and nothing else."""
        self._break.set()

    @property
    def model(self) -> pb.GetModelResponse:
        """What it says of its model."""
        return pb.GetModelResponse(
            model=MODEL,
            vocab_size=self.vocab_size,
            max_positions=self.max_positions,
            eos_token_ids=self.eos_token_ids,
            tokenizer_json=self.tokenizer_json,
            chat_template=self.chat_template,
            special_tokens={"eos_token": "<eos>"},
            dtype="float32",
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
            model_digest=hashlib.sha256(self.model.SerializeToString(deterministic=True)).digest(),
        )

    async def _read(self, messages: AsyncIterator[pb.StreamStepsRequest]) -> pb.StreamStepsRequest | None:
        """The next message; None when there is none, or the session breaks before it comes."""
        reading = asyncio.ensure_future(anext(messages, None))
        broken = asyncio.ensure_future(self._break.wait())
        await asyncio.wait({reading, broken}, return_when=asyncio.FIRST_COMPLETED)
        broken.cancel()
        if reading.done():
            return reading.result()
        reading.cancel()
        return None

    async def StreamSteps(
        self, request_iterator: AsyncIterator[pb.StreamStepsRequest], context: object
    ) -> AsyncIterator[pb.StreamStepsResponse]:
        self._break = asyncio.Event()
        self.running = {}
        self.sessions += 1
        first = await anext(aiter(request_iterator))
        assert first.open.executor_epoch == self.epoch
        if first.open.scheduler_epoch < self.scheduler_epoch:
            self.faults.append("a session of an older scheduler")
            return
        self.scheduler_epoch = first.open.scheduler_epoch
        yield pb.StreamStepsResponse(opened=pb.SessionOpened(first_step=self._last_step + 1))
        messages = aiter(request_iterator)
        while (message := await self._read(messages)) is not None:
            await asyncio.sleep(self.step_seconds)
            open_gate = asyncio.ensure_future(self.gate.wait())
            broken = asyncio.ensure_future(self._break.wait())
            await asyncio.wait({open_gate, broken}, return_when=asyncio.FIRST_COMPLETED)
            open_gate.cancel()
            broken.cancel()
            if self._break.is_set():
                return
            try:
                result = self.compute(message.step)
            except AssertionError as error:
                self.faults.append(str(error))
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

    async def stepped(self, count: int) -> None:
        """Waits until so many steps are computed."""
        async with self._stepped, asyncio.timeout(20):
            await self._stepped.wait_for(lambda: len(self.steps) >= count)

    def compute(self, step: pb.Step) -> pb.StepResult:
        """Runs one step; asserts everything that the protocol promises."""
        assert step.step == self._last_step + 1, f"step {step.step} behind {self._last_step}"
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
        # A step behind a stop that was not seen yet may turn out empty.
        useful = counts or step.copy_tickets or step.awaits_copies
        assert useful or any(sequence.stopped for sequence in self.running.values()), "a step that does nothing"
        assert not (counts and step.awaits_copies), "a step that waits for copies and computes"
        for handle, count in counts.items():
            self._write(handle, count)
        result.num_tokens = sum(counts.values())
        for handle, count in counts.items():
            self._sample(handle, count, result)
        result.compute_time.FromNanoseconds(int(result.num_tokens * self.token_seconds * 1e9))
        self.steps.append(StepLog(result.num_tokens, list(counts)))
        return result

    def _apply_diff(self, step: pb.Step) -> None:
        for handle in step.removed_sequences:
            assert self.running.pop(handle, None) is not None, f"{handle} removed though it is not running"
        for new in step.new_sequences:
            assert new.sequence not in self.running, f"{new.sequence} joins twice"
            assert new.num_computed_tokens < len(new.token_ids), "nothing left to compute"
            assert 0 < new.num_prompt_tokens <= len(new.token_ids), "prompt tokens"
            tables = {table.group: list(table.slots) for table in new.block_tables}
            self.running[new.sequence] = Running(
                list(new.token_ids), new.num_prompt_tokens, new.num_computed_tokens, tables, new.sampling
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

    def _run(self, copy: Copy) -> None:
        self.copied_tickets.append(copy.ticket)
        for offset in range(self.block_size):
            held = self._memory.get((*_source(copy), offset))
            if held is None:
                self._memory.pop((*_target(copy), offset), None)
            else:
                self._memory[(*_target(copy), offset)] = held
        self.confirm(copy.ticket)

    async def _copy(self) -> None:
        """Ends copies from lower tiers, one after the other, while it may."""
        while self._under_way:
            await self.copying.wait()
            await asyncio.sleep(0)
            if not self.copying.is_set() or not self._under_way:
                continue
            copy = self._under_way.pop(0)
            self._ended[copy.ticket] = not self.fails(copy)
            if self._ended[copy.ticket]:
                self._run(copy)
                self.onloaded.append(copy)
            else:
                self.refuse(copy.ticket)
            self._copied.set()
        self._copier = None

    def _report_copies(self, result: pb.StepResult) -> None:
        result.copied_tickets.extend(self._ended)
        result.failed_tickets.extend(ticket for ticket, well in self._ended.items() if not well)
        if self._ended and self.host_block_seconds is not None:
            result.host_block_time.FromNanoseconds(int(self.host_block_seconds * 1e9))
        self._ended.clear()
        self._copied.clear()

    def _write(self, handle: int, count: int) -> None:
        sequence = self.running[handle]
        for group, table in sequence.tables.items():
            assert sequence.computed + count <= len(table) * self.block_size, f"{handle} computes beyond its capacity"
            assert 0 not in table, "the null block in a table"
            for position in range(sequence.computed, sequence.computed + count):
                place = (group, Tier.DEVICE, table[position // self.block_size], position % self.block_size)
                self._memory[place] = fingerprint(sequence.token_ids[: position + 1])

    def _sample(self, handle: int, count: int, result: pb.StepResult) -> None:
        sequence = self.running[handle]
        sequence.computed += count
        for group, table in sequence.tables.items():
            for position in range(sequence.computed):
                place = (group, Tier.DEVICE, table[position // self.block_size], position % self.block_size)
                right = fingerprint(sequence.token_ids[: position + 1])
                assert self._memory.get(place) == right, f"{handle} reads another sequence's token at {position}"
        if sequence.computed < len(sequence.token_ids):
            return
        seed = sequence.sampling.seed if sequence.sampling.temperature else 0
        token = next_token(sequence.token_ids, self.vocab_size, seed)
        sequence.token_ids.append(token)
        sequence.stopped = token in sequence.sampling.stop_token_ids
        result.sequences.append(handle)
        result.token_ids.append(token)
        result.stopped.append(sequence.stopped)
        if sequence.sampling.HasField("num_logprobs"):
            count = sequence.sampling.num_logprobs
            result.logprobs.add(
                index=len(result.sequences) - 1, logprob=-0.5, top_token_ids=range(count), top_logprobs=[-1.0] * count
            )


def _source(copy: Copy) -> tuple[int, int, int]:
    return copy.group, copy.source_tier, copy.source_slot


def _target(copy: Copy) -> tuple[int, int, int]:
    return copy.group, copy.target_tier, copy.target_slot


def _copies(step: pb.Step) -> Iterator[Copy]:
    within = [Tier.DEVICE] * len(step.copy_tickets)
    columns = (step.copy_tickets, step.copy_groups, step.copy_source_slots, step.copy_target_slots)
    tiers = (map(Tier, step.copy_source_tiers or within), map(Tier, step.copy_target_tiers or within))
    return (Copy(*fields) for fields in zip(*columns, *tiers, strict=True))
