"""The step loop's session with the executor, over a synchronous stream."""

import queue
import threading

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.execution.v1 import execution_pb2 as pb
from protos.execution.v1 import execution_pb2_grpc as rpc
from protos.rpc.channel import open_sync_channel
from protos.rpc.errors import from_rpc_error
from protos.rpc.security import PLAIN, Security
from scheduler.errors import ExecutorChangedError, ExecutorLostError

SERVICE = "execution.v1.ExecutorService"
CONNECT_SECONDS = 2.0


# What a session brings; an error as the last one.
Answer = pb.StreamStepsResponse | ExecutorLostError


class ExecutorClient:
    """One session at a time. Every method is called by the step loop's thread; another one takes in the answers."""

    def __init__(
        self,
        address: str,
        scheduler_id: str,
        scheduler_epoch: int,
        *,
        executor: pb.GetExecutorResponse,
        security: Security = PLAIN,
    ) -> None:
        """executor: as it was when everything that depends on it and its model was set up."""
        self._address = address
        self._security = security
        self._executor = executor
        self._scheduler_id = scheduler_id
        self._scheduler_epoch = scheduler_epoch
        self._channel: grpc.Channel | None = None
        self._requests: queue.SimpleQueue[pb.StreamStepsRequest | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()

    def open(self) -> None:
        """Asks for a session; `first_step` says when it is open. Raises ExecutorLostError, ExecutorChangedError.

        Only an executor that says it is serving has announced its pools: blocks admitted before that would belong to
        the memory of the process before it.
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
        if not self._fits(executor):
            raise ExecutorChangedError("the executor came back with another model or other pools")
        requests, answers = self._requests, queue.SimpleQueue[Answer]()
        self._answers = answers
        stream = stub.StreamSteps(iter(requests.get, None))

        def listen() -> None:
            try:
                for answer in stream:
                    answers.put(answer)
                answers.put(ExecutorLostError("the executor ended the session"))
            except grpc.RpcError as error:
                answers.put(ExecutorLostError(str(from_rpc_error(error))))

        # A daemon: it ends with the channel.
        threading.Thread(target=listen, name="executor-answers", daemon=True).start()
        requests.put(
            pb.StreamStepsRequest(
                open=pb.OpenSession(
                    scheduler_id=self._scheduler_id,
                    scheduler_epoch=self._scheduler_epoch,
                    executor_epoch=executor.executor_epoch,
                )
            )
        )

    def first_step(self, seconds: float) -> int | None:
        """The number of the session's first step; None when it is not open within so many seconds.

        Raises ExecutorLostError.
        """
        answer = self._next(seconds)
        return None if answer is None else answer.opened.first_step

    def send(self, step: pb.Step) -> None:
        """Hands a step over; never blocks."""
        self._requests.put(pb.StreamStepsRequest(step=step))

    def receive(self, seconds: float) -> pb.StepResult | None:
        """The answer to the oldest step in flight; None when it does not come within so many seconds.

        Raises ExecutorLostError.
        """
        answer = self._next(seconds)
        return None if answer is None else answer.result

    def close(self) -> None:
        """Ends the session, if there is one."""
        self._requests.put(None)
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _fits(self, executor: pb.GetExecutorResponse) -> bool:
        """Whether block tables mean what they did, and what was promised to callers still has room."""
        known = self._executor
        return (
            (executor.executor_id, executor.model_digest, executor.block_size, executor.num_groups)
            == (known.executor_id, known.model_digest, known.block_size, known.num_groups)
        ) and executor.max_tokens >= known.max_tokens

    def _next(self, seconds: float) -> pb.StreamStepsResponse | None:
        try:
            answer = self._answers.get(timeout=seconds)
        except queue.Empty:
            return None
        if isinstance(answer, ExecutorLostError):
            raise answer
        return answer
