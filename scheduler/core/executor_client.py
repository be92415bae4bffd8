"""The step loop's session with the executor, over a synchronous stream."""

import queue
import threading
import time
from collections.abc import Callable, Sequence

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.execution.v1 import execution_pb2 as pb
from protos.execution.v1 import execution_pb2_grpc as rpc
from protos.rpc.channel import open_sync_channel
from protos.rpc.errors import from_rpc_error
from protos.rpc.security import PLAIN, Security
from scheduler.bridge import CommandQueue, SessionEnded
from scheduler.errors import ExecutorChangedError, ExecutorLostError
from scheduler.request import Adapter, AdapterChange, WantedWeights

SERVICE = "execution.v1.ExecutorService"
CONNECT_SECONDS = 2.0
# Longest time to read the files of an adapter, and those of a model.
LOAD_SECONDS, WEIGHTS_SECONDS = 60.0, 1800.0
# Pause between two attempts to load weights, at first and at most.
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 30.0
# The reasons with which an executor ends a session: for other weights, and when it has no memory for a step.
UPDATING_WEIGHTS, OUT_OF_MEMORY = "UPDATING_WEIGHTS", "OUT_OF_MEMORY"

log = structlog.get_logger()

# Executor properties that must not change, with the wording used in the error.
_SAME = {
    "executor_id": "another name",
    "model_digest": "another model, tokenizer, chat template or end-of-sequence ids",
    "block_size": "another block size",
    "num_groups": "another number of layer groups",
    "attention_windows": "other attention windows",
    "plain_rotary": "other rotary embeddings",
}

# What a session receives; an error ends the session.
Answer = pb.StreamStepsResponse | ExecutorLostError


