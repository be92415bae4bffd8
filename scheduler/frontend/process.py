"""A front end in a separate process: HTTP and text, in front of the scheduler at the other end of a pipe."""

from __future__ import annotations

import asyncio
import secrets
import time

import structlog
from google.rpc import status_pb2

from protos.generation.v1 import generation_pb2 as pb
from protos.rpc.errors import PassedOnError, from_status
from protos.rpc.logs import FileLog
from protos.rpc.startup import collect_rarely
from scheduler.bridge import RequestUpdates
from scheduler.errors import DrainingError, NotReadyError
from scheduler.frontend.access_log import AccessLog
from scheduler.frontend.engine import Loads
from scheduler.frontend.engine_messages import SentSample, start_request
from scheduler.frontend.grpc_service import GenerationService
from scheduler.frontend.loader import LoaderElsewhere
from scheduler.frontend.model_info import ModelInfo
from scheduler.frontend.pipe import Frame, Pipe
from scheduler.frontend.requests import CACHE_MANAGER_SILENT, DRAINS, EXECUTOR_SILENT, RequestTable
from scheduler.frontend.validation import RequestValidator
from scheduler.metrics import RequestMetrics, StepLoad
from scheduler.request import Adapter, AdmissionAttempt
from scheduler.settings import SchedulerSettings

# For StreamFlusher. No step waits for the writes of this process, and half of the time is left for reading.
MESSAGE_SECONDS = 5e-5
# Time for callers to read the ends of their answers, and time to read why these end early.
ENDING_SECONDS, FAILING_SECONDS = 2.0, 0.5
# Most bytes of a request's id in its name at the engine.
MAX_NAME_BYTES = 100
_NO_LOADS = Loads(0, 0, 0, StepLoad())

log = structlog.get_logger()


class RemoteEngine:
    """The Engine at the other end of a pipe. On the asyncio loop."""

    # The engine itself counts running and waiting samples: the limits are for all its front ends together.
    loads = _NO_LOADS

    def __init__(self, pipe: Pipe, model: ModelInfo) -> None:
        self._pipe = pipe
        self._model = model
        # Requests of other front ends, and those over gRPC, have other names.
        self._suffix = secrets.token_hex(3)
        self._by_arrival: dict[int, SentSample] = {}
        self._by_name: dict[str, SentSample] = {}

    def start(self, attempt: AdmissionAttempt) -> None:
        request = attempt.request
        # Operators find the request by its id.
        begin = request.request_id.encode()[:MAX_NAME_BYTES].decode(errors="ignore")
        sample = SentSample(
            name=f"{begin}-{self._suffix}.{request.arrival}", attempt=attempt, token_ids=attempt.token_ids[:]
        )
        self._by_arrival[sample.arrival] = self._by_name[sample.name] = sample
        # Callers may reach a different front end each time: the scheduler knows the responses of all.
        asked = start_request(attempt, sample.name, 0, self._model.eos_token_ids, compares=True)
        self._send(pb.StreamRequestsRequest(start=asked))

    def cancel(self, arrival: int) -> None:
        if (sample := self._by_arrival.get(arrival)) is not None:
            self._forget(sample)
            self._send(pb.StreamRequestsRequest(cancel=pb.CancelRequest(request_id=sample.name)))

    def weight_version(self, arrival: int) -> None:
        """Returns None: the engine itself compares requests."""

    def _forget(self, sample: SentSample) -> None:
        del self._by_arrival[sample.arrival], self._by_name[sample.name]

    def _send(self, command: pb.StreamRequestsRequest) -> None:
        self._pipe.put(Frame.REQUESTS, command.SerializeToString())

    def received(self, response: pb.StreamRequestsResponse, requests: RequestTable) -> None:
        """Applies output and failures to the samples of this front end; ignores samples that have already ended."""
        updates = RequestUpdates(steps=int(bool(response.outputs)), at=time.monotonic())
        for chunk in response.outputs:
            if (sample := self._by_name.get(chunk.request_id)) is not None:
                sample.take(chunk, updates, requests)
                if chunk.finish_reason:
                    self._forget(sample)
        for failure in response.failures:
            if (sample := self._by_name.get(failure.request_id)) is not None:
                self._forget(sample)
                status = status_pb2.Status.FromString(failure.status)
                error = PassedOnError(from_status(status))
                requests.refused(sample.attempt, error, was_taken=not failure.is_refused)
        requests.receive(updates)


