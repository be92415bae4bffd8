"""A console beside a cache manager whose pool has been in use by several tenants."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace

import pytest

from bench.driver import CONFIG, Driver, prompt
from cachemgr.rpc import tenancy
from cachemgr.rpc.admin_service import CacheAdminService
from cachemgr.rpc.event_feed import EventFeed
from cachemgr.rpc.event_service import CacheEventService
from cachemgr.rpc.mutations import ManagerClock, Mutations, ServiceContext
from cachemgr.slices import at_once
from cachemgr.types import Prefix, Quota, Retention, RetentionRange
from kvctl.console.app import create_app
from kvctl.console.fleet import Fleet
from kvctl.console.monitor import Monitor
from kvctl.display.output import Format
from kvctl.measure.readings import Reading
from kvctl.session import Session
from protos.kvcache.v1 import kvcache_pb2_grpc as rpc
from protos.rpc.http_server import HttpServer
from protos.rpc.security import PLAIN, Security
from protos.rpc.server import Server

# An address at which no process listens.
NOBODY = "unix:/nobody/scheduler"
# Ids that no number on the page is.
SECRET = 3_987_654_000
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@dataclass
class Console:
    """A server, the managers that it shows, their addresses, and what ends each of them.

    monitor: of the console; it looks only when a test asks it to.
    """

    drivers: list[Driver]
    shards: list[str]
    stop: list[Callable[[], Awaitable[None]]]
    url: str
    monitor: Monitor

    async def look(self) -> Reading:
        """One look at all services, as the console takes it in a separate thread."""
        return await asyncio.to_thread(self.monitor.look)

    @property
    def driver(self) -> Driver:
        """The first manager's."""
        return self.drivers[0]


def fill(driver: Driver) -> None:
    """Some of everything that the console shows."""
    system = [SECRET + number for number in range(64)]
    for number in range(6):
        salt = ("acme", "globex", None)[number % 3]
        retention = Retention((RetentionRange(0, 64, 80, 600.0),))
        tokens = [*system, *prompt(number + 1, 64 + 16 * number)]
        tenant = {"tenant_id": salt} if salt else {}
        driver.cache(f"r{number}", tokens, salt=salt, session_id=f"s{number}", retention=retention, **tenant)
        driver.now += 20.0
    driver.cache("again", [*system, *prompt(1, 64)], salt="acme", tenant_id="acme")
    driver.admit("running", [*system, *prompt(9, 40)], salt="acme", tenant_id="acme")
    driver.manager.operators.pin_prefix(Prefix(tuple(system), salt="globex"), "ops", 300.0, validate_only=False)
    at_once(
        driver.manager.operators.set_quota(
            Quota(salt="globex", device_floor=4, device_ceiling=100), validate_only=False
        )
    )


def small() -> Driver:
    """A manager with 200 blocks and ghost caches."""
    driver = Driver(200, config=replace(CONFIG, ghost_sample=200))
    fill(driver)
    return driver


@asynccontextmanager
async def served(
    *drivers: Driver,
    security: Security = PLAIN,
    any_name: bool = False,
    router: str = "",
    scheduler: str = NOBODY,
    executor: str = "",
    metrics: Mapping[str, str] | None = None,
) -> AsyncIterator[Console]:
    """Each manager's admin address with this security, and a console that reads from there.

    router, scheduler, executor: addresses. metrics: theirs by process.
    """
    async with AsyncExitStack() as exits:
        managers = [await exits.enter_async_context(_manager(driver, security)) for driver in drivers]
        shards = [manager.addresses[0] for manager in managers]
        fleet = await exits.enter_async_context(Fleet(shards, router, PLAIN))
        session = exits.enter_context(Session(",".join(shards), router, "" if router else scheduler, 10.0, Format.JSON))
        monitor = Monitor(session, metrics or {}, executor)
        server = HttpServer(create_app(fleet, monitor), "127.0.0.1:0", own_names=not any_name)
        await server.start()
        exits.push_async_callback(server.stop)
        yield Console(
            list(drivers), shards, [manager.stop for manager in managers], f"http://{server.address}", monitor
        )


@asynccontextmanager
async def _manager(driver: Driver, security: Security) -> AsyncIterator[Server]:
    """A manager's server for operators."""
    mutations = Mutations(driver.manager, ManagerClock(lambda: driver.now))
    context = ServiceContext(mutations, EventFeed(driver.manager.queries))
    admin = Server("cachemgr", drain_seconds=0, security=security)
    services = {
        "kvcache.v1.CacheAdminService": lambda to: rpc.add_CacheAdminServiceServicer_to_server(
            CacheAdminService(context), to
        ),
        "kvcache.v1.CacheEventService": lambda to: rpc.add_CacheEventServiceServicer_to_server(
            CacheEventService(context), to
        ),
    }
    admin.listen("127.0.0.1:0", services, check=tenancy.check)
    await admin.start()
    admin.set_serving(True)
    try:
        yield admin
    finally:
        await admin.stop()


@pytest.fixture
async def console() -> AsyncIterator[Console]:
    async with served(small()) as console:
        yield console
