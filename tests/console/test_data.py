"""The console tells what the cache manager knows, to who may hear it, in small pieces, and never a token."""

import asyncio
import contextlib
import http.client
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode

import pytest

from bench.driver import CONFIG, Driver
from cachemgr.console import app, data
from protos.rpc.guard import Guard
from protos.rpc.identity import Role
from tests.console.conftest import SECRET, Console, fill, serve
from tests.support.keyring import Keyring

POOL = {"pool": "e/0"}
PATHS = ("pools", "blocks", "block", "tree", "leases", "holds", "tenants", "events", "ghosts")


class Answer(NamedTuple):
    status: int
    headers: http.client.HTTPMessage
    body: str


async def ask(console: Console, method: str, path: str, headers: Mapping[str, str] | None = None) -> Answer:
    def call() -> Answer:
        connection = http.client.HTTPConnection(console.url.removeprefix("http://"), timeout=30)
        with contextlib.closing(connection):
            connection.request(method, path, headers=dict(headers or {}))
            answer = connection.getresponse()
            return Answer(answer.status, answer.headers, answer.read().decode())

    return await asyncio.to_thread(call)


async def get(
    console: Console, path: str, status: int = 200, headers: Mapping[str, str] | None = None, **query: object
) -> Any:
    answer = await ask(console, "GET", f"/api/{path}?{urlencode(query)}", headers)
    assert answer.status == status, answer.body
    return json.loads(answer.body)


async def test_blocks_are_those_that_operators_list(console: Console) -> None:
    page = await get(console, "blocks", **POOL)
    assert page["next"] is None
    listed = dict(console.driver.manager.queries.blocks("e/0"))
    columns = page["columns"]
    assert columns["place"] == list(listed)
    assert columns["references"] == [view.references for view in listed.values()]
    assert columns["priority"] == [view.priority for view in listed.values()]
    assert columns["tokens"] == [view.num_tokens for view in listed.values()]
    salts = [page["domains"][index]["salt"] for index in columns["domain"]]
    assert salts == [None if view.domain is None else view.domain.salt for view in listed.values()]
    assert max(columns["idle"]) == pytest.approx(100.0, abs=1)


async def test_the_tree_leads_to_every_chain(console: Console) -> None:
    (pool,) = console.driver.manager.queries.pools()
    found, waiting = 0, [""]
    while waiting:
        level = await get(console, "tree", key=waiting.pop(), **POOL)
        assert not level["more"]
        hits = [node["hits"] for node in level["nodes"]]
        assert hits == sorted(hits, reverse=True)
        found += sum(node["blocks"] for node in level["nodes"])
        waiting += [node["end"] for node in level["nodes"] if node["branches"]]
    assert found == len(console.driver.manager._state.pool("e/0").index) > pool.cached_blocks / 2
    first, *_ = (await get(console, "tree", **POOL))["nodes"]
    # Found by the second request of this salt, by the one that came again, and by the one that runs.
    assert (first["salt"], first["hits"], first["blocks"]) == ("acme", 3, 4)


async def test_leases_holds_tenants_and_ghosts(console: Console) -> None:
    page = await get(console, "leases", **POOL)
    assert page["next"] is None
    assert sum(lease["blocks"] for lease in page["leases"]) == sum(
        1 for _ in console.driver.manager.queries.leases("e/0", "")
    )
    kinds = [(lease["holder"], lease["priority"], lease["remaining"], lease["running"]) for lease in page["leases"]]
    assert len(set(kinds)) == len(kinds) < sum(lease["blocks"] for lease in page["leases"])
    assert {lease["priority"] for lease in page["leases"]} == {80}
    (pin,) = (await get(console, "holds"))["holds"]
    assert (pin["pin"], pin["owner"], pin["blocks"], pin["remaining"]) == (True, "ops", 4, 300.0)
    tenants = await get(console, "tenants", **POOL)
    assert {one["salt"] for one in tenants["salts"]} == {None, "acme", "globex"}
    assert tenants["quotas"][0]["ceiling"] == 100
    ghosts = await get(console, "ghosts", executor="e")
    assert ghosts["queried_tokens"] == (await get(console, "pools"))["pools"][0]["queried_tokens"]


async def test_only_the_newest_events_are_told(console: Console) -> None:
    last = console.driver.manager.queries.last_event
    first = await get(console, "events")
    assert first["last"] == last
    assert len(first["events"]) == min(last, data.EVENTS)
    assert first["skipped"] == max(0, last - data.EVENTS)
    assert (await get(console, "events", after=last - 3))["events"] == first["events"][-3:]
    assert (await get(console, "events", after=last + 100))["events"] == []


async def test_no_answer_has_a_token(console: Console) -> None:
    query = {**POOL, "executor": "e", "place": 1}
    text = json.dumps([await get(console, path, **query) for path in PATHS])
    assert str(SECRET)[:7] not in text
    assert SECRET.to_bytes(4, "little").hex() not in text


