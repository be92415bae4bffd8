"""ExecutorService: moves messages between the stream and the device's thread."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from executor.core import worker as workers
from executor.core.adapters import Adapters, LoadedAdapter
from executor.core.outbox import Answer, Session
from executor.core.runner import Runner
from executor.core.worker import Worker
from executor.errors import (
    GrammarError,
    InvalidStepError,
    SchedulerLeftError,
    SessionNotOpenError,
    StoppingError,
)
from executor.models.tokenizer import TokenizerFiles
from executor.rpc.convert import build_result, parse_grammar, parse_step
from executor.rpc.sessions import SchedulerLeases, Sessions
from executor.rpc.weights import WeightUpdates
from executor.step import Step, StepOutput
from protos.execution.v1 import execution_pb2 as pb
from protos.execution.v1 import execution_pb2_grpc as rpc
from protos.rpc.epochs import check_epoch
from protos.rpc.errors import ServiceError
from protos.rpc.identity import current

SERVICE = "execution.v1.ExecutorService"


@dataclass(frozen=True)
class Identity:
    """Name and epoch of an executor; each of its processes has a larger epoch than the previous one."""

    executor_id: str
    epoch: int


class ExecutorServicer(rpc.ExecutorServiceServicer):
    """Served on one asyncio loop."""

    def __init__(
        self,
        identity: Identity,
        runner: Runner,
        worker: Worker,
        tokenizer: TokenizerFiles,
        leases: SchedulerLeases,
        adapters: Adapters,
        sessions: Sessions,
        weights: WeightUpdates,
        *,
        hub_id: str = "",
        max_batched_tokens: int = 0,
    ) -> None:
        """hub_id: the model's id on a hub, if known. max_batched_tokens: most tokens of a step on a GPU."""
        self._leases = leases
        self._adapters = adapters
        self._identity = identity
        self._runner = runner
        self._worker = worker
        self._sessions = sessions
        self._weights = weights
        self._layout = runner.layout
        self._max_batched_tokens = max_batched_tokens
        self._model = _describe(runner, tokenizer, hub_id)
        self._digest = hashlib.sha256(self._model.SerializeToString(deterministic=True)).digest()

    def stop(self) -> None:
        """Ends the session after the steps that it has submitted, so that the server need not wait for it."""
        error = StoppingError("the executor is stopping")
        session = self._sessions.suspend(error)
        if session is not None:
            self._worker.close(session, error)
            # A device that hangs answers no step.
            asyncio.get_running_loop().call_later(workers.STOP_SECONDS, session.end, error)

    async def GetModel(self, _request: pb.GetModelRequest, _context: Any) -> pb.GetModelResponse:  # noqa: N802
        return self._model

    async def GetExecutor(self, _request: pb.GetExecutorRequest, _context: Any) -> pb.GetExecutorResponse:  # noqa: N802
        pools = self._runner.pools
        return pb.GetExecutorResponse(
            executor_id=self._identity.executor_id,
            executor_epoch=self._identity.epoch,
            device=str(self._runner.model.device),
            block_size=pools.block_size,
            max_tokens=pools.max_tokens,
            last_step=self._runner.last_step,
            num_sequences=self._runner.num_sequences,
            num_groups=len(pools.pools),
            attention_windows=[window or 0 for window in self._layout.windows],
            plain_rotary=self._layout.plain_rotary,
            model_digest=self._digest,
            scheduler_epoch=self._sessions.scheduler_epoch,
            drafts=self._runner.drafts,
            adapters=map(_adapter, self._adapters.loaded),
            max_adapters=self._adapters.most,
            weight_version=self._weights.version,
            weight_path=self._weights.path,
        )

    async def LoadAdapter(self, request: pb.LoadAdapterRequest, _context: Any) -> pb.LoadAdapterResponse:  # noqa: N802
        return pb.LoadAdapterResponse(adapter=_adapter(await self._adapters.load(request.name, request.path)))

    async def UnloadAdapter(  # noqa: N802
        self, request: pb.UnloadAdapterRequest, _context: Any
    ) -> pb.UnloadAdapterResponse:
        await self._adapters.unload(request.name, validate_only=request.validate_only)
        return pb.UnloadAdapterResponse()

    async def UpdateWeights(  # noqa: N802
        self, request: pb.UpdateWeightsRequest, _context: Any
    ) -> pb.UpdateWeightsResponse:
        return pb.UpdateWeightsResponse(other_blocks=await self._weights.update(request.weight_version, request.path))

    async def CompileGrammar(  # noqa: N802
        self, request: pb.CompileGrammarRequest, _context: Any
    ) -> pb.CompileGrammarResponse:
        # In a thread: a large grammar takes a second.
        await asyncio.to_thread(self._runner.grammars.matcher, parse_grammar(request.structured_output))
        return pb.CompileGrammarResponse()

    async def StreamSteps(  # noqa: N802
        self, requests: AsyncIterator[pb.StreamStepsRequest], _context: Any
    ) -> AsyncIterator[pb.StreamStepsResponse]:
        first = await anext(requests, pb.StreamStepsRequest())
        if first.WhichOneof("kind") != "open":
            raise SessionNotOpenError("the first message must open the session", fields={"open": "must be set"})
        loop = asyncio.get_running_loop()
        answers: asyncio.Queue[Answer] = asyncio.Queue()

        def deliver(answer: Answer) -> None:
            loop.call_soon_threadsafe(answers.put_nowait, answer)

        session, opening = Session(deliver), first.open
        check_epoch("open.scheduler_epoch", opening.scheduler_epoch, self._sessions.scheduler_epoch)
        if (caller := current()) is not None:
            caller.check_id(opening.scheduler_id, "open.scheduler_id")
        self._sessions.open(
            session,
            scheduler_id=opening.scheduler_id,
            scheduler_epoch=opening.scheduler_epoch,
            executor_epoch=opening.executor_epoch,
        )
        self._worker.open(session)
        self._sessions.registered(session, opening.manager_epoch)
        reader = asyncio.create_task(self._read(requests, session, opening.scheduler_id))
        # When the reader ends, the answers must end too.
        reader.add_done_callback(lambda _: None if session.closed else self._worker.close(session))
        try:
            while (answer := await answers.get()) is not None:
                yield self._response(answer)
            reader.result()
        finally:
            session.closed = True
            reader.cancel()

    def _response(self, answer: int | StepOutput | ServiceError) -> pb.StreamStepsResponse:
        if isinstance(answer, ServiceError):
            raise answer
        if isinstance(answer, StepOutput):
            return pb.StreamStepsResponse(result=build_result(answer))
        limit = self._max_batched_tokens if self._runner.model.device.type == "cuda" else 0
        return pb.StreamStepsResponse(opened=pb.SessionOpened(first_step=answer, max_batched_tokens=limit))

    async def _read(self, requests: AsyncIterator[pb.StreamStepsRequest], session: Session, scheduler_id: str) -> None:
        times_left = self._leases.times_left(scheduler_id)
        try:
            async for request in requests:
                kind = request.WhichOneof("kind")
                if kind == "registered":
                    self._sessions.registered(session, request.registered.manager_epoch)
                    continue
                if kind != "step":
                    raise SessionNotOpenError("only the first message opens a session", fields={"step": "must be set"})
                if self._leases.times_left(scheduler_id) > times_left:
                    # A scheduler that was paused does not know this yet; its next session begins without its blocks.
                    self._worker.give_up(tuple(request.step.copy_tickets))
                    raise SchedulerLeftError(f"the lease of scheduler {scheduler_id} has ended: open a new session")
                step = self._parse(request.step)
                await self._compile(step)
                self._worker.submit(session, step)
        except ServiceError as error:
            session.end(error)

    async def _compile(self, step: Step) -> None:
        """Compiles the grammars of joining sequences: most are compiled already, but none after a restart."""
        grammars = self._runner.grammars
        for new in step.new_sequences:
            grammar = new.sampling.grammar
            if grammar is None or not grammars.lacks(grammar):
                continue
            try:
                await asyncio.to_thread(grammars.matcher, grammar)
            except GrammarError:
                # Preparing the step raises this error again, as an InvalidStepError.
                continue
            except asyncio.CancelledError:
                self._worker.give_up(step.tickets)
                raise

    def _parse(self, message: pb.Step) -> Step:
        try:
            return parse_step(message, self._layout)
        except InvalidStepError:
            # The step's copies will not run: their blocks must not stay reserved.
            self._worker.give_up(tuple(message.copy_tickets))
            raise


def _adapter(loaded: LoadedAdapter) -> pb.Adapter:
    return pb.Adapter(name=loaded.name, adapter_id=loaded.adapter_id, rank=loaded.rank, path=loaded.path)


def _describe(runner: Runner, tokenizer: TokenizerFiles, hub_id: str) -> pb.GetModelResponse:
    model = runner.model
    return pb.GetModelResponse(
        model=model.name,
        vocab_size=model.vocab_size,
        max_positions=model.max_positions,
        eos_token_ids=model.eos_token_ids,
        tokenizer_json=tokenizer.json,
        chat_template=tokenizer.chat_template,
        special_tokens=tokenizer.special_tokens,
        dtype=str(model.dtype).removeprefix("torch."),
        kv_cache_dtype=str(runner.pools.dtype).removeprefix("torch."),
        hub_id=hub_id,
    )
