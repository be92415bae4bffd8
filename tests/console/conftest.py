"""A console beside a cache manager whose pool has been in use by several tenants."""

import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

import pytest

from bench.driver import CONFIG, Driver, prompt
from cachemgr.console.app import create_app
from cachemgr.types import Prefix, Quota, Retention, RetentionRange
from protos.rpc.guard import Guard
from protos.rpc.http_server import HttpServer

# Ids that no number on the page is.
SECRET = 3_987_654_000
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@dataclass
class Console:
    """A server, and the driver of the manager that it shows."""

    driver: Driver
    url: str


def fill(driver: Driver) -> None:
    """Some of everything that the console shows."""
    system = [SECRET + number for number in range(64)]
    for number in range(6):
        salt = ("acme", "globex", None)[number % 3]
        wish = Retention((RetentionRange(0, 64, 80, 600.0),))
        tokens = [*system, *prompt(number + 1, 64 + 16 * number)]
        tenant = {"tenant_id": salt} if salt else {}
        driver.cache(f"r{number}", tokens, salt=salt, session_id=f"s{number}", retention=wish, **tenant)
        driver.now += 20.0
    driver.cache("again", [*system, *prompt(1, 64)], salt="acme", tenant_id="acme")
    driver.admit("running", [*system, *prompt(9, 40)], salt="acme", tenant_id="acme")
    driver.manager.operators.pin_prefix(Prefix(tuple(system), salt="globex"), "ops", 300.0, validate_only=False)
    driver.manager.operators.set_quota(Quota(salt="globex", device_floor=4, device_ceiling=100), validate_only=False)


async def serve(driver: Driver, guard: Guard | None = None, *, any_name: bool = False) -> tuple[HttpServer, Console]:
    app = create_app(driver.manager, guard or Guard(None, None))
    server = HttpServer(app, "127.0.0.1:0", own_names=not any_name)
    await server.start()
    return server, Console(driver, f"http://{server.address}")


@pytest.fixture
async def console() -> AsyncIterator[Console]:
    driver = Driver(200, config=replace(CONFIG, ghost_sample=200))
    fill(driver)
    server, console = await serve(driver)
    yield console
    await server.stop()
