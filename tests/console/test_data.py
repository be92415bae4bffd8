"""The console shows what the viewer's token may read from the cache manager, in small pages, and never a token id."""

import asyncio
import contextlib
import http.client
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

from bench.driver import Driver
from cachemgr.slices import at_once
from cachemgr.types import ExecutorSpec, PoolSpec, Prefix, Quota
from kvctl.console import app, data, monitor
from kvctl.console.app import serve
from kvctl.console.settings import ConsoleSettings
from protos.kvcache.v1 import kvcache_pb2 as pb
from protos.rpc import audit
from protos.rpc.addresses import AddressError
from protos.rpc.identity import Role
from protos.rpc.security import Security
from protos.rpc.server import Server
from protos.rpc.settings import load
from scheduler.router.process import Router
from scheduler.router.settings import RouterSettings
from tests.console.conftest import SECRET, Console, fill, served, small
from tests.support.keyring import Keyring
from tests.support.patience import patience
from tests.support.scheduler.fleet import run_fleet

POOL = {"pool": "e/0"}
PATHS = ("pools", "blocks", "sequences", "leases", "holds", "tenants", "events", "ghosts", "stack")


class Answer(NamedTuple):
    status: int
    headers: http.client.HTTPMessage
    body: str


async def ask(console: Console, method: str, path: str, headers: Mapping[str, str] | None = None) -> Answer:
    def call() -> Answer:
        connection = http.client.HTTPConnection(console.url.removeprefix("http://"), timeout=patience(30))
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
    assert page["next"] == ""
    listed = dict(filter(None, console.driver.manager.queries.blocks("e/0")))
    slots, keys, references, priorities, tokens, idle, owners = (
        [row[column] for row in page["rows"]] for column in (1, 2, 6, 7, 5, 9, 10)
    )
    assert slots == list(listed)
    assert keys == [view.key[:8].hex() for view in listed.values()]
    assert references == [view.references for view in listed.values()]
    assert priorities == [view.priority for view in listed.values()]
    assert tokens == [view.num_tokens for view in listed.values()]
    salts = [page["owners"][owner]["salt"] for owner in owners]
    assert salts == [None if view.scope is None else view.scope.salt for view in listed.values()]
    assert max(idle) == pytest.approx(100.0, abs=1)
    # The second request of this salt, the one that came again, and the one that runs.
    roots = [row for row, salt in zip(page["rows"], salts, strict=True) if row[4] == 0 and row[2] and salt == "acme"]
    assert [row[8] for row in roots] == [3]


async def test_leases_holds_tenants_and_ghosts(console: Console) -> None:
    page = await get(console, "leases", **POOL)
    assert page["next"] == ""
    every = [slot for lease in page["leases"] for slot in lease["slots"]]
    assert [pb.TIER_DEVICE] * len(every) == [tier for tier, _ in every]
    assert len(every) == sum(1 for _ in filter(None, console.driver.manager.queries.leases("e/0", "")))
    kinds = [(lease["holder"], lease["priority"], lease["remaining"], lease["started"]) for lease in page["leases"]]
    assert len(set(kinds)) == len(kinds) < len(every)
    assert {lease["priority"] for lease in page["leases"]} == {80}
    (pin,) = (await get(console, "holds"))["holds"]
    assert (pin["pin"], pin["owner"], pin["num_blocks"], pin["remaining_duration"]) == (True, "ops", 4, "300s")
    tenants = await get(console, "tenants", **POOL)
    assert {one.get("salt") for one in tenants["salts"]} == {None, "acme", "globex"}
    assert tenants["quotas"][0]["quota"]["device_ceiling_blocks"] == 100
    ghosts = await get(console, "ghosts", executor="e")
    assert ghosts["tokens"]["queried_tokens"] == (await get(console, "pools"))["pools"][0]["queried_tokens"]


async def test_sequences_have_their_tokens_and_slots(console: Console) -> None:
    [live] = console.driver.manager.queries.sequences()
    assert live.capacity > live.computed
    page = await get(console, "sequences", executor="e")
    assert page == {"rows": [["running", live.computed, live.capacity, live.blocks_held, False]], "next": ""}
    assert (await get(console, "sequences", executor="other"))["rows"] == []


async def test_only_the_newest_events_are_shown(console: Console) -> None:
    last = console.driver.manager.queries.last_event
    first = await get(console, "events")
    assert first["last"] == last
    assert len(first["events"]) == min(last, data.EVENTS)
    assert (await get(console, "events", after=last - 3))["events"] == first["events"][-3:]
    assert (await get(console, "events", after=last)) == {"last": last, "events": []}
    # As when the cache manager has started again, and counts from the beginning.
    assert (await get(console, "events", after=last + 100)) == first