@pytest.mark.parametrize(
    ("path", "query", "status", "field"),
    [
        ("blocks", {}, 400, "pool"),
        ("blocks", {"pool": "x/0"}, 404, "pool_id"),
        ("blocks", {"pool": "e/0", "after": "-1"}, 400, "after"),
        ("blocks", {"pool": "e/0", "after": "9" * 40}, 400, "after"),
        ("block", {"pool": "e/0", "place": "one"}, 400, "place"),
        ("tree", {"pool": "e/0", "key": "xyz"}, 400, "key"),
        ("leases", {"pool": "e/0", "after": "²"}, 400, "after"),
        ("ghosts", {}, 400, "executor"),
        ("ghosts", {"executor": "x"}, 404, "executor_id"),
    ],
)
async def test_bad_requests_are_refused(console: Console, path: str, query: dict, status: int, field: str) -> None:
    assert field in (await get(console, path, status, **query))["fields"]


async def test_what_is_not_there_is_empty(console: Console) -> None:
    assert (await get(console, "block", place=10**9, **POOL))["empty"]
    assert (await get(console, "blocks", after=10**9, **POOL))["next"] is None
    assert (await get(console, "tree", key="00" * 32, **POOL))["nodes"] == []


async def test_a_large_pool_comes_in_pages() -> None:
    driver = Driver(100_000)
    fill(driver)
    server, console = await serve(driver)
    pages, after = 0, 0
    while after is not None:
        after = (await get(console, "blocks", after=after, **POOL))["next"]
        pages += 1
    await server.stop()
    assert pages == 100_000 // data.PAGE


async def test_every_answer_says_what_a_browser_may_do(console: Console) -> None:
    for path in ("/", "/app.js", "/style.css", "/icon.svg", "/api/pools", "/nothing"):
        answer = await ask(console, "GET", path)
        assert answer.status == (404 if path == "/nothing" else 200)
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
async def test_nothing_can_be_changed(console: Console, method: str) -> None:
    for path in ("/api/pools", "/api/holds", "/index.html"):
        assert (await ask(console, method, path)).status == 405


async def test_a_name_that_another_site_has_pointed_here_is_not_answered(console: Console) -> None:
    for path in ("/api/pools", "/"):
        for name in ("evil.example", "evil.example:9112", "127.0.0.1.evil.example", "localhost.evil.example", "[", ""):
            assert (await ask(console, "GET", path, {"host": name})).status == 400
        # 10.1.2.3: as in a container whose port is published.
        for name in ("localhost:1", "127.0.0.1", "[::1]:9112", "10.1.2.3:9112"):
            assert (await ask(console, "GET", path, {"host": name})).status == 200


async def test_where_tokens_or_tls_keep_other_sites_out_any_name_is_answered() -> None:
    server, console = await serve(Driver(200), any_name=True)
    assert (await ask(console, "GET", "/api/pools", {"host": "cachemgr.example"})).status == 200
    await server.stop()


async def test_who_reads_needs_the_role_for_it(tmp_path: Path) -> None:
    keys = Keyring(tmp_path)
    shown = {
        name: {"authorization": f"Bearer {keys.add(*role).token()}"}
        for name, role in {
            "viewer": (Role.VIEWER,),
            "operator": (Role.OPERATOR,),
            "caller": (Role.CALLER,),
            "one tenant": (Role.VIEWER, "acme"),
        }.items()
    }
    driver = Driver(200, config=replace(CONFIG, ghost_sample=200))
    server, console = await serve(driver, Guard(keys.file, None))
    query = {**POOL, "executor": "e", "place": 1}
    for path in PATHS:
        await get(console, path, 401, **query)
        await get(console, path, 401, {"authorization": "Bearer wrong"}, **query)
        await get(console, path, 403, shown["caller"], **query)
        await get(console, path, 403, shown["one tenant"], **query)
        await get(console, path, 200, shown["viewer"], **query)
    await get(console, "pools", 200, shown["operator"])
    await server.stop()


async def test_who_looks_is_written_down_once_a_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = Keyring(tmp_path)
    viewers = [keys.add(Role.VIEWER) for _ in range(2)]
    headers = [{"authorization": f"Bearer {viewer.token()}"} for viewer in viewers]
    server, console = await serve(Driver(200), Guard(keys.file, tmp_path / "audit"))
    for _ in range(3):
        await get(console, "pools", 200, headers[0])
    await get(console, "pools", 200, headers[1])
    await get(console, "block", 400, headers[1], **POOL, place=-1)
    monkeypatch.setattr(app, "AUDIT_SECONDS", 0.0)
    await get(console, "pools", 200, headers[0])
    await server.stop()
    lines = [json.loads(line) for line in (tmp_path / "audit").read_text().splitlines()]
    first, second = (viewer.token_file.name for viewer in viewers if viewer.token_file)
    assert [(line["who"], line["method"].partition("/")[2], line["outcome"]) for line in lines] == [
        (first, "ListPools", "OK"),
        (second, "ListPools", "OK"),
        (second, "ListBlocks", "INVALID_ARGUMENT"),
        (first, "ListPools", "OK"),
    ]
    assert lines[2]["request"] == {**POOL, "place": "-1"}
    assert all(line["event"] == "audit" and line["peer"].startswith("127.0.0.1:") for line in lines)
