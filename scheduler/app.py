"""Puts the parts together: front end and cache client on the asyncio loop, the step loop on its thread."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import REGISTRY, CollectorRegistry

from protos.execution.v1 import execution_pb2
from protos.execution.v1 import execution_pb2_grpc as execution_rpc
from protos.generation.v1 import generation_pb2
from protos.generation.v1 import generation_pb2_grpc as generation_rpc
from protos.kvcache.v1 import kvcache_pb2_grpc as kvcache_rpc
from protos.rpc.channel import open_channel
from protos.rpc.errors import ServiceError, from_rpc_error
from protos.rpc.guard import Guard
from protos.rpc.http_server import HttpServer
from protos.rpc.logs import FileLog
from protos.vllm import engine_pb2_grpc as vllm_rpc
from scheduler.bridge import CacheUpdate, CommandQueue, RequestUpdates, Stop
from scheduler.cache.client import CacheClient
from scheduler.cache.waiting_queue import WaitingQueue
from scheduler.core import executor_client
from scheduler.core.executor_client import ExecutorClient
from scheduler.core.loop import StepLoop
from scheduler.core.prefill_budget import PrefillBudget
from scheduler.errors import (
    ExecutorChangedError,
    ExecutorReplacedError,
    NotReadyError,
    SchedulerReplacedError,
    StepLoopError,
)
from scheduler.frontend.access_log import AccessLog
from scheduler.frontend.adapters import AdapterTable
from scheduler.frontend.engine import LocalEngine
from scheduler.frontend.engine_service import ENGINE_SERVICE, EngineService
from scheduler.frontend.grammars import ExecutorGrammars
from scheduler.frontend.grpc_service import ADMIN_SERVICE, SERVICE, GenerationService
from scheduler.frontend.loader import ExecutorLoader
from scheduler.frontend.model_info import ModelInfo
from scheduler.frontend.openai.server import http_server
from scheduler.frontend.requests import CACHE_MANAGER_SILENT, Health, RequestTable, Silences
from scheduler.frontend.validation import RequestValidator
from scheduler.frontend.vllm.gateway_events import KvEvents
from scheduler.frontend.vllm.service import VLLM_SERVICE, VllmEngine
from scheduler.metrics import EngineMetrics, StepTimes, Summed, VllmMetrics
from scheduler.request import Adapter, WantedWeights
from scheduler.settings import SchedulerSettings

CALL_SECONDS = 10.0
RETRY_SECONDS = 0.1
# Seconds of silence after which health says that the cache manager does not answer: its restart takes less. Then the
# seconds between two checks.
SILENCE_SECONDS, WATCH_SECONDS = 5.0, 0.25
# Time for a step and a sync to be answered at the end.
STOP_SECONDS = 2.0

log = structlog.get_logger()


class Scheduler:
    """The running scheduler. `failed` is set when it cannot go on, even if it never began."""

    def __init__(
        self,
        settings: SchedulerSettings,
        health: Health,
        registry: CollectorRegistry = REGISTRY,
        *,
        summed: Summed = iter,
    ) -> None:
        """summed: adds what its front ends have counted. Raises OSError if the access log cannot be opened."""
        self._summed = summed
        self._access_log = None if settings.access_log is None else FileLog("scheduler", settings.access_log)
        self._metrics = EngineMetrics(registry)
        access_log = AccessLog(self._metrics, self._access_log and self._access_log.log)
        self.service = GenerationService(self, access_log)
        self._for_routers = EngineService(self, access_log)
        events = KvEvents(settings.cachemgr_admin_address, settings.security) if settings.kv_events else None
        self._for_gateways = VllmEngine(self, self.service, events)
        self.failed = asyncio.Event()
        # Set once `start` has succeeded.
        self.opened = asyncio.Event()
        self.times = StepTimes(registry)
        self._settings = settings
        self._health = health
        self._registry = registry
        self._commands = CommandQueue()
        self._requests: RequestTable | None = None
        self._engine: generation_pb2.GetEngineResponse | None = None
        self._cache: CacheClient | None = None
        self._channel: grpc.aio.Channel | None = None
        # For adapters, weights and grammars: steps have a separate channel.
        self._executor_channel: grpc.aio.Channel | None = None
        self._cache_task: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._thread: threading.Thread | None = None

    @property
    def services(self) -> Mapping[str, Callable[[grpc.aio.Server], None]]:
        """The gRPC services by their full names, each with the function that adds it to a server."""
        return {
            SERVICE: partial(generation_rpc.add_GenerationServiceServicer_to_server, self.service),
            ADMIN_SERVICE: partial(generation_rpc.add_SchedulerAdminServiceServicer_to_server, self.service.admin),
            ENGINE_SERVICE: partial(generation_rpc.add_EngineServiceServicer_to_server, self._for_routers),
            VLLM_SERVICE: partial(vllm_rpc.add_VllmEngineServicer_to_server, self._for_gateways),
        }

    def http_server(self, guard: Guard) -> HttpServer | None:
        """The server of the HTTP API; None without an address for it."""
        return http_server(self.service, self._settings, guard) if self._settings.http_address else None

    @property
    def requests(self) -> RequestTable:
        """Raises NotReadyError until `start` has succeeded."""
        if self._requests is None:
            raise NotReadyError("the scheduler still waits for the executor and the cache manager", retry_after=1.0)
        return self._requests

    @property
    def engine(self) -> generation_pb2.GetEngineResponse:
        """What routers and front ends need to know of this engine. Raises NotReadyError until `start` has succeeded."""
        if self._engine is None:
            raise NotReadyError("the scheduler still waits for the executor and the cache manager", retry_after=1.0)
        return self._engine

    async def start(self) -> None:
        """Waits for the executor and the cache manager, however long, and serves. Raises UnusableModelError.

        Returns without serving if `failed` is set before.
        """
        settings, epoch = self._settings, time.time_ns()
        self._channel = open_channel(settings.cachemgr_address, settings.security)
        manager: kvcache_rpc.CacheManagerServiceAsyncStub = kvcache_rpc.CacheManagerServiceStub(self._channel)
        executor, model = await _describe_executor(settings)
        # The executor refuses epochs older than any that it has seen, and the clock may have been set back since then.
        epoch = max(epoch, executor.scheduler_epoch + 1)
        queue, adapters = WaitingQueue(), AdapterTable(map(Adapter.of, executor.adapters), executor.max_adapters)
        self._executor_channel = open_channel(settings.executor_address, settings.security)
        stub: execution_rpc.ExecutorServiceAsyncStub = execution_rpc.ExecutorServiceStub(self._executor_channel)
        loader = ExecutorLoader(adapters, stub, WantedWeights(executor.weight_version, executor.weight_path))
        validator = _validator(settings, executor, model, adapters, ExecutorGrammars(stub))
        requests = self._request_table(validator, queue, loader)
        if settings.vllm_metrics:
            self._export_vllm_metrics(requests, executor, model)
        cache = self._cache_client(manager, executor, epoch, queue, requests)
        self._cache = cache
        self._cache_task = asyncio.create_task(cache.run())
        self._cache_task.add_done_callback(self._cache_ended)
        steps = StepLoop(
            ExecutorClient(
                settings.executor_address,
                settings.scheduler_id,
                epoch,
                executor=executor,
                commands=self._commands,
                security=settings.security,
                adapters=lambda: adapters.all,
                weights=lambda: loader.weights,
            ),
            self._commands,
            _Updates(requests, cache),
            self.times,
            max_batched_tokens=settings.max_batched_tokens,
            budget=PrefillBudget(settings.target_itl_seconds),
        )
        # A daemon: an executor that never answers must not keep the process from ending.
        arguments = (steps, requests, asyncio.get_running_loop())
        self._thread = threading.Thread(target=self._run, args=arguments, name="step-loop", daemon=True)
        self._thread.start()
        await _first(cache.registered, self.failed)
        if self.failed.is_set():
            return
        self._watching = asyncio.create_task(self._watch_neighbours(requests, cache))
        self._watching.add_done_callback(self._watching_ended)
        self._engine = generation_pb2.GetEngineResponse(
            engine_id=settings.scheduler_id,
            model=model,
            executor=executor,
            cachemgr_admin_address=settings.cachemgr_admin_address,
            cachemgr_address=settings.cachemgr_address,
            executor_address=settings.executor_address,
        )
        self._requests = requests
        requests.open()
        self.opened.set()
        log.info("ready", model=requests.model.name, max_tokens=requests.model.max_tokens)

    def _request_table(self, validator: RequestValidator, queue: WaitingQueue, loader: ExecutorLoader) -> RequestTable:
        settings = self._settings
        return RequestTable(
            validator,
            LocalEngine(
                queue, self._commands, self.times, lambda: loader.weights.version, max_running=settings.max_running
            ),
            self._metrics,
            self._health,
            loader,
            max_waiting=settings.max_waiting,
            max_tenant_requests=settings.max_tenant_requests,
        )

    def _cache_client(
        self,
        manager: kvcache_rpc.CacheManagerServiceAsyncStub,
        executor: execution_pb2.GetExecutorResponse,
        epoch: int,
        queue: WaitingQueue,
        requests: RequestTable,
    ) -> CacheClient:
        return CacheClient(
            manager,
            queue,
            self._commands,
            requests,
            self._metrics,
            scheduler_id=self._settings.scheduler_id,
            scheduler_epoch=epoch,
            executor_id=executor.executor_id,
            block_size=executor.block_size,
            max_running=self._settings.max_running,
            drafts=executor.drafts,
        )

    def _export_vllm_metrics(
        self, requests: RequestTable, executor: execution_pb2.GetExecutorResponse, model: execution_pb2.GetModelResponse
    ) -> None:
        self._registry.register(
            VllmMetrics(
                self._metrics,
                model_name=requests.model.name,
                block_size=executor.block_size,
                num_blocks=executor.max_tokens // executor.block_size,
                cache_dtype=model.kv_cache_dtype,
                max_adapters=executor.max_adapters,
                adapters_in_use=requests.adapters_in_use,
                summed=self._summed,
            )
        )

    async def drain(self) -> None:
        """Takes no more requests and waits for the live requests; fails those that are left after `drain_seconds`."""
        if self._requests is not None:
            await self._requests.drain(self._settings.drain_seconds)

    async def stop(self, seconds: float = STOP_SECONDS) -> None:
        """Ends everything that `start` began. The steps in flight and the last sync get up to `seconds` each."""
        if self._watching is not None:
            self._watching.cancel()
        if self._thread is not None:
            self._commands.put(Stop())
            await asyncio.to_thread(self._thread.join, seconds)
        if self._cache is not None and self._cache_task is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._cache.report_all()
            self._cache_task.cancel()
            await asyncio.wait({self._cache_task})
        for channel in (self._channel, self._executor_channel):
            if channel is not None:
                await channel.close()
        if self._access_log is not None:
            await asyncio.to_thread(self._access_log.close)

    def _run(self, steps: StepLoop, requests: RequestTable, loop: asyncio.AbstractEventLoop) -> None:
        try:
            steps.run()
        except ExecutorChangedError as error:
            log.error("the executor was replaced", cause=str(error))
            loop.call_soon_threadsafe(self._fail, requests, ExecutorReplacedError(f"{error}; ask again"))
        except Exception:
            log.exception("the step loop failed", state=steps.dump())
            cause = StepLoopError("the step loop ended with an error of its own; the log says which")
            loop.call_soon_threadsafe(self._fail, requests, cause)

    def _fail(self, requests: RequestTable, cause: ServiceError) -> None:
        requests.fail_all(cause)
        self.failed.set()

    async def _watch_neighbours(self, requests: RequestTable, cache: CacheClient) -> None:
        """Reports in health when the cache manager does not answer: new requests then wait.

        Also passes both neighbours' silences on to the request table, so that routers can react sooner.
        """
        silence = 0.0
        while True:
            begun = time.monotonic()
            await asyncio.sleep(WATCH_SECONDS)
            # While this process itself was stalled, nobody was silent.
            silence = min(cache.silence, silence + min(time.monotonic() - begun, 2 * WATCH_SECONDS))
            requests.silences = Silences(self.times.executor_silence, silence)
            self._metrics.manager_silence.set(silence)
            if requests.set_obstacle(CACHE_MANAGER_SILENT, silence >= SILENCE_SECONDS):
                if silence >= SILENCE_SECONDS:
                    log.warning("the cache manager does not answer", seconds=round(silence, 1))
                else:
                    log.info("the cache manager answers again")

    def _watching_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            log.error("the scheduler failed", exc_info=task.exception())
            self.failed.set()

    def _cache_ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        if isinstance(error, SchedulerReplacedError):
            log.error("another scheduler registered under this name", cause=str(error))
        else:
            log.error("the cache client failed", exc_info=error)
        self.failed.set()


class _Updates:
    """Carries updates from the step loop's thread to the asyncio loop."""

    def __init__(self, requests: RequestTable, cache: CacheClient) -> None:
        self._requests = requests
        self._cache = cache
        self._loop = asyncio.get_running_loop()

    def publish(self, updates: RequestUpdates | None, cache: CacheUpdate | None) -> None:
        self._loop.call_soon_threadsafe(self._deliver, updates, cache)

    def _deliver(self, updates: RequestUpdates | None, cache: CacheUpdate | None) -> None:
        if updates is not None:
            self._requests.receive(updates)
        if cache is not None:
            self._cache.receive(cache)