async def test_events_are_found_where_the_cache_manager_answers_late(
    console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest = await get(console, "events")
    with monkeypatch.context() as late:
        late.setattr(data, "EVENT_SECONDS", -1.0)
        first = await get(console, "events")
    assert (first["events"], first["last"]) == ([], newest["last"] - len(newest["events"]))
    assert await get(console, "events", after=first["last"]) == newest


async def test_a_page_that_is_opened_later_gets_the_past_of_its_pool(console: Console) -> None:
    driver = console.driver
    assert "history" not in await get(console, "stack", **POOL)
    used = []
    for number in range(3):
        used.append((driver.pool.used_blocks, driver.pool.cached_blocks))
        await console.look()
        # The second one needs more blocks than are empty.
        driver.cache(f"large {number}", range(10_000 * number, 10_000 * number + 1_600))
    found = (await get(console, "stack", **POOL))["history"]
    assert list(zip(found["used"], found["cached"], strict=True)) == used
    assert found["ages"] == sorted(found["ages"], reverse=True)
    assert found["evicted"][:2] == [None, 0.0]
    assert found["evicted"][2] > 0.0
    assert all(0.0 < rate < 1.0 for rate in found["hit_rate"])
    # Of a pool that there is not, and of figures that nobody exports, nothing is said.
    assert set((await get(console, "stack", pool="x/0"))["history"]["used"]) == {None}
    assert set(found["tokens"]) == {None}


async def test_the_past_is_no_longer_than_ten_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "HISTORY_SECONDS", 3 * monitor.LOOK_SECONDS)
    async with served(Driver(200)) as console:
        for _ in range(6):
            await console.look()
        assert len((await get(console, "stack", **POOL))["history"]["ages"]) == 4


async def test_the_console_looks_by_itself(console: Console) -> None:
    with console.monitor:
        async with asyncio.timeout(patience(30)):
            while "history" not in (found := await get(console, "stack", **POOL)):
                await asyncio.sleep(0.01)
    assert [part["name"] for part in found["parts"]] == ["scheduler", "cachemgr"]


async def test_rates_and_start_are_those_of_the_processes_metrics() -> None:
    registry = CollectorRegistry()
    tokens = Counter("kvkeep_scheduler_output_tokens", "Tokens.", registry=registry)
    Gauge("process_start_time_seconds", "Start.", registry=registry).set(1_700_000_000)
    server, thread = start_http_server(0, "127.0.0.1", registry)
    try:
        async with served(Driver(200), metrics={"scheduler": f"127.0.0.1:{server.server_port}"}) as console:
            await console.look()
            tokens.inc(1000)
            await console.look()
            found = await get(console, "stack", **POOL)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert found["rates"]["output_tokens_per_second"] > 0.0
    assert [one is not None and one > 0.0 for one in found["history"]["tokens"]] == [False, True]
    assert found["started"] == {"scheduler": 1_700_000_000}


async def test_a_part_that_has_answered_before_is_away(console: Console) -> None:
    """A part that has never answered may be unreachable for the console."""
    await console.look()
    assert [part["state"] for part in (await get(console, "stack", **POOL))["parts"]] == ["unknown", "ok"]
    await console.stop[0]()
    await console.look()
    parts = (await get(console, "stack", **POOL))["parts"]
    assert [part["state"] for part in parts] == ["unknown", "away"]
    assert console.shards[0] in parts[1]["detail"]


async def test_who_was_not_allowed_before_sees_nothing_while_the_cache_manager_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = Keyring(tmp_path)
    viewer, other, last = (bearer(keys.add(Role.VIEWER)) for _ in range(3))
    tenant = bearer(keys.add(Role.VIEWER, "globex"))
    async with served(small(), security=Security(tokens_file=keys.file)) as console:
        await get(console, "stack", 200, viewer)
        await get(console, "stack", 403, tenant)
        with monkeypatch.context() as over:
            over.setattr(app, "ALLOWED_SECONDS", 0.0)
            await get(console, "stack", 200, last)
        await console.stop[0]()
        await get(console, "stack", 200, viewer)
        for unknown in (other, last, tenant, {}):
            await get(console, "stack", 503, unknown)


