"""ExecutorService: moves messages between the stream and the device's thread."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from executor.core import worker as workers
from executor.core.outbox import Answer, Session
from executor.core.runner import Runner
from executor.core.worker import Worker
from executor.errors import (
    ExecutorInUseError,
    InvalidStepError,
    SessionNotOpenError,
    SessionReplacedError,
    StaleSchedulerError,
    StoppingError,
    WrongExecutorEpochError,
)
from executor.models.forward import Model
from executor.models.tokenizer import TokenizerFiles
from executor.rpc.convert import build_result, parse_step
from executor.step import Step, StepOutput
from protos.execution.v1 import execution_pb2 as pb
from protos.execution.v1 import execution_pb2_grpc as rpc
from protos.rpc.errors import ServiceError
from protos.rpc.identity import current

SERVICE = "execution.v1.ExecutorService"


@dataclass(frozen=True)
class Identity:
    """Name and epoch of an executor; each of its processes has a larger epoch."""

    executor_id: str
    epoch: int


class Sessions:
    """Fences sessions by scheduler and epoch."""

    def __init__(self, executor_epoch: int, is_registered: Callable[[str], bool]) -> None:
        """is_registered: whether the cache manager has a scheduler of this id."""
        self._executor_epoch = executor_epoch
        self._is_registered = is_registered
        # Of the last session.
        self._scheduler_id = ""
        self._scheduler_epoch = 0
        self._current: Session | None = None
        self._stopping = False

    def open(self, session: Session, *, scheduler_id: str, scheduler_epoch: int, executor_epoch: int) -> None:
        """Makes a session the current one and ends the session before.

        The same scheduler may come again after a broken stream. Another scheduler may come when the lease of the one
        before has ended: until then its sequences run here. Raises StaleSchedulerError, WrongExecutorEpochError,
        ExecutorInUseError or StoppingError, and the session before stays.
        """
        if self._stopping:
            raise StoppingError("the executor is stopping")
        if executor_epoch != self._executor_epoch:
            raise WrongExecutorEpochError(
                f"executor epoch {executor_epoch} is not this one's, {self._executor_epoch}",
                fields={"open.executor_epoch": f"must be {self._executor_epoch}"},
            )
        if scheduler_epoch < self._scheduler_epoch:
            raise StaleSchedulerError(
                f"scheduler epoch {scheduler_epoch} is older than {self._scheduler_epoch}",
                fields={"open.scheduler_epoch": f"must be at least {self._scheduler_epoch}"},
            )
        if scheduler_id != self._scheduler_id and self._is_registered(self._scheduler_id):
            raise ExecutorInUseError(
                f"the executor runs steps for scheduler {self._scheduler_id}, whose lease has not ended",
                fields={"open.scheduler_id": f"must be {self._scheduler_id}"},
                retry_after=1.0,
            )
        self._scheduler_id, self._scheduler_epoch = scheduler_id, scheduler_epoch
        if self._current is not None:
            self._current.end(SessionReplacedError("a later session took over"))
        self._current = session

    @property
    def scheduler_epoch(self) -> int:
        """Epoch of the newest scheduler that has opened a session; 0 before."""
        return self._scheduler_epoch

    def stop(self) -> Session | None:
        """Refuses new sessions from now on; returns the current one, for it to be ended."""
        self._stopping = True
        return self._current


class ExecutorServicer(rpc.ExecutorServiceServicer):
    """Served on one asyncio loop."""

    def __init__(
        self,
        identity: Identity,
        runner: Runner,
        worker: Worker,
        tokenizer: TokenizerFiles,
        is_registered: Callable[[str], bool],
    ) -> None:
        """is_registered: whether the cache manager has a scheduler of this id."""
        self._identity = identity
        self._runner = runner
        self._worker = worker
        self._sessions = Sessions(identity.epoch, is_registered)
        self._layout = runner.layout
        self._model = _describe(runner.model, tokenizer)
        self._digest = hashlib.sha256(self._model.SerializeToString(deterministic=True)).digest()

    def stop(self) -> None:
        """Ends the session, behind the steps that it has submitted, so that the server need not wait for it."""
        session = self._sessions.stop()
        if session is not None:
            error = StoppingError("the executor is stopping")
            self._worker.close(session, error)
            # A device that stands still answers no step.
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
        )

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
        if (caller := current()) is not None:
            caller.check_id(opening.scheduler_id, "open.scheduler_id")
        self._sessions.open(
            session,
            scheduler_id=opening.scheduler_id,
            scheduler_epoch=opening.scheduler_epoch,
            executor_epoch=opening.executor_epoch,
        )
        self._worker.open(session)
        reader = asyncio.create_task(self._read(requests, session))
        # When the reader ends, the answers must end too.
        reader.add_done_callback(lambda _: None if session.closed else self._worker.close(session))
        try:
            while (answer := await answers.get()) is not None:
                yield _response(answer)
            reader.result()
        finally:
            session.closed = True
            reader.cancel()

    async def _read(self, requests: AsyncIterator[pb.StreamStepsRequest], session: Session) -> None:
        try:
            async for request in requests:
                if request.WhichOneof("kind") != "step":
                    raise SessionNotOpenError("only the first message opens a session", fields={"step": "must be set"})
                self._worker.submit(session, self._parse(request.step))
        except ServiceError as error:
            session.end(error)

    def _parse(self, message: pb.Step) -> Step:
        try:
            return parse_step(message, self._layout)
        except InvalidStepError:
            # Its copies will not run: their blocks must not stay reserved.
            self._worker.give_up(tuple(message.copy_tickets))
            raise


def _describe(model: Model, tokenizer: TokenizerFiles) -> pb.GetModelResponse:
    return pb.GetModelResponse(
        model=model.name,
        vocab_size=model.vocab_size,
        max_positions=model.max_positions,
        eos_token_ids=model.eos_token_ids,
        tokenizer_json=tokenizer.json,
        chat_template=tokenizer.chat_template,
        special_tokens=tokenizer.special_tokens,
        dtype=str(model.dtype).removeprefix("torch."),
    )


def _response(answer: int | StepOutput | ServiceError) -> pb.StreamStepsResponse:
    if isinstance(answer, ServiceError):
        raise answer
    if isinstance(answer, int):
        return pb.StreamStepsResponse(opened=pb.SessionOpened(first_step=answer))
    return pb.StreamStepsResponse(result=build_result(answer))
