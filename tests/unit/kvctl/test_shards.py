"""kvctl over two cache managers: one table of both, changes on each, and no failure of one that is not said."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from kvctl.verbs import show
from protos.generation.v1 import generation_pb2 as pb
from tests.stack import ROOT
from tests.support.cachemgr_client import Client
from tests.support.generation import generate, greedy_request
from tests.support.kvctl import ask
from tests.support.managers import Managers, cached
from tests.support.patience import patience
from tests.support.scheduler.fleet import run_fleet
from tests.support.scheduler.stack import prompt_of
from tests.unit.kvctl.conftest import Kvctl

TOKENS = ",".join(map(str, range(8)))


@dataclass
class Two(Kvctl):
    """Two cache managers, an executor and two blocks each. `addresses`: theirs for operators."""

    clients: list[Client]
    leave: list[AsyncExitStack]

    def __init__(
        self,
        captured: pytest.CaptureFixture[str],
        variables: dict[str, str],
        clients: list[Client],
        leave: list[AsyncExitStack],
    ) -> None:
        super().__init__(captured, variables)
        self.clients, self.leave = clients, leave

    @property
    def addresses(self) -> list[str]:
        return [client.settings.cachemgr_admin_address for client in self.clients]

    async def end(self, number: int) -> None:
        """One of them is gone."""
        await self.leave[number].aclose()


async def _two(
    folder: Path, ids: Sequence[str], captured: pytest.CaptureFixture[str], patch: pytest.MonkeyPatch
) -> AsyncIterator[Two]:
    clients, leave = [], [AsyncExitStack() for _ in ids]
    for number, executor_id in enumerate(ids):
        (folder / f"{number}").mkdir()
        managers = Managers(folder / f"{number}", "")
        client = await leave[number].enter_async_context(managers.run(executor_id=executor_id))
        await client.register()
        await cached(client, 9)
        clients.append(client)
    variables = {"KVCTL_SERVER": ",".join(client.settings.cachemgr_admin_address for client in clients)}
    for name, value in variables.items():
        patch.setenv(name, value)
    try:
        yield Two(captured, variables, clients, leave)
    finally:
        for one in leave:
            await one.aclose()


@pytest.fixture
async def two(tmp_path: Path, capfd: pytest.CaptureFixture[str], clean: pytest.MonkeyPatch) -> AsyncIterator[Two]:
    async for one in _two(tmp_path, ("gpu-0", "gpu-1"), capfd, clean):
        yield one


@pytest.fixture
async def equal(tmp_path: Path, capfd: pytest.CaptureFixture[str], clean: pytest.MonkeyPatch) -> AsyncIterator[Two]:
    """Both have an executor of one id."""
    async for one in _two(tmp_path, ("gpu-0", "gpu-0"), capfd, clean):
        yield one


@pytest.mark.parametrize(
    ("line", "second", "each"),
    [
        (("pools",), "POOL", 1),
        (("blocks",), "POOL", 2),
        (("prefixes",), "POOL", 1),
        (("holds",), "NAME", 1),
        (("sequences",), "SEQUENCE", 1),
        (("rules", "list"), "NAME", 1),
        (("quota", "list"), "ACCOUNT", 1),
    ],
)
async def test_listings_have_the_rows_of_both_behind_their_shard(
    two: Two, line: tuple[str, ...], second: str, each: int
) -> None:
    for client in two.clients:
        await client.admit("running", [*range(100, 105)])
    await two.text("rules", "set", "acme", "--salt", "acme", "--priority", 80)
    await two.text("quota", "set", "--salt", "acme", "--device-floor", 1)
    await two.text("pin", "--tokens", TOKENS, "--for", "1h", "--owner", "ops")
    head, *rows = await two.rows(*line)
    assert head[:2] == ["SHARD", second]
    assert {row[0] for row in rows} == set(two.addresses)
    assert all(sum(row[0] == address for row in rows) >= each for address in two.addresses)
    alone = {address: await two.data(*line, "--server", address) for address in two.addresses}
    both = (await two.data(*line))["shards"]
    assert both.keys() == alone.keys()
    [head, *_] = await two.rows(*line, "--server", two.addresses[0])
    assert head[0] == second
    for address in two.addresses:
        assert both[address].keys() == alone[address].keys()
        [items] = [items for items in both[address].values() if isinstance(items, list)]
        [expected] = [items for items in alone[address].values() if isinstance(items, list)]
        assert len(items) == len(expected)


async def test_a_limit_is_one_of_all_shards(two: Two) -> None:
    for limit, counts in ((1, [1, 0]), (3, [2, 1]), (0, [2, 2])):
        found = (await two.data("blocks", "--limit", limit))["shards"]
        assert [len(found[address]["blocks"]) for address in two.addresses] == counts


async def test_what_changes_something_goes_to_each_and_says_so_of_each(two: Two) -> None:
    one, other = two.addresses
    assert await two.text("quota", "set", "--salt", "acme", "--device-floor", 1) == (
        f"{one}: set the quota of salt acme\n{other}: set the quota of salt acme\n"
    )
    assert "".join(await two.text("rules", "set", "acme", "--salt", "acme", "--priority", 80)).count("made rule") == 2
    changed = await two.text("rules", "set", "acme", "--salt", "acme", "--priority", 60, "--yes")
    assert changed.count("changed rule acme") == 2
    pinned = await two.text("pin", "--tokens", TOKENS, "--for", "1h", "--owner", "ops")
    assert pinned.count("pinned 2 blocks for 1h") == 2
    assert len({row[1] for row in (await two.rows("holds"))[1:]}) == 2
    assert (await two.text("forget", "--tokens", TOKENS, "--yes")).count("forgot blocks: 2 device") == 2
    assert (await two.text("rules", "delete", "acme", "--yes")).count("deleted rule acme") == 2
    # If one shard has the thing, it is no failure that a different shard lacks it.
    await two.text("quota", "delete", "--salt", "acme", "--yes", "--server", one)
    assert await two.text("quota", "delete", "--salt", "acme", "--yes") == (
        f"{other}: deleted the quota of salt acme\n{one}: has none\n"
    )
    done = await two.run("quota", "delete", "--salt", "acme", "--yes")
    assert (done.status, done.err) == (4, "error: there is no quota of salt acme\n")


async def test_what_one_shard_fails_at_is_said_and_the_others_go_on(two: Two) -> None:
    here, gone = two.addresses
    await two.end(1)
    for line in (
        ("pools",),
        ("blocks",),
        ("evict", "--all", "--dry-run"),
        ("quota", "set", "--salt", "x"),
        ("fsck", "--no-store"),
    ):
        done = await two.run(*line)
        assert (done.status, here in done.out, gone in done.out) == (3, True, False), done
        assert done.err == f"error: no answer at {gone}: is the stack running?\n"
    done = await two.run("evict", "--all", "--yes")
    assert (done.status, f"{here}: evicted 2 blocks" in done.out, gone in done.err) == (3, True, True)
    found = await two.data("pools", status=3)
    assert found["shards"][gone] == {"error": f"no answer at {gone}: is the stack running?"}
    await two.end(0)
    done = await two.run("pools")
    assert (done.status, done.out) == (3, "")
    assert (here in done.err, gone in done.err, done.err.count("\n")) == (True, True, 1)


async def test_a_named_pool_or_executor_is_that_of_one_shard(two: Two) -> None:
    assert await two.text("pool", "set", "gpu-1/0", "--blocks", 30) == "set pool gpu-1/0 from 32 to 30 blocks\n"
    assert [row[2] for row in (await two.rows("pools"))[1:]] == ["32", "30"]
    assert await two.text("evict", "--pool", "gpu-1/0", "--yes") == "evicted 2 blocks\n"
    assert len((await two.rows("blocks"))[1:]) == 2
    assert (await two.text("explain", "--tokens", TOKENS, "--executor", "gpu-0")).startswith("gpu-0: 8 cached tokens")
    assert (await two.text("preview", "--tokens", TOKENS, "--executor", "gpu-0")).startswith("gpu-0: would be admitted")
    both = await two.data("preview", "--tokens", TOKENS)
    assert {found for shard in both["shards"].values() for found in shard} == {"gpu-0", "gpu-1"}
    assert "pool_id: gpu-1/0" in await two.text("describe", "pool", "gpu-1/0")
    assert (await two.data("ghosts", "--executor", "gpu-1"))["ghosts"].keys() == {"gpu-1"}
    done = await two.run("pool", "set", "gpu-7/0", "--blocks", 30)
    assert (done.status, done.err) == (4, "error: no shard has the executor 'gpu-7'\n")
    await two.end(0)
    done = await two.run("pool", "set", "gpu-0/0", "--blocks", 30)
    assert (done.status, two.addresses[0] in done.err) == (3, True)
    assert await two.text("pool", "set", "gpu-1/0", "--blocks", 32) == "set pool gpu-1/0 from 30 to 32 blocks\n"


async def test_cached_blocks_of_a_smaller_pool_are_told_asked_about_and_counted(two: Two) -> None:
    line = ("pool", "set", "gpu-1/0", "--blocks", 1)
    left = "1 cached block off the device (dropped: 1 device)"
    dry = await two.text(*line, "--dry-run")
    assert dry == f"would set pool gpu-1/0 from 32 to 1 blocks\nwould take {left}\n"
    done = await two.run(*line)
    assert (done.status, "--yes" in done.err) == (2, True)
    variables = os.environ | two.variables | {"PYTHONPATH": str(ROOT)}
    refused = await asyncio.to_thread(ask, variables, "n", *map(str, line))
    question = f"Set pool gpu-1/0 from 32 to 1 blocks, take {left}?"
    assert (refused.status, question in " ".join(refused.err.split())) == (4, True)
    assert await two.text(*line, "--yes") == f"set pool gpu-1/0 from 32 to 1 blocks\ntook {left}\n"
    head, *rows = await two.rows("pools")
    assert [row[head.index("EVICTED")] for row in rows] == ["0", "1"]


async def test_of_executors_with_one_id_the_shard_must_be_named(equal: Two) -> None:
    done = await equal.run("pool", "set", "gpu-0/0", "--blocks", 30)
    assert done.status == 2
    assert all(part in done.err for part in ("--server", *equal.addresses))
    await equal.text("pool", "set", "gpu-0/0", "--blocks", 30, "--server", equal.addresses[1])
    assert [row[2] for row in (await equal.rows("pools"))[1:]] == ["32", "30"]


async def test_a_hold_a_sequence_and_a_rule_are_found_where_they_are(two: Two) -> None:
    one, other = two.addresses
    await two.text("pin", "--tokens", TOKENS, "--for", "1h", "--owner", "ops", "--executor", "gpu-1")
    [[_, name, *_]] = (await two.rows("holds"))[1:]
    found = yaml.safe_load(await two.text("describe", "hold", name))
    assert (found["shard"], found["hold"]["owner"]) == (other, "ops")
    assert f"ended {name} of ops, 2 blocks, on {other}" in await two.text("unpin", name, "--yes")
    done = await two.run("unpin", name, "--yes")
    assert (done.status, name in done.err) == (4, True)
    await two.clients[1].admit("running", [*range(100, 105)])
    assert yaml.safe_load(await two.text("describe", "sequence", "running"))["shard"] == other
    assert (await two.text("explain", "--sequence", "running")).startswith(f"{other}: gpu-1: ")
    await two.text("rules", "set", "acme", "--salt", "acme", "--priority", 80)
    assert yaml.safe_load(await two.text("describe", "rule", "acme"))["shards"].keys() == {one, other}


async def test_hints_go_to_the_data_plane_of_each(two: Two) -> None:
    data = ",".join(client.settings.cachemgr_address for client in two.clients)
    line = ("retain", "--tokens", TOKENS, "--priority", "80", "--for", "10m", "--session", "ops")
    assert (await two.text(*line, "--cachemgr", data)).count("accepted, 2 blocks") == 2
    assert len((await two.rows("leases", "--holder", "session/ops"))[1:]) == 4
    only = await two.text(*line, "--cachemgr", data, "--executor", "gpu-1")
    assert only == "accepted, 2 blocks\n"
    done = await two.run(*line)
    assert (done.status, "1 addresses for 2 shards" in done.err) == (2, True)


async def test_rules_are_read_from_a_listing_of_both(two: Two, tmp_path: Path) -> None:
    one, other = two.addresses
    for address, priority in zip(two.addresses, (60, 80), strict=True):
        await two.text("rules", "set", "acme", "--salt", "acme", "--priority", priority, "--server", address)
    file = tmp_path / "rules.yaml"
    file.write_text(await two.text("rules", "list", "-o", "yaml"))
    await two.text("rules", "delete", "acme", "--yes")
    await two.text("rules", "set", "acme", "-f", file)
    found = (await two.data("rules", "list"))["shards"]
    assert [found[one]["rules"][0]["action"]["retention_priority"] for one in (one, other)] == [60, 80]
    file.write_text(yaml.safe_dump(found[one]["rules"][0]))
    done = await two.run("rules", "set", "acme", "-f", file, "--yes")
    assert (done.status, "an etag belongs to a single shard" in done.err) == (2, True)
    await two.text("rules", "set", "acme", "-f", file, "--yes", "--server", one)


async def test_a_terminal_is_asked_once_about_all(two: Two) -> None:
    one, other = two.addresses
    await two.text("rules", "set", "acme", "--salt", "acme", "--priority", 80)
    variables = os.environ | two.variables | {"PYTHONPATH": str(ROOT)}
    done = await asyncio.to_thread(ask, variables, "n", "rules", "delete", "acme")
    assert done.status == 4
    for address in (one, other):
        assert f"{address}: Delete rule acme and end 0 leases?" in " ".join(done.err.split())
    assert len((await two.rows("rules", "list"))[1:]) == 2
    await two.end(1)
    done = await asyncio.to_thread(ask, variables, "y", "rules", "delete", "acme")
    assert (done.status, f"{one}: deleted rule acme" in done.out) == (3, True)
    assert f"{other} is left out: no answer" in " ".join(done.err.split())


async def test_events_of_both_come_together(two: Two) -> None:
    # Of each: its pool, its executor and two blocks. Not for some time: connecting would be part of it.
    lines = (await two.text("watch", "--count", 8)).splitlines()
    for client in two.clients:
        own = [line for line in lines if line.startswith(f"{client.settings.cachemgr_admin_address}  ")]
        assert sum("stored" in line for line in own) == 2
        assert all(client.executor_id in line for line in own)
    seen = [json.loads(line) for line in (await two.text("watch", "--count", 8, "-o", "json")).splitlines()]
    assert {one["shard"] for one in seen} <= set(two.addresses)
    only = (await two.text("watch", "--count", 4, "--pool", "gpu-1/0")).splitlines()
    assert len(only) == 4
    assert all(line.split()[1] == "snapshot" and "gpu-1" in line for line in only)
    done = await two.run("watch", "--after", 1)
    assert (done.status, "--server" in done.err) == (2, True)
    await two.end(1)
    done = await two.run("watch", "--for", "60s")
    assert (done.status, two.addresses[1] in done.err) == (3, True)


async def test_checks_states_and_the_screen_are_of_both(two: Two) -> None:
    one, other = two.addresses
    counted = await two.text("fsck", "--no-store")
    assert [row.split()[0] for row in counted.splitlines()] == ["SHARD", one, other, f"{one}:", f"{other}:"]
    assert counted.count("clean") == 2
    assert len({row[1] for row in await two.rows("state", "--hash")}) == 2
    assert len((await two.data("state"))["shards"][one]["lines"]) > 3
    done = await two.run("state")
    assert (done.status, one in done.err) == (2, True)
    shown = await two.text("top", "--once", "--interval", 0.1)
    for part in ("gpu-0/0", "gpu-1/0", "pools of"):
        assert part in shown
    found = await two.data("top", "--interval", 0.1)
    assert [list(found["shards"][address]["stats"]) for address in (one, other)] == [["gpu-0/0"], ["gpu-1/0"]]
    assert (await two.data("ghosts"))["shards"][other]["ghosts"].keys() == {"gpu-1"}


async def test_a_wrong_list_of_servers_is_named(two: Two) -> None:
    for wrong, said in (
        ("nowhere", "host:port"),
        (f"{two.addresses[0]},{two.addresses[0]}", "twice"),
        (",", "no address"),
    ):
        done = await two.run("pools", "--server", wrong)
        assert (done.status, "--server" in done.err, said in done.err) == (2, True, True), done


async def test_a_router_names_the_shards_and_lists_its_engines(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], clean: pytest.MonkeyPatch
) -> None:
    async with run_fleet(tmp_path, policy="round-robin") as fleet:
        router = f"unix:{tmp_path}/router"
        clean.setenv("KVCTL_ROUTER", router)
        kvctl = Kvctl(capfd, {})
        await asyncio.gather(*[generate(fleet.stub, greedy_request(prompt_of(20, s), 4)) for s in range(4)])
        shards = [f"unix:{tmp_path}/engine-{number}/cachemgr_admin" for number in range(2)]
        head, *rows = await kvctl.rows("engines")
        assert head[:4] == ["ENGINE", "EXECUTOR", "SHARD", "STATE"]
        assert [row[1:4] for row in rows] == [[f"executor-{n}", shards[n], "ready"] for n in range(2)]
        assert [row[7] for row in rows] == ["2", "2"]
        head, *rows = await kvctl.rows("pools")
        assert [row[:2] for row in rows] == [[shards[n], f"executor-{n}/0"] for n in range(2)]
        # The variable of the services is that of one shard. A router counts before it, also as an option.
        clean.setenv("KVKEEP_CACHEMGR_ADMIN_ADDRESS", shards[1])
        assert [row[0] for row in (await kvctl.rows("pools"))[1:]] == shards
        clean.delenv("KVCTL_ROUTER")
        assert (await kvctl.rows("pools"))[1][0] == "executor-1/0"
        assert [row[0] for row in (await kvctl.rows("pools", "--router", router))[1:]] == shards
        clean.setenv("KVKEEP_ROUTER_ADDRESS", router)
        assert [row[0] for row in (await kvctl.rows("pools"))[1:]] == shards
        clean.setenv("KVCTL_SERVER", shards[0])
        assert (await kvctl.rows("pools"))[1][0] == "executor-0/0"
        for variable in ("KVCTL_SERVER", "KVKEEP_ROUTER_ADDRESS", "KVKEEP_CACHEMGR_ADMIN_ADDRESS"):
            clean.delenv(variable)
        clean.setenv("KVCTL_ROUTER", router)
        # An address that is given is all that is asked.
        assert (await kvctl.rows("pools", "--server", shards[1]))[1][0] == "executor-1/0"
        # Each service serves when it has looked at the services that it needs.
        async with asyncio.timeout(patience(60)):
            while (await kvctl.run("ping")).status:
                await asyncio.sleep(0.05)
        rows = await kvctl.rows("ping")
        assert [row[0] for row in rows[1:]] == ["router", *["scheduler"] * 2, *["admin"] * 2, *["executor"] * 2]
        assert [row[1] for row in rows[-2:]] == [f"unix:{tmp_path}/engine-{number}/executor" for number in range(2)]
        assert "unix:" in await kvctl.text("top", "--once", "--interval", 0.1)
        done = await kvctl.run("drain", "--yes")
        assert (done.status, "ENGINE" in done.err) == (2, True)
        assert "has no engine 'x'" in (await kvctl.run("drain", "x", "--yes")).err
        drained = await kvctl.text("drain", "executor-1", "--yes")
        assert drained.startswith(f"the engine {fleet.engines[1].address} admits no more requests")
        await fleet.ready(1)
        assert [row[3] for row in (await kvctl.rows("engines"))[1:]] == ["ready", "away"]
        assert "it takes no new requests" in await kvctl.text("engines")
        assert (await fleet.stub.GetModel(pb.GetModelRequest())).model
        await kvctl.text("drain", fleet.engines[1].address, "--undo", "--server", shards[1])
        await fleet.ready(2)


async def test_what_needs_a_router_says_so(capfd: pytest.CaptureFixture[str], clean: pytest.MonkeyPatch) -> None:
    kvctl = Kvctl(capfd, {})
    done = await kvctl.run("engines")
    assert (done.status, "--router" in done.err) == (2, True)
    done = await kvctl.run("pools", "--router", "unix:/nowhere")
    assert (done.status, done.err) == (
        3,
        "error: no answer at unix:/nowhere: is the stack running? "
        "Only the router knows the cache managers: without it name them with --server\n",
    )


@pytest.mark.parametrize(
    ("engine", "executor", "asked"),
    [
        ("127.0.0.1:50051", "127.0.0.1:50053", True),
        ("unix:/run/a", "localhost:50053", True),
        ("10.0.0.7:50051", "10.0.0.8:50053", True),
        # Of the machine or the pod of the engine.
        ("10.0.0.7:50051", "localhost:50053", False),
        ("engine-0.engines:50051", "unix:/run/kvkeep/executor", False),
        ("10.0.0.7:50051", "", False),
    ],
)
def test_executors_are_asked_where_their_address_means_the_same(engine: str, executor: str, asked: bool) -> None:
    assert show.can_be_asked(pb.RoutedEngine(address=engine, executor_address=executor)) is asked
