"""Puts the router together: front end, fleet, links to engines, and the view of their caches."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

import grpc
import structlog
from prometheus_client import REGISTRY, CollectorRegistry

from protos.generation.v1 import generation_pb2 as pb
from protos.generation.v1 import generation_pb2_grpc as generation_rpc
from protos.rpc import addresses
from protos.rpc.errors import from_rpc_error
from protos.rpc.guard import Guard
from protos.rpc.http_server import HttpServer
from protos.rpc.logs import FileLog
from scheduler.errors import NotReadyError
from scheduler.frontend.access_log import AccessLog
from scheduler.frontend.grpc_service import ADMIN_SERVICE, SERVICE, GenerationService, SchedulerAdminService
from scheduler.frontend.model_info import ModelInfo
from scheduler.frontend.openai.app import create_app
from scheduler.frontend.openai.origins import Origins
from scheduler.frontend.requests import Health, RequestTable
from scheduler.frontend.validation import RequestValidator
from scheduler.metrics import RequestMetrics
from scheduler.router.engine_link import EngineLink, describe
from scheduler.router.fleet import Fleet
from scheduler.router.metrics import PREFIX, RouterMetrics
from scheduler.router.policies import POLICIES
from scheduler.router.reports import EngineReports
from scheduler.router.service import ROUTER_SERVICE, RouterService
from scheduler.router.settings import DNS, FILE, RouterSettings
from scheduler.router.view import CacheView, ViewFeed

# How often names are looked up, and health is looked at, in seconds.
LOOKUP_SECONDS, WATCH_SECONDS = 5.0, 0.5

log = structlog.get_logger()


class Router:
    """The running router."""

    def __init__(self, settings: RouterSettings, health: Health, registry: CollectorRegistry = REGISTRY) -> None:
        """Raises OSError where the access log cannot be opened."""
        self._settings = settings
        self._health = health
        self._access_log = None if settings.access_log is None else FileLog("router", settings.access_log)
        self._metrics = RequestMetrics(registry, PREFIX)
        self._router_metrics = RouterMetrics(registry)
        self.service = GenerationService(self, AccessLog(self._metrics, self._access_log and self._access_log.log))
        self._admin = SchedulerAdminService(self)
        self._requests: RequestTable | None = None
        self.view = CacheView()
        policy = POLICIES[settings.policy]()
        self.fleet = Fleet(self.view, policy, self._router_metrics, settings.router_id)
        self._for_operators = RouterService(self.fleet, self.view, settings.policy)
        # By address: those of engines, and those of cache managers.
        self._links: dict[str, asyncio.Task[None]] = {}
        self._feeds: dict[str, asyncio.Task[None]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        # Executor ids that several engines have.
        self._equal_ids: set[str] = set()

    @property
    def services(self) -> Mapping[str, Callable[[grpc.aio.Server], None]]:
        """The gRPC services by their full names, with what adds them to a server."""
        return {
            SERVICE: partial(generation_rpc.add_GenerationServiceServicer_to_server, self.service),
            ADMIN_SERVICE: partial(generation_rpc.add_SchedulerAdminServiceServicer_to_server, self._admin),
            ROUTER_SERVICE: partial(generation_rpc.add_RouterServiceServicer_to_server, self._for_operators),
        }

    def http_server(self, guard: Guard) -> HttpServer | None:
        """The server of the HTTP API; None without an address for it."""
        settings = self._settings
        if not settings.http_address:
            return None
        is_local = addresses.is_loopback(settings.http_address)
        app = create_app(
            self.service,
            max_prompt_bytes=settings.max_prompt_bytes,
            guard=guard,
            origins=Origins((), local=is_local),
        )
        return HttpServer(
            app,
            settings.http_address,
            security=settings.security,
            setting="KVKEEP_ROUTER_HTTP_ADDRESS",
            own_names=is_local and settings.serves_anybody,
        )

    @property
    def requests(self) -> RequestTable:
        """Raises NotReadyError until an engine has answered."""
        if self._requests is None:
            raise NotReadyError("the router still waits for an engine", retry_after=1.0)
        return self._requests

    async def start(self) -> None:
        """Waits for an engine, however long, and serves. Raises UnusableModelError."""
        settings = self._settings
        engine = await self._first_engine()
        self._requests = requests = RequestTable(
            RequestValidator(
                ModelInfo(engine.model, engine.executor),
                max_prompt_bytes=settings.max_prompt_bytes,
                onload_timeout=float("inf"),
            ),
            self.fleet,
            self._metrics,
            self._health,
            max_waiting=settings.max_waiting,
            max_tenant_requests=settings.max_tenant_requests,
        )
        reports = EngineReports(self.fleet, requests, self._router_metrics)
        self._tasks = [
            asyncio.create_task(self._find_engines(engine, reports)),
            asyncio.create_task(self._watch(requests)),
        ]
        requests.open()

    async def drain(self) -> None:
        """Takes no more requests and waits for the running ones."""
        if self._requests is not None:
            await self._requests.drain(self._settings.drain_seconds)

    async def stop(self) -> None:
        """Ends everything that `start` began."""
        tasks = [*self._tasks, *self._links.values(), *self._feeds.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self._access_log is not None:
            await asyncio.to_thread(self._access_log.close)

    async def _first_engine(self) -> pb.GetEngineResponse:
        """The engine that answers first: all others must serve its model."""
        said = ""
        while True:
            for address in await self._addresses():
                try:
                    return await describe(address, self._settings.security)
                except grpc.aio.AioRpcError as error:
                    cause = str(from_rpc_error(error))
                    if cause != said:
                        log.info("waiting for an engine", address=address, cause=cause)
                        said = cause
            await asyncio.sleep(WATCH_SECONDS)

    async def _addresses(self) -> list[str]:
        """The engines' addresses as names and files stand for at the moment."""
        found: list[str] = []
        for address in self._settings.engines:
            if address.startswith(FILE):
                with contextlib.suppress(OSError):
                    found += (await asyncio.to_thread(Path(address.removeprefix(FILE)).read_text)).split()
                continue
            if not address.startswith(DNS):
                found.append(address)
                continue
            host, port = addresses.split_host_port(address.removeprefix(DNS))
            with contextlib.suppress(OSError):
                infos = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
                hosts = sorted({str(info[4][0]) for info in infos})
                found += [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in hosts]
        return found

    async def _find_engines(self, first: pb.GetEngineResponse, reports: EngineReports) -> None:
        """Keeps a link to every engine. One whose address is gone stays until it no longer answers."""
        while True:
            found = await self._addresses()
            for address in found:
                if address not in self._links:
                    link = self.fleet.links[address] = EngineLink(address, self._settings.security, first)
                    self._links[address] = asyncio.create_task(link.run(reports))
            for address in set(self._links).difference(found):
                if not self.fleet.links[address].is_open:
                    self._links.pop(address).cancel()
                    del self.fleet.links[address]
            await asyncio.sleep(LOOKUP_SECONDS)

    async def _watch(self, requests: RequestTable) -> None:
        """Says in health whether an engine takes requests, and follows the cache managers of all engines."""
        while True:
            open_links = [link for link in self.fleet.links.values() if link.is_open]
            ready = sum(not link.obstacle for link in open_links)
            requests.set_answering("fleet", not self.fleet.obstacle)
            self._router_metrics.engines.labels("ready").set(ready)
            self._router_metrics.engines.labels("away").set(len(self.fleet.links) - ready)
            self._warn_of_equal_ids(open_links)
            for address in {link.engine.cachemgr_admin_address for link in open_links}:
                if address not in self._feeds:
                    feed = ViewFeed(self.view, address, self._settings.security)
                    self._feeds[address] = asyncio.create_task(feed.run())
            self._router_metrics.blocks.set(len(self.view))
            await self.view.sweep()
            await asyncio.sleep(WATCH_SECONDS)

    def _warn_of_equal_ids(self, links: Iterable[EngineLink]) -> None:
        """Two executors of one id, in different shards, are one to the view: it takes the blocks of one for both's."""
        by_id: dict[str, list[str]] = {}
        for link in links:
            by_id.setdefault(link.executor_id, []).append(link.address)
        equal = {executor_id for executor_id, addresses in by_id.items() if len(addresses) > 1}
        for executor_id in equal - self._equal_ids:
            log.warning(
                "engines have executors with equal ids: give each its own KVKEEP_EXECUTOR_EXECUTOR_ID",
                executor=executor_id,
                engines=by_id[executor_id],
            )
        self._equal_ids = equal