class FrontEnd:
    """The parts of the process except its HTTP server. Counts only the requests of its callers."""

    def __init__(self, settings: SchedulerSettings, pipe: Pipe) -> None:
        """Raises OSError if the access log cannot be opened."""
        self._settings = settings
        self._pipe = pipe
        self._file = None if settings.access_log is None else FileLog("scheduler", settings.access_log)
        self._metrics = RequestMetrics()
        self.service = GenerationService(self, AccessLog(self._metrics, self._file and self._file.log), self._abort)
        self._requests: RequestTable | None = None
        self._engine: RemoteEngine | None = None
        # Awaited answers by kind, in the order in which they were asked for.
        self._asked: dict[Frame, list[asyncio.Future[bytes]]] = {Frame.METRICS: [], Frame.ABORT: []}

    @property
    def requests(self) -> RequestTable:
        """Raises NotReadyError until the scheduler serves."""
        if self._requests is None:
            raise NotReadyError("the scheduler still waits for the executor and the cache manager", retry_after=1.0)
        return self._requests

    async def metrics(self) -> bytes:
        """Returns the scheduler's metrics as text, including those of all its front ends."""
        return await self._ask(Frame.METRICS)

    async def _abort(self, message: pb.AbortRequestsRequest) -> int:
        """Ends requests here, at other front ends and at the scheduler, which knows all requests that have begun.

        Returns the number of requests; with validate_only, only counts them. Raises NotReadyError.
        """
        here = self.requests.abort(message)
        answer = await self._ask(Frame.ABORT, message.SerializeToString())
        return max(here, pb.AbortRequestsResponse.FromString(answer).aborted_requests)

    async def _ask(self, kind: Frame, content: bytes = b"") -> bytes:
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._asked[kind].append(answer)
        self._pipe.put(kind, content)
        return await answer

    async def run(self) -> bool:
        """Handles the scheduler's frames until the scheduler says to stop, or has ended.

        Returns whether callers may still read their answers: False after a hurried stop or the end of the scheduler.
        """
        while (frame := await self._pipe.read()) is not None:
            kind, content = frame
            match kind:
                case Frame.ENGINE:
                    self._open(pb.GetEngineResponse.FromString(content))
                case Frame.REQUESTS:
                    self._receive(pb.StreamRequestsResponse.FromString(content))
                case Frame.METRICS | Frame.ABORT:
                    answer = self._asked[kind].pop(0)
                    if not answer.done():
                        answer.set_result(content)
                case Frame.STOP if not content:
                    # All requests have ended at the scheduler.
                    await self._drain(ENDING_SECONDS)
                    return True
                case Frame.STOP:
                    break
        else:
            log.error("the scheduler is gone")
        if self._requests is not None:
            self._requests.fail_all(DrainingError("the scheduler is stopping"))
        await self._drain(FAILING_SECONDS)
        return False

    async def _drain(self, seconds: float) -> None:
        if self._requests is not None:
            await self._requests.drain(seconds)

    async def close(self) -> None:
        """Writes the rest of the access log."""
        if self._file is not None:
            await asyncio.to_thread(self._file.close)

    def _open(self, engine: pb.GetEngineResponse) -> None:
        model = ModelInfo(
            engine.model,
            engine.executor,
            self._settings.served_model_names,
            tool_call_parser=self._settings.tool_call_parser,
            reasoning_parser=self._settings.reasoning_parser,
        )
        self._engine = RemoteEngine(self._pipe, model)
        self._requests = RequestTable(
            RequestValidator(
                model,
                max_prompt_bytes=self._settings.max_prompt_bytes,
                onload_timeout=self._settings.onload_timeout_seconds,
            ),
            self._engine,
            self._metrics,
            _NoHealth(),
            LoaderElsewhere("a front end in a separate process loads nothing: use kvctl, over gRPC"),
            max_waiting=self._settings.max_waiting,
            message_seconds=MESSAGE_SECONDS,
            compares=False,
        )
        collect_rarely()

    def _receive(self, response: pb.StreamRequestsResponse) -> None:
        assert self._engine is not None
        if response.HasField("loads"):
            requests = self.requests
            requests.adapters.replace(map(Adapter.of, response.adapters))
            requests.reported_loads = response.loads
            requests.set_obstacle(EXECUTOR_SILENT, response.executor_silent)
            requests.set_obstacle(CACHE_MANAGER_SILENT, response.cachemgr_silent)
            requests.set_draining(response.obstacle == DRAINS)
        self._engine.received(response, self.requests)


class _NoHealth:
    """Ignores health: the scheduler reports the health of both processes."""

    def set_serving(self, _serving: bool) -> None: ...
