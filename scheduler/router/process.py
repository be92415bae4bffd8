"""Assembles the router: front end, fleet, links to engines, and the view of their caches."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any

import grpc
import structlog
import uvloop
from prometheus_client import REGISTRY, CollectorRegistry

from protos.generation.v1 import generation_pb2 as pb
from protos.generation.v1 import generation_pb2_grpc as generation_rpc
from protos.rpc import logs, tracing
from protos.rpc.addresses import AddressError
from protos.rpc.errors import from_rpc_error
from protos.rpc.guard import Guard
from protos.rpc.http_server import HttpServer
from protos.rpc.logs import FileLog
from protos.rpc.server import Server, StopSignals
from protos.rpc.settings import SettingsError, load, variable
from protos.rpc.startup import collect_rarely
from protos.vllm import engine_pb2_grpc as vllm_rpc
from scheduler.errors import NotReadyError, UnusableModelError
from scheduler.frontend.access_log import AccessLog
from scheduler.frontend.grpc_service import ADMIN_SERVICE, SERVICE, GenerationService
from scheduler.frontend.loader import LoaderElsewhere
from scheduler.frontend.model_info import ModelInfo
from scheduler.frontend.openai.server import http_server
from scheduler.frontend.requests import Health, RequestTable
from scheduler.frontend.validation import RequestValidator
from scheduler.frontend.vllm.service import VLLM_SERVICE, VllmEngine
from scheduler.metrics import RequestMetrics
from scheduler.router.engine_link import EngineLink, describe
from scheduler.router.engine_list import EngineList
from scheduler.router.fleet import Fleet
from scheduler.router.key_index import KeyIndex
from scheduler.router.metrics import PREFIX, RouterMetrics
from scheduler.router.policies import POLICIES
from scheduler.router.reports import EngineReports
from scheduler.router.service import ROUTER_SERVICE, RouterService
from scheduler.router.settings import RouterSettings
from scheduler.router.view import CacheView, ViewFeed

# How often names are looked up, and how often health is checked, in seconds.
LOOKUP_SECONDS, WATCH_SECONDS = 5.0, 0.5
# Most engines that are asked for their description at the same time, at the start.
MOST_ASKED = 64

log = structlog.get_logger()


class Router:
    """The running router. `failed` is set when it cannot go on, even if it never began."""

    def __init__(self, settings: RouterSettings, health: Health, registry: CollectorRegistry = REGISTRY) -> None:
        """Raises OSError if the access log cannot be opened."""
        self.failed = asyncio.Event()
        self._settings = settings
        self._health = health
        self._access_log = None if settings.access_log is None else FileLog("router", settings.access_log)
        self._metrics = RequestMetrics(registry, PREFIX)
        self._router_metrics = RouterMetrics(registry)
        self.service = GenerationService(self, AccessLog(self._metrics, self._access_log and self._access_log.log))
        # One stream cannot carry the events of several engines' blocks.
        self._for_gateways = VllmEngine(self, self.service, None)
        self._requests: RequestTable | None = None
        self._described: pb.GetEngineResponse | None = None
        self.view = CacheView()
        policy = POLICIES[settings.policy]()
        self._index = KeyIndex(settings.redis_url) if settings.redis_url else None
        self.fleet = Fleet(
            self.view, policy, self._router_metrics, settings.router_id, self._index, on_failure=self.failed.set
        )
        self._for_operators = RouterService(self.fleet, self.view, settings.policy)
        # Tasks by address: of engines, and of cache managers.
        self._links: dict[str, asyncio.Task[None]] = {}
        self._feeds: dict[str, asyncio.Task[None]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._list = EngineList(settings.engines, settings.security)
        self._asking = asyncio.Semaphore(MOST_ASKED)

    @property
    def services(self) -> Mapping[str, Callable[[grpc.aio.Server], None]]:
        """The gRPC services by their full names, each with the function that adds it to a server."""
        return {
            SERVICE: partial(generation_rpc.add_GenerationServiceServicer_to_server, self.service),
            ADMIN_SERVICE: partial(generation_rpc.add_SchedulerAdminServiceServicer_to_server, self.service.admin),
            ROUTER_SERVICE: partial(generation_rpc.add_RouterServiceServicer_to_server, self._for_operators),
            VLLM_SERVICE: partial(vllm_rpc.add_VllmEngineServicer_to_server, self._for_gateways),
        }

    def http_server(self, guard: Guard) -> HttpServer | None:
        """The server of the HTTP API; None without an address for it."""
        return http_server(self.service, self._settings, guard) if self._settings.http_address else None

    @property
    def requests(self) -> RequestTable:
        """Raises NotReadyError until an engine has answered."""
        if self._requests is None:
            raise NotReadyError("the router still waits for an engine", retry_after=1.0)
        return self._requests

    @property
    def engine(self) -> pb.GetEngineResponse:
        """The engine that answered first; all others serve its model. Raises NotReadyError like `requests`."""
        if self._described is None:
            raise NotReadyError("the router still waits for an engine", retry_after=1.0)
        return self._described

    async def start(self) -> None:
        """Waits for an engine, however long, and serves. Raises UnusableModelError, AddressError."""
        settings = self._settings
        engine = self._described = await self._first_engine()
        self._requests = requests = RequestTable(
            RequestValidator(
                ModelInfo(
                    engine.model,
                    engine.executor,
                    settings.served_model_names,
                    tool_call_parser=settings.tool_call_parser,
                    reasoning_parser=settings.reasoning_parser,
                ),
                max_prompt_bytes=settings.max_prompt_bytes,
                onload_timeout=float("inf"),
            ),
            self.fleet,
            self._metrics,
            self._health,
            LoaderElsewhere("a router loads nothing: ask each of its engines"),
            max_waiting=settings.max_waiting,
            max_tenant_requests=settings.max_tenant_requests,
        )
        reports = EngineReports(self.fleet, requests, self._router_metrics, requests.adapters)
        self._tasks = [self._run(self._find_engines(engine, reports)), self._run(self._watch(requests, reports))]
        if self._index is not None:
            self._tasks.append(self._run(self._index.run(self.fleet.unknown_executors)))
        requests.open()

    def _run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Starts a task that runs until it is cancelled: any other end is a defect, and ends the process."""
        task = asyncio.create_task(work)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            log.error("the router failed", exc_info=task.exception())
            self.failed.set()

    async def drain(self) -> None:
        """Takes no more requests and waits for the live requests; fails those that are left after `drain_seconds`."""
        if self._requests is not None:
            await self._requests.drain(self._settings.drain_seconds)

    async def stop(self) -> None:
        """Ends everything that `start` began."""
        tasks = [*self._tasks, *self._links.values(), *self._feeds.values(), *self.fleet.preparing.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self._index is not None:
            await self._index.close()
        if self._access_log is not None:
            await asyncio.to_thread(self._access_log.close)

    async def _first_engine(self) -> pb.GetEngineResponse:
        """Returns the first engine to answer that serves the wanted model: all others must serve the same model."""
        said = dict[str, str]()
        while True:
            found = await self._list.addresses()
            asked = [asyncio.create_task(self._describe(address, said)) for address in found]
            try:
                for answer in asyncio.as_completed(asked):
                    if (engine := await answer) is not None:
                        return engine
            finally:
                for task in asked:
                    task.cancel()
                await asyncio.gather(*asked, return_exceptions=True)
            await asyncio.sleep(WATCH_SECONDS)

    async def _describe(self, address: str, said: dict[str, str]) -> pb.GetEngineResponse | None:
        """Returns an engine's description; None if it does not answer, or serves a different model than wanted."""
        async with self._asking:
            try:
                engine = await describe(address, self._settings.security)
            except grpc.aio.AioRpcError as error:
                cause = str(from_rpc_error(error))
            else:
                if self._settings.model in ("", engine.model.model, engine.model.hub_id):
                    return engine
                cause = f"it serves {engine.model.model}, and this router is for {self._settings.model}"
        if cause != said.get(address):
            log.info("waiting for an engine", address=address, cause=cause)
            said[address] = cause
        return None

    async def _find_engines(self, first: pb.GetEngineResponse, reports: EngineReports) -> None:
        """Keeps a link to every engine. An engine whose address is gone finishes its requests, but gets no more."""
        while True:
            found = await self._list.addresses()
            for address in found:
                if address not in self._links:
                    link = self.fleet.links[address] = EngineLink(address, self._settings.security, first)
                    self._links[address] = self._run(link.run(reports))
                self.fleet.links[address].is_leaving = False
            for address in set(self._links).difference(found):
                link = self.fleet.links[address]
                link.is_leaving = True
                if not link.is_open or not self.fleet.on(link):
                    self._links.pop(address).cancel()
                    del self.fleet.links[address]
                    # Engines whose addresses change with each pod must leave nothing behind.
                    self._router_metrics.requests.remove(address)
            await asyncio.sleep(LOOKUP_SECONDS)

    async def _watch(self, requests: RequestTable, reports: EngineReports) -> None:
        """Reports in health whether an engine takes requests, and follows the cache managers of all engines.

        Also moves the samples of quiet engines, refuses waiting samples if no engine has their adapter, updates the
        metrics, and sweeps the view.
        """
        has_served = False
        while True:
            open_links = [link for link in self.fleet.links.values() if link.is_open]
            reports.look_at(link for link in open_links if link.is_quiet)
            ready = sum(not link.obstacle for link in open_links)
            obstacle = self.fleet.obstacle
            # Callers are not told the addresses of engines.
            changed = requests.set_obstacle("no engine takes requests", bool(obstacle))
            if changed and has_served:
                if obstacle:
                    log.warning("no engine takes requests", cause=obstacle)
                else:
                    log.info("an engine takes requests again")
            has_served = has_served or not obstacle
            self._router_metrics.ready.set(ready)
            others = sum(link.has_other_model for link in self.fleet.links.values())
            self._router_metrics.other_model.set(others)
            self._router_metrics.away.set(len(self.fleet.links) - ready - others)
            incomplete = sum(self.view.find(link.owner) is None for link in open_links)
            self._router_metrics.incomplete_views.set(incomplete)
            self._follow_caches()
            self._router_metrics.blocks.set(len(self.view))
            await self.view.sweep()
            await asyncio.sleep(WATCH_SECONDS)

    def _follow_caches(self) -> None:
        """Follows the cache manager of every engine, until no engine names it any more."""
        announced = {link.engine.cachemgr_admin_address for link in self.fleet.links.values()} - {""}
        named = set(self._list.callable(announced, "cachemgr_admin_address"))
        for address in named.difference(self._feeds):
            feed = ViewFeed(self.view, address, self._settings.security)
            self._feeds[address] = self._run(feed.run())
        for address in self._feeds.keys() - named:
            self._feeds.pop(address).cancel()


async def serve(settings: RouterSettings) -> int:
    """Serves until a signal; returns the exit status."""
    server = Server("router", metrics_address=settings.metrics_address, security=settings.security)
    try:
        router = Router(settings, server)
    except OSError as error:
        log.error("cannot write the access log", setting=variable(RouterSettings, "access_log"), cause=str(error))
        return 1
    server.listen(settings.address, router.services, setting=variable(RouterSettings, "address"))
    http = router.http_server(server.guard)
    signals = StopSignals()
    try:
        if http is not None:
            await http.start()
        await server.start()
    except AddressError as error:
        log.error("cannot listen", cause=str(error))
        return 1

    async def become_ready() -> None:
        try:
            await router.start()
        except (AddressError, UnusableModelError) as error:
            log.error("the router cannot start", cause=str(error))
            router.failed.set()
        except Exception:
            log.exception("the router cannot start")
            router.failed.set()
        else:
            collect_rarely()
        await router.failed.wait()
        # This process cannot recover: it ends as on SIGTERM, with a different status.
        os.kill(os.getpid(), signal.SIGTERM)

    ready = asyncio.create_task(become_ready())
    drained = await server.run_until_stopped(signals, router.drain)
    ready.cancel()
    await asyncio.wait({ready})
    if http is not None:
        await http.stop(hurried=not drained)
    await router.stop()
    return 1 if router.failed.is_set() else 0


def run() -> int:
    """Runs until SIGTERM; returns the exit status."""
    settings = load(RouterSettings, os.environ)
    if not settings.engines:
        raise SettingsError(f"{variable(RouterSettings, 'engines')} names no engine: give it host:port of schedulers")
    logs.configure("router", settings.log_level)
    tracing.start("router", os.environ)
    try:
        return uvloop.run(serve(settings))
    finally:
        tracing.stop()
