"""Which web pages may call the HTTP API: those of this machine on a loopback address, and those that are named."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import async_playwright

from protos.rpc.guard import Guard
from protos.rpc.http_server import HttpServer
from protos.rpc.identity import Role
from protos.rpc.settings import SettingsError, load
from scheduler.frontend.openai.origins import Origins
from scheduler.router.settings import RouterSettings
from scheduler.settings import SchedulerSettings
from tests.console.conftest import CHROMIUM
from tests.support.keyring import Keyring
from tests.support.ports import free_address
from tests.support.scheduler.fleet import run_fleet
from tests.support.scheduler.http import JSON, LEAST, Answer, ask, serve, starting_service
from tests.support.scheduler.process import scheduler
from tests.support.scheduler.stack import Stack

HERE, THERE, NAMED = "http://localhost:3000", "https://evil.example", "https://chat.example.com"
ALLOWED = "Access-Control-Allow-Origin"
STREAM = LEAST | {"stream": True}
LOCAL = Origins((), local=True)


def preflight(origin: str) -> Mapping[str, str]:
    return {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
    }


def words(answer: Answer, header: str) -> set[str]:
    return {word.strip().lower() for word in answer.headers[header].split(",")}


@pytest.mark.parametrize(
    "origin", [HERE, "http://127.0.0.1", "https://127.0.0.1:8443", "http://[::1]:3000", "http://localhost"]
)
async def test_a_page_of_this_machine_may_call_an_address_of_this_machine(origin: str) -> None:
    async with serve(starting_service(), origins=LOCAL) as address:
        asked = await ask(address, "OPTIONS", "/v1/chat/completions", headers=preflight(origin))
        assert (asked.status, asked.headers[ALLOWED]) == (200, origin)
        assert "post" in words(asked, "Access-Control-Allow-Methods")
        assert {"authorization", "content-type", "x-stainless-lang"} <= words(asked, "Access-Control-Allow-Headers")
        # What the browser hands on with no word of permission would be an error without a cause.
        for method, path, status in (("GET", "/v1/models", 503), ("GET", "/none", 404), ("PUT", "/v1/models", 405)):
            answer = await ask(address, method, path, headers={"Origin": origin})
            assert (answer.status, answer.headers[ALLOWED]) == (status, origin)
            assert "x-request-id" in words(answer, "Access-Control-Expose-Headers")
            assert answer.headers["Access-Control-Allow-Credentials"] is None


@pytest.mark.parametrize(
    "origin",
    [THERE, "null", "http://localhost.evil.example", "http://127.0.0.1.evil.example", "file://", "http://192.168.0.7"],
)
async def test_no_other_page_may(origin: str) -> None:
    async with serve(starting_service(), origins=Origins((NAMED,), local=True)) as address:
        asked = await ask(address, "OPTIONS", "/v1/chat/completions", headers=preflight(origin))
        assert (asked.status, asked.headers[ALLOWED]) == (400, None)
        assert (await ask(address, "GET", "/version", headers={"Origin": origin})).headers[ALLOWED] is None


async def test_where_other_machines_come_only_named_pages_may() -> None:
    async with serve(starting_service(), origins=Origins((NAMED,), local=False)) as address:
        for origin, allowed in ((NAMED, NAMED), (HERE, None), (THERE, None), (f"{NAMED}:8443", None)):
            assert (await ask(address, "OPTIONS", "/v1/models", headers=preflight(origin))).headers[ALLOWED] == allowed
            assert (await ask(address, "GET", "/version", headers={"Origin": origin})).headers[ALLOWED] == allowed
    async with serve(starting_service(), origins=Origins(("*",), local=False)) as address:
        assert (await ask(address, "OPTIONS", "/v1/models", headers=preflight(THERE))).headers[ALLOWED] == "*"
    async with serve(starting_service()) as address:
        assert (await ask(address, "OPTIONS", "/v1/models", headers=preflight(HERE))).status == 405


async def test_streams_and_refusals_are_for_pages_too(stack: Stack, keyring: Keyring) -> None:
    keyring.add(Role.CALLER)
    (token,) = keyring.tokens.values()
    named, guard = {"Origin": HERE}, Guard(keyring.file, None)
    async with serve(stack.scheduler.service, guard=guard, origins=LOCAL) as address:
        known = JSON | named | {"Authorization": f"Bearer {token}"}
        for body, headers, status in (
            (STREAM, known, 200),
            (STREAM | {"max_tokens": -1}, known, 400),
            (STREAM, JSON | named, 401),
        ):
            answer = await ask(address, "POST", "/v1/completions", json.dumps(body), headers)
            assert (answer.status, answer.headers[ALLOWED]) == (status, HERE)
        # A preflight has no token, and none is asked for.
        assert (await ask(address, "OPTIONS", "/v1/completions", headers=preflight(HERE))).status == 200


async def test_no_page_gets_past_the_preflight_with_a_form(stack: Stack) -> None:
    """What browsers send to any site without asking first."""
    async with serve(stack.scheduler.service, origins=LOCAL) as address:
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
            headers = {"Origin": THERE, "Content-Type": kind}
            answer = await ask(address, "POST", "/v1/completions", json.dumps(LEAST), headers)
            assert answer.status == 400, kind
        assert stack.manager.admitted_ids == []


PAGE = """
async ([url, body]) => {
  try {
    const answer = await fetch(url + "/v1/completions", {
      method: "POST", body, headers: {"Content-Type": "application/json", "Authorization": "Bearer none"}});
    return [answer.status, await answer.text(), answer.headers.get("X-Request-Id") !== null];
  } catch (error) {
    return [0, "" + error, false];
  }
}
"""


@contextlib.asynccontextmanager
async def page_at(host: str) -> AsyncIterator[Any]:
    """An empty page of a host in a browser."""

    async def empty(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/html")]})
        await send({"type": "http.response.body", "body": b"<!doctype html>"})

    server = HttpServer(empty, "127.0.0.1:0")
    await server.start()
    port = server.address.rpartition(":")[2]
    async with contextlib.AsyncExitStack() as exits:
        exits.push_async_callback(server.stop)
        playwright = await exits.enter_async_context(async_playwright())
        browser = await playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--host-resolver-rules=MAP evil.example 127.0.0.1"]
        )
        exits.push_async_callback(browser.close)
        page = await browser.new_page()
        await page.goto(f"http://{host}:{port}/")
        yield page


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the PATH: apt-get install chromium")
async def test_a_browser_lets_the_page_of_this_machine_read_a_stream_and_no_other(stack: Stack) -> None:
    async with serve(stack.scheduler.service, origins=LOCAL) as address:
        async with page_at("localhost") as page:
            status, text, named = await page.evaluate(PAGE, [f"http://{address}", json.dumps(STREAM)])
            assert (status, named) == (200, True), text
            assert text.rstrip().endswith("data: [DONE]")
            status, text, _ = await page.evaluate(PAGE, [f"http://{address}", "{}"])
            assert (status, "prompt" in text) == (400, True)
        before = len(stack.manager.admitted_ids)
        async with page_at("evil.example") as page:
            status, text, _ = await page.evaluate(PAGE, [f"http://{address}", json.dumps(STREAM)])
            assert (status, text) == (0, "TypeError: Failed to fetch")
        assert len(stack.manager.admitted_ids) == before


async def test_the_process_allows_pages_of_this_machine_and_named_origins(tmp_path: Path) -> None:
    address = free_address()
    async with scheduler(tmp_path, http_address=address, http_allowed_origins=NAMED) as running:
        await running.begin()
        for origin, allowed in ((HERE, HERE), (NAMED, NAMED), (THERE, None)):
            assert (await ask(address, "OPTIONS", "/v1/models", headers=preflight(origin))).headers[ALLOWED] == allowed


async def test_a_router_allows_them_as_a_scheduler_does(tmp_path: Path) -> None:
    async with run_fleet(tmp_path, 1, http_address="127.0.0.1:0", http_allowed_origins=NAMED) as fleet:
        server = fleet.router.http_server(Guard(None, None))
        assert server is not None
        await server.start()
        for origin, allowed in ((HERE, HERE), (NAMED, NAMED), (THERE, None)):
            for path in ("/v1/models", "/v1/chat/completions"):
                answer = await ask(server.address, "OPTIONS", path, headers=preflight(origin))
                assert answer.headers[ALLOWED] == allowed
        await server.stop()


NAME = "KVKEEP_SCHEDULER_HTTP_ALLOWED_ORIGINS"


def origins(value: str, **others: str) -> tuple[str, ...]:
    return load(SchedulerSettings, {NAME: value} | others).http_allowed_origins


def test_origins_are_named_with_commas_between_them() -> None:
    assert origins("") == ()
    assert origins(f"{NAMED}, http://10.0.0.7:3000") == (NAMED, "http://10.0.0.7:3000")
    assert origins("*", KVKEEP_INSECURE="1") == ("*",)


@pytest.mark.parametrize(
    "value",
    ["chat.example.com", f"{NAMED}/", f"{NAMED}/chat", "ftp://x", "https://*.example.com", "https://", f"*,{NAMED}"],
)
def test_an_invalid_origin_is_refused(value: str) -> None:
    with pytest.raises(SettingsError, match=f"{NAME}.*https://chat.example.com"):
        origins(value)


def test_the_settings_of_a_router_are_those_of_a_scheduler() -> None:
    engines = {"KVKEEP_ROUTER_ENGINES": "unix:/engine"}
    named = {"KVKEEP_ROUTER_HTTP_ALLOWED_ORIGINS": NAMED}
    assert load(RouterSettings, engines | named).http_allowed_origins == (NAMED,)
    with pytest.raises(SettingsError, match=r"KVKEEP_ROUTER_HTTP_ALLOWED_ORIGINS.*every web page"):
        load(RouterSettings, engines | {"KVKEEP_ROUTER_HTTP_ALLOWED_ORIGINS": "*"})


def test_every_page_may_only_where_tokens_keep_strangers_out(keyring: Keyring) -> None:
    with pytest.raises(SettingsError, match=f"{NAME}.*every web page.*KVKEEP_TOKENS_FILE.*KVKEEP_INSECURE=1"):
        origins("*")
    keyring.add(Role.CALLER)
    assert origins("*", KVKEEP_TOKENS_FILE=str(keyring.file)) == ("*",)