async def test_no_answer_has_a_token(console: Console) -> None:
    text = json.dumps([await get(console, path, **POOL, executor="e") for path in PATHS])
    assert str(SECRET)[:7] not in text
    assert SECRET.to_bytes(4, "little").hex() not in text


@pytest.mark.parametrize(
    ("path", "query", "status", "field"),
    [
        ("blocks", {}, 400, "pool_id"),
        ("blocks", {"pool": "x/0"}, 404, "pool_id"),
        ("blocks", {"pool": "e/0", "page": "x"}, 400, "page_token"),
        ("events", {"after": "-1"}, 400, "after"),
        ("events", {"after": "9" * 40}, 400, "after"),
        ("events", {"after": "²"}, 400, "after"),
        ("ghosts", {}, 400, "executor_id"),
        ("ghosts", {"executor": "x"}, 404, "executor_id"),
    ],
)
async def test_bad_requests_are_refused(console: Console, path: str, query: dict, status: int, field: str) -> None:
    assert field in (await get(console, path, status, **query))["fields"]


async def test_a_large_pool_comes_in_pages() -> None:
    driver = Driver(100_000)
    fill(driver)
    for number in range(10):
        driver.cache(f"long {number}", range(10_000 * number, 10_000 * number + 9_000))
    async with served(driver) as console:
        sizes, page = [], ""
        while True:
            found = await get(console, "blocks", **POOL, page=page)
            sizes.append(len(found["rows"]))
            if not (page := found["next"]):
                break
    assert sizes[:-1] == [data.PAGE] * (len(sizes) - 1)
    assert sum(sizes) == sum(1 for _ in filter(None, driver.manager.queries.blocks("e/0"))) > 5 * data.PAGE


async def test_pools_holds_and_quotas_are_all_shown_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = small()
    manager = driver.manager
    manager.register_executor(ExecutorSpec("f", 1, "m", bytes(32), 16, [PoolSpec(0, 10)]))
    prefix = Prefix(tuple(SECRET + number for number in range(64)), salt="globex")
    manager.operators.pin_prefix(prefix, "others", 300.0, validate_only=False)
    at_once(manager.operators.set_quota(Quota(salt="acme", device_ceiling=100), validate_only=False))
    async with served(driver) as console:

        async def shown() -> list[list[Any]]:
            found = {path: await get(console, path, **POOL) for path in ("pools", "holds", "tenants")}
            return [found["pools"]["pools"], found["holds"]["holds"], found["tenants"]["quotas"]]

        whole = await shown()
        assert min(map(len, whole)) > 1
        monkeypatch.setattr(data, "PAGE", 1)
        assert await shown() == whole


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
    async with served(Driver(200), any_name=True) as console:
        assert (await ask(console, "GET", "/api/pools", {"host": "cachemgr.example"})).status == 200


def bearer(security: Security) -> dict[str, str]:
    return {"authorization": f"Bearer {security.token()}"}


async def test_the_cache_manager_decides_what_a_viewers_token_may_read(tmp_path: Path) -> None:
    keys = Keyring(tmp_path)
    viewer, operator, caller, tenant = (
        bearer(keys.add(*role)) for role in ((Role.VIEWER,), (Role.OPERATOR,), (Role.CALLER,), (Role.VIEWER, "globex"))
    )
    async with served(small(), security=Security(tokens_file=keys.file)) as console:
        query = {**POOL, "executor": "e"}
        for path in PATHS:
            await get(console, path, 401, **query)
            for wrong in ("Bearer wrong", "Bearer \xe9", "Bearer a\tb"):
                await get(console, path, 401, {"authorization": wrong}, **query)
            await get(console, path, 403, caller, **query)
            await get(console, path, 403 if path in ("ghosts", "stack") else 200, tenant, **query)
            await get(console, path, 200, viewer, **query)
        await get(console, "pools", 200, operator)
        blocks = await get(console, "blocks", 200, tenant, **query)
        assert [owner["salt"] for owner in blocks["owners"]] == ["globex"]
        assert blocks["rows"]
        events = await get(console, "events", 200, tenant)
        assert {event["block"].get("salt", "globex") for event in events["events"] if "block" in event} == {"globex"}


