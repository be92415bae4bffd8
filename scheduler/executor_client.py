"""The step loop's session with the executor, over a synchronous stream."""

import queue
from collections.abc import Iterator

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


class ExecutorClient:
    """One session at a time. Every method is called by the step loop's thread."""

    def __init__(
        self,
        address: str,
        scheduler_id: str,
        scheduler_epoch: int,
        *,
        model: pb.GetModelResponse,
        executor: pb.GetExecutorResponse,
        security: Security = PLAIN,
    ) -> None:
        """model, executor: as they were when everything that depends on them was set up."""
        self._address = address
        self._security = security
        self._model = model
        self._executor = executor
        self._scheduler_id = scheduler_id
        self._scheduler_epoch = scheduler_epoch
        self._channel: grpc.Channel | None = None
        self._requests: queue.SimpleQueue[pb.StreamStepsRequest | None] = queue.SimpleQueue()
        self._answers: Iterator[pb.StreamStepsResponse] = iter(())

    def open(self) -> int:
        """Opens a session; returns the number of its first step. Raises ExecutorLostError, ExecutorChangedError.

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
            model = stub.GetModel(pb.GetModelRequest(), timeout=CONNECT_SECONDS)
        except grpc.RpcError as error:
            raise ExecutorLostError(str(from_rpc_error(error))) from error
        if model != self._model or not self._fits(executor):
            raise ExecutorChangedError("the executor came back with another model or other pools")
        requests = self._requests
        self._answers = iter(stub.StreamSteps(iter(requests.get, None)))
        requests.put(
            pb.StreamStepsRequest(
                open=pb.OpenSession(
                    scheduler_id=self._scheduler_id,
                    scheduler_epoch=self._scheduler_epoch,
                    executor_epoch=executor.executor_epoch,
                )
            )
        )
        return self._next().opened.first_step

    def send(self, step: pb.Step) -> None:
        """Hands a step over; never blocks."""
        self._requests.put(pb.StreamStepsRequest(step=step))

    def receive(self) -> pb.StepResult:
        """Blocks until the oldest step in flight is answered. Raises ExecutorLostError."""
        return self._next().result

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
            (executor.executor_id, executor.block_size, executor.num_groups)
            == (known.executor_id, known.block_size, known.num_groups)
        ) and executor.max_tokens >= known.max_tokens

    def _next(self) -> pb.StreamStepsResponse:
        try:
            return next(self._answers)
        except StopIteration:
            raise ExecutorLostError("the executor ended the session") from None
        except grpc.RpcError as error:
            raise ExecutorLostError(str(from_rpc_error(error))) from error