class ExecutorClient:
    """One session at a time. The step loop's thread calls every method; another thread receives the answers."""

    def __init__(
        self,
        address: str,
        scheduler_id: str,
        scheduler_epoch: int,
        *,
        executor: pb.GetExecutorResponse,
        commands: CommandQueue,
        security: Security = PLAIN,
        adapters: Callable[[], Sequence[Adapter]] = tuple,
        weights: Callable[[], WantedWeights | None] = lambda: None,
    ) -> None:
        """executor: the description of the executor that the scheduler was set up for.

        adapters: returns the adapters that requests use or may name; called on the step loop's thread.
        weights: returns the weights to compute with, None for the executor's own; called on the step loop's thread.
        commands: gets SessionEnded when a session is over; `receive` says whether it was the open session.
        """
        self._address = address
        self._security = security
        self._executor = executor
        self._commands = commands
        self._wanted = adapters
        self._wanted_weights = weights
        # No attempt to load weights before this time: a failed attempt may take as long as a successful one.
        self._weights_pause = self._weights_due = 0.0
        # Differences from the wanted adapters when the session was opened.
        self.adapter_changes: list[AdapterChange] = []
        self._scheduler_id = scheduler_id
        self._scheduler_epoch = scheduler_epoch
        # Epoch of the cache manager that blocks come from; 0 before the first registration.
        self._manager_epoch = 0
        self._channel: grpc.Channel | None = None
        self._requests: queue.SimpleQueue[pb.StreamStepsRequest | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()

    def open(self) -> None:
        """Requests a session; `receive` waits until it is open. Raises ExecutorLostError, ExecutorChangedError.

        A restarted executor first loads the wanted weights and adapters: this call blocks the step loop until then.
        Only an executor that is serving has announced its pools: blocks admitted earlier would belong to the memory of
        the previous process.
        """
        self.close()
        self._channel = open_sync_channel(self._address, self._security)
        self._requests = queue.SimpleQueue()
        try:
            health = health_pb2_grpc.HealthStub(self._channel).Check(
                health_pb2.HealthCheckRequest(service=SERVICE), timeout=CONNECT_SECONDS
            )
            if health.status != health_pb2.HealthCheckResponse.SERVING:
                raise ExecutorLostError("the executor is not serving yet")
            stub: rpc.ExecutorServiceStub = rpc.ExecutorServiceStub(self._channel)
            executor = stub.GetExecutor(pb.GetExecutorRequest(), timeout=CONNECT_SECONDS)
        except grpc.RpcError as error:
            raise ExecutorLostError(str(from_rpc_error(error))) from error
        self._check_same(executor)
        self._load_weights(stub, executor)
        self._load_adapters(stub, executor)
        requests, answers = self._requests, queue.SimpleQueue[Answer]()
        self._answers = answers
        stream = stub.StreamSteps(iter(requests.get, None))

        def listen() -> None:
            try:
                for answer in stream:
                    answers.put(answer)
                answers.put(ExecutorLostError("the executor ended the session"))
            except grpc.RpcError as error:
                cause = from_rpc_error(error)
                answers.put(
                    ExecutorLostError(
                        str(cause),
                        is_planned=cause.reason == UPDATING_WEIGHTS,
                        is_out_of_memory=cause.reason == OUT_OF_MEMORY,
                    )
                )
            self._commands.put(SessionEnded())

        # A daemon: it ends with the channel.
        threading.Thread(target=listen, name="executor-answers", daemon=True).start()
        requests.put(
            pb.StreamStepsRequest(
                open=pb.OpenSession(
                    scheduler_id=self._scheduler_id,
                    scheduler_epoch=self._scheduler_epoch,
                    executor_epoch=executor.executor_epoch,
                    manager_epoch=self._manager_epoch,
                )
            )
        )

    def registered(self, manager_epoch: int) -> None:
        """Tells the executor that blocks now come from this process of the cache manager.

        No step in flight may have earlier blocks.
        """
        self._manager_epoch = manager_epoch
        self._requests.put(pb.StreamStepsRequest(registered=pb.SchedulerRegistered(manager_epoch=manager_epoch)))

    def send(self, step: pb.Step) -> None:
        """Sends a step; never blocks."""
        self._requests.put(pb.StreamStepsRequest(step=step))

    def receive(self, seconds: float = 0.0) -> pb.StreamStepsResponse | None:
        """Returns the session's opening, or the answer to the oldest step in flight; None if it does not come in time.

        seconds: how long to wait. Raises ExecutorLostError when the session is over.
        """
        try:
            answer = self._answers.get(timeout=seconds)
        except queue.Empty:
            return None
        if isinstance(answer, ExecutorLostError):
            raise answer
        return answer

    def close(self) -> None:
        """Ends the session, if there is one."""
        self._requests.put(None)
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _load_weights(self, stub: rpc.ExecutorServiceStub, executor: pb.GetExecutorResponse) -> None:
        """Loads the wanted weights again if the executor has restarted with others. Raises ExecutorLostError."""
        wanted = self._wanted_weights()
        if wanted is None or executor.weight_version in (wanted.version, wanted.pending):
            return
        if wanted.pending is not None:
            raise ExecutorLostError(f"the executor is loading the weights {wanted.pending!r}")
        cannot = f"the executor cannot compute with the weights {wanted.version!r} again"
        if time.monotonic() < self._weights_due:
            raise ExecutorLostError(cannot)
        try:
            request = pb.UpdateWeightsRequest(weight_version=wanted.version, path=wanted.path)
            stub.UpdateWeights(request, timeout=WEIGHTS_SECONDS)
        except grpc.RpcError as error:
            log.warning(
                "the wanted weights could not be loaded again",
                weight_version=wanted.version,
                cause=str(from_rpc_error(error)),
            )
            self._weights_pause = min(2 * self._weights_pause + FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS)
            self._weights_due = time.monotonic() + self._weights_pause
            raise ExecutorLostError(cannot) from error
        self._weights_pause = 0.0
        log.info("the wanted weights are loaded again", weight_version=wanted.version)

    def _load_adapters(self, stub: rpc.ExecutorServiceStub, executor: pb.GetExecutorResponse) -> None:
        """Has a restarted executor, which has only the adapters of its settings, load the other wanted adapters."""
        found = {adapter.name: Adapter.of(adapter) for adapter in executor.adapters}
        wanted = {adapter.name: adapter for adapter in self._wanted()}
        for name in wanted.keys() - found.keys():
            message = pb.LoadAdapterRequest(name=name, path=wanted[name].path)
            try:
                found[name] = Adapter.of(stub.LoadAdapter(message, timeout=LOAD_SECONDS).adapter)
            except grpc.RpcError as error:
                log.warning("an adapter is lost", name=name, cause=str(from_rpc_error(error)))
        changes = (AdapterChange(wanted.get(name), found.get(name)) for name in wanted.keys() | found.keys())
        self.adapter_changes = [change for change in changes if change.before != change.now]

    def _check_same(self, executor: pb.GetExecutorResponse) -> None:
        """Raises ExecutorChangedError unless tokens and block tables keep their meaning and accepted requests fit."""
        known = self._executor
        differs = [what for field, what in _SAME.items() if getattr(executor, field) != getattr(known, field)]
        if executor.max_tokens < known.max_tokens:
            differs.append(f"pools for {executor.max_tokens} tokens instead of {known.max_tokens}")
        if differs:
            raise ExecutorChangedError(f"the executor registered again with {', '.join(differs)}")