async def test_reads_that_a_page_repeats_are_written_down_once_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = Keyring(tmp_path)
    viewers = [keys.add(Role.VIEWER) for _ in range(2)]
    security = Security(tokens_file=keys.file, audit_file=tmp_path / "audit")
    async with served(Driver(200), security=security) as console:
        for _ in range(3):
            await get(console, "pools", 200, bearer(viewers[0]))
        await get(console, "pools", 200, bearer(viewers[1]))
        await get(console, "blocks", 404, bearer(viewers[1]), pool="x/0")
        monkeypatch.setattr(audit, "REPEAT_SECONDS", 0.0)
        await get(console, "pools", 200, bearer(viewers[0]))
    lines = [json.loads(line) for line in (tmp_path / "audit").read_text().splitlines()]
    first, second = (viewer.token_file.name for viewer in viewers if viewer.token_file)
    assert [(line["caller"], line["method"].partition("/")[2], line["outcome"]) for line in lines] == [
        (first, "ListPools", "OK"),
        (second, "ListPools", "OK"),
        (second, "ListBlocks", "NOT_FOUND"),
        (first, "ListPools", "OK"),
    ]
    assert lines[2]["request"]["pool_id"] == "x/0"
    assert all(line["event"] == "audit" and " for 127.0.0.1:" in line["peer"] for line in lines)


async def test_a_viewers_token_does_not_travel_in_the_clear() -> None:
    for shards, router in ((["10.1.2.3:50062"], ""), ([], "10.1.2.3:50054")):
        with pytest.raises(AddressError, match="KVKEEP_TLS_CA_FILE"):
            await serve(load(ConsoleSettings, {}), shards, router)


async def test_each_of_several_shards_is_read_by_its_address() -> None:
    one, other = small(), Driver(300)
    async with served(one, other) as console:
        assert await get(console, "fleet") == {"shards": console.shards}
        for address, blocks in zip(console.shards, (200, 300), strict=True):
            [pool] = (await get(console, "pools", shard=address))["pools"]
            assert pool["total_blocks"] == blocks
        for path in PATHS:
            for wrong in ({}, {"shard": "127.0.0.1:1"}):
                assert "shard" in (await get(console, path, 400, **POOL, executor="e", **wrong))["fields"]


async def test_a_router_says_which_shards_and_engines_there_are(tmp_path: Path) -> None:
    async with run_fleet(tmp_path) as fleet, served(router=f"unix:{tmp_path}/router") as console:
        found = await get(console, "fleet")
        shards = [f"unix:{tmp_path}/engine-{number}/cachemgr_admin" for number in range(2)]
        assert found["shards"] == shards
        assert [engine["executor_id"] for engine in found["engines"]] == ["executor-0", "executor-1"]
        for number, shard in enumerate(shards):
            [pool] = (await get(console, "pools", shard=shard))["pools"]
            assert pool["pool_id"] == f"executor-{number}/0"
        fleet.health.set_serving(True)
        await console.look()
        found = await get(console, "stack", shard=shards[0], pool="executor-0/0")
        states = {part["name"]: part["state"] for part in found["parts"]}
        assert states == {
            "router": "ok", f"cachemgr {shards[0]}": "ok", f"cachemgr {shards[1]}": "ok", "2 of 2 engines": "ok",
        }  # fmt: skip
        assert (found["loads"], bool(found["model"]["name"])) == ({"running": 0, "waiting": 0}, True)
        # Known shards are shown without the router.
        await fleet.health.stop()
        found = await get(console, "fleet")
        assert (found["shards"], "engines" in found, bool(found["problem"])) == (shards, False, True)


async def test_a_router_decides_which_token_may_read_its_engines(tmp_path: Path) -> None:
    keys = Keyring(tmp_path)
    viewer, tenant = bearer(keys.add(Role.VIEWER)), bearer(keys.add(Role.VIEWER, "globex"))
    server = Server("router", drain_seconds=0, security=Security(tokens_file=keys.file))
    settings = RouterSettings(engines=f"unix:{tmp_path}/nobody", router_id="r")
    router = Router(settings, server, CollectorRegistry())
    server.listen(f"unix:{tmp_path}/router", router.services)
    await server.start()
    try:
        async with served(router=f"unix:{tmp_path}/router") as console:
            await get(console, "fleet", 401)
            await get(console, "fleet", 403, tenant)
            assert (await get(console, "fleet", 200, viewer))["shards"] == []
            assert "shard" in (await get(console, "pools", 400, viewer))["fields"]
        async with served(small(), router=f"unix:{tmp_path}/router") as console:
            # Where shards are named, those of one tenant see them.
            found = await get(console, "fleet", 200, tenant)
            assert (found["shards"], "all tenants" in found["problem"]) == (console.shards, True)
    finally:
        await router.stop()
        await server.stop()