def _validator(
    settings: SchedulerSettings,
    executor: execution_pb2.GetExecutorResponse,
    model: execution_pb2.GetModelResponse,
    adapters: AdapterTable,
    grammars: ExecutorGrammars,
) -> RequestValidator:
    """Raises UnusableModelError."""
    return RequestValidator(
        ModelInfo(
            model,
            executor,
            settings.served_model_names,
            tool_call_parser=settings.tool_call_parser,
            reasoning_parser=settings.reasoning_parser,
        ),
        adapters,
        grammars,
        max_prompt_bytes=settings.max_prompt_bytes,
        onload_timeout=settings.onload_timeout_seconds,
    )


async def _first(*events: asyncio.Event) -> None:
    waiting = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()


async def _describe_executor(
    settings: SchedulerSettings,
) -> tuple[execution_pb2.GetExecutorResponse, execution_pb2.GetModelResponse]:
    """Waits until the executor serves; returns the executor and its model."""
    address = settings.executor_address
    async with open_channel(address, settings.security) as channel:
        stub: execution_rpc.ExecutorServiceAsyncStub = execution_rpc.ExecutorServiceStub(channel)
        request = health_pb2.HealthCheckRequest(service=executor_client.SERVICE)
        said = ""
        while True:
            try:
                health = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=CALL_SECONDS)
                if health.status == health_pb2.HealthCheckResponse.SERVING:
                    # In this order: another process may answer the second call. If its model differs from the digest in
                    # the first answer, the step loop notices the difference when it opens its session.
                    return (
                        await stub.GetExecutor(execution_pb2.GetExecutorRequest(), timeout=CALL_SECONDS),
                        await stub.GetModel(execution_pb2.GetModelRequest(), timeout=CALL_SECONDS),
                    )
                cause = "it is not serving yet"
            except grpc.aio.AioRpcError as error:
                cause = str(from_rpc_error(error))
            if cause != said:
                log.info("waiting for the executor", address=address, cause=cause)
                said = cause
            await asyncio.sleep(RETRY_SECONDS)
