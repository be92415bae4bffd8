"""What verbs of kvctl do on a real stack beyond the examples of docs/operations.md, which run too."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import random
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from redis import Redis

from cachemgr.operators.state_dump import state_hash
from protos.generation.v1 import generation_pb2 as pb
from protos.generation.v1 import generation_pb2_grpc as rpc
from tests.stack import Stack
from tests.support.kvctl import Kvctl, command, ctrl_c_is_heard, environment
from tests.support.patience import patience
from tests.support.ports import free_address

pytestmark = pytest.mark.model

POOL = "executor-0/0"
BLOCK = 16
STEERED = (("pools",), ("rules", "list"), ("quota", "list"), ("blocks", "--salt", "kept"))


def own_stack() -> Stack:
    stack = Stack(executor_max_tokens=2048, executor_host_cache_size="16MiB", executor_metrics_address=free_address())
    stack.own["cachemgr"] = {"cachemgr_operation_log": stack.folder / "operations.log"}
    return stack


@pytest.fixture(scope="module")
def own() -> Iterator[Stack]:
    with own_stack() as stack:
        yield stack


@pytest.fixture
def kvctl(own: Stack, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Kvctl:
    return Kvctl(own, capfd, monkeypatch)


def prompt_of(seed: int, blocks: int = 3) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000, 40_000) for _ in range(blocks * BLOCK)]


def listed(prompt: list[int]) -> str:
    return ",".join(map(str, prompt))


def generate(stack: Stack, **fields: Any) -> pb.Usage:
    """Runs a request to its end."""
    with grpc.insecure_channel(stack.scheduler) as channel:
        stub: rpc.GenerationServiceStub = rpc.GenerationServiceStub(channel)
        request = pb.StreamGenerateRequest(max_tokens=1, **fields)
        *_, last = stub.StreamGenerate(request, timeout=patience(60))
        return last.usage


def remember(stack: Stack, seed: int, salt: str) -> list[int]:
    """Leaves three blocks of a prompt in the cache, which no sequence uses."""
    prompt = prompt_of(seed)
    cache = pb.CacheOptions(salt=salt, tenant_id="team", session_id="chat")
    generate(stack, token_ids=pb.TokenIds(token_ids=prompt), cache=cache)
    return prompt


def until_released(kvctl: Kvctl, salt: str) -> None:
    """Waits until a request's blocks are released, by a sync after its last answer, and written through to the host."""
    while kvctl.data("sequences", "--salt", salt)["sequences"]:
        time.sleep(0.05)
    while any(int(tier["used_blocks"]) for pool in kvctl.data("pools")["pools"] for tier in pool["lower_tiers"]):
        time.sleep(0.05)


@contextlib.contextmanager
def running(stack: Stack, salt: str) -> Iterator[None]:
    """A running request."""
    with grpc.insecure_channel(stack.scheduler) as channel:
        stub: rpc.GenerationServiceStub = rpc.GenerationServiceStub(channel)
        request = pb.StreamGenerateRequest(
            token_ids=pb.TokenIds(token_ids=prompt_of(1)), max_tokens=1000, ignore_eos=True
        )
        request.cache.salt = salt
        call = stub.StreamGenerate(request, timeout=patience(60))
        next(call)
        try:
            yield
        finally:
            call.cancel()


def test_pools_are_listed_in_four_ways(kvctl: Kvctl) -> None:
    pool = kvctl.data("pools")["pools"][0]
    assert (pool["pool_id"], pool["block_size"], pool["total_blocks"]) == (POOL, BLOCK, 128)
    assert yaml.safe_load(kvctl.text("pools", "-o", "yaml"))["pools"][0]["spec"] == pool["spec"]
    head, row = kvctl.text("pools").splitlines()
    assert row.split()[:2] == [POOL, "128"]
    wide_head, wide_row = kvctl.text("pools", "-o", "wide").splitlines()
    assert set(head.split()) < set(wide_head.split())
    assert "float32" in wide_row
    assert "float32" not in row


def test_blocks_and_prefixes_are_listed_by_what_they_are(
    own: Stack, kvctl: Kvctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = remember(own, 2, "seen")
    until_released(kvctl, "seen")
    # Two to a page: whatever the size of a listing, its pages are one answer.
    monkeypatch.setattr("kvctl.remote.PAGE", 2)
    found = kvctl.data("blocks", "--salt", "seen", "--token-ids")["blocks"]
    assert [one["token_ids"] for one in found] == [prompt[i * BLOCK : (i + 1) * BLOCK] for i in range(3)]
    assert {(one["tenant_id"], one["session_id"], one["tier"]) for one in found} == {("team", "chat", "TIER_DEVICE")}
    for options in (("--tenant", "team", "--session", "chat"), ("--tokens", listed(prompt)), ("--tier", "device")):
        assert kvctl.data("blocks", "--salt", "seen", "--pool", POOL, *options)["blocks"][0]["salt"] == "seen"
    assert len(kvctl.data("blocks", "--salt", "seen", "--limit", 3)["blocks"]) == 3
    assert len(kvctl.data("blocks", "--salt", "seen", "--limit", 1)["blocks"]) == 1
    assert kvctl.data("blocks", "--salt", "seen", "--tier", "disk")["blocks"] == []
    head, *rows = kvctl.text("blocks", "--salt", "seen").splitlines()
    assert head.split()[:3] == ["POOL", "TIER", "SLOT"]
    assert len(rows) == 3
    [prefix] = kvctl.data("prefixes", "--salt", "seen")["prefixes"]
    assert (prefix["num_tokens"], prefix["blocks"]) == (3 * BLOCK, [{"tier": "TIER_DEVICE", "num_blocks": "3"}])
    assert "3 device" in kvctl.text("prefixes", "--salt", "seen")


def test_a_prompt_is_named_by_its_tokens_a_file_or_what_a_user_says(own: Stack, kvctl: Kvctl, tmp_path: Path) -> None:
    prompt = remember(own, 3, "why")
    until_released(kvctl, "why")
    file = tmp_path / "prompt"
    file.write_text(f"[{listed(prompt)}]\n")
    for how in (("--tokens", listed(prompt)), ("--file", file)):
        [found] = kvctl.data("explain", *how, "--salt", "why")["explanations"]
        assert (found["cached_tokens"], len(found["blocks"])) == (3 * BLOCK, 3)
    text = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen"
    chat = pb.ChatInput(messages=[pb.ChatMessage(role="user", content=text)])
    generate(own, chat=chat, cache=pb.CacheOptions(salt="why"))
    until_released(kvctl, "why")
    assert kvctl.data("explain", "--chat", text, "--salt", "why")["explanations"][0]["cached_tokens"] > 2 * BLOCK


def test_a_preview_is_what_a_request_then_finds(own: Stack, kvctl: Kvctl) -> None:
    prompt = remember(own, 3, "seen before")
    until_released(kvctl, "seen before")
    line = ("preview", "--tokens", listed(prompt), "--salt", "seen before", "--max-new-tokens", 2 * BLOCK)
    [(executor, found)] = kvctl.data(*line).items()
    assert (executor, found["admitted"]) == ("executor-0", True)
    [estimate] = found["estimates"]
    assert estimate["completion_blocks"] == estimate["next_step_blocks"] + 2
    assert kvctl.text(*line).startswith(f"executor-0: would be admitted, {found['cached_tokens']} of ")
    usage = generate(own, token_ids=pb.TokenIds(token_ids=prompt), cache=pb.CacheOptions(salt="seen before"))
    assert usage.cached_tokens == found["cached_tokens"] > 0
    [foreign] = kvctl.data("preview", "--tokens", listed(prompt)).values()
    assert foreign["cached_tokens"] == 0


def test_a_dry_run_says_what_would_happen_and_changes_nothing(own: Stack, kvctl: Kvctl) -> None:
    prompt = ("--tokens", listed(remember(own, 4, "kept")), "--salt", "kept")
    until_released(kvctl, "kept")
    pin = kvctl.data("pin", *prompt, "--for", "1h", "--owner", "ops")["hold_name"]
    kvctl.text("rules", "set", "acme", "--salt", "acme", "--priority", 80)
    kvctl.text("quota", "set", "--salt", "acme", "--device-floor", 1)

    def steered() -> list[Any]:
        """What operators change, without the time that passes and the copies that are made meanwhile."""
        [hold] = kvctl.data("holds")["holds"]
        found = [kvctl.data(*line) for line in STEERED]
        for pool in next(one["pools"] for one in found if "pools" in one):
            for tier in pool["lower_tiers"]:
                del tier["copy_blocks"]
        return [hold["name"], *found]

    before = steered()
    for line, said in (
        (("pin", *prompt, "--for", "1h", "--owner", "ops"), "would pin 3 blocks for 1h"),
        (("unpin", pin), f"would end {pin} of ops, 3 blocks"),
        (("evict", "--salt", "kept"), "would evict 0 blocks"),
        (("forget", "--salt", "kept"), "would forget blocks: 3 device"),
        (("rules", "set", "other", "--no-store"), "would make rule other"),
        (("rules", "delete", "acme"), "would delete rule acme"),
        (("quota", "set", "--tenant", "team"), "would set the quota of tenant team"),
        (("quota", "delete", "--salt", "acme"), "would delete"),
        (("pool", "set", POOL, "--blocks", 120), f"would set pool {POOL} from 128 to 120 blocks"),
        (("drain",), "would admit no more requests"),
        (("abort", "--all"), "would abort 0 requests"),
    ):
        assert said in kvctl.text(*line, "--dry-run"), line
    assert steered() == before
    assert kvctl.run("ping").status == 0
    assert kvctl.data("describe", "hold", pin)["owner"] == "ops"
    assert kvctl.data("unpin", pin, "--yes")["freed_blocks"] == 3
    assert kvctl.data("rules", "delete", "acme", "--yes") == {"ended_leases": "0"}
    assert kvctl.data("quota", "delete", "--salt", "acme", "--yes") == {}


def test_leases_of_two_sessions_are_listed_up_to_a_limit(own: Stack, kvctl: Kvctl) -> None:
    prompt = listed(remember(own, 5, "leased"))
    until_released(kvctl, "leased")
    for session, priority in (("chat-9", 80), ("chat-9", 60), ("chat-10", 70)):
        retain = ("retain", "--tokens", prompt, "--salt", "leased", "--session", session, "--priority", priority)
        assert kvctl.data(*retain)["answers"][0]["num_blocks"] == 3
    # A page ends with all leases of its last block.
    for limit, count in ((0, 6), (1, 1), (3, 3)):
        assert len(kvctl.data("leases", "--limit", limit)["leases"]) == count
    found = kvctl.data("leases", "--holder", "session/chat-9", "--pool", POOL)["leases"]
    assert [one["lease"]["retention_priority"] for one in found] == [60] * 3


def test_a_rule_in_a_file_replaces_the_state_that_it_was_read_from(kvctl: Kvctl, tmp_path: Path) -> None:
    made = kvctl.data("rules", "set", "acme", "--salt", "acme", "--priority", 80, "--for", "1h")["rule"]
    assert made["action"] == {"retention_priority": 80, "retention_duration": "3600s", "no_store": False}
    assert kvctl.data("describe", "rule", "acme") == made
    file = tmp_path / "rule.yaml"
    file.write_text("order: 3\nmatch: {tenant_id: team}\naction: {pin_duration: 60s}\n")
    assert "changed rule acme" in kvctl.text("rules", "set", "acme", "-f", file, "--yes")
    [changed] = kvctl.data("rules", "list")["rules"]
    assert (changed["order"], changed["match"]["tenant_id"], changed["action"]["pin_duration"]) == (3, "team", "60s")
    file.write_text(yaml.safe_dump(made))
    assert kvctl.run("rules", "set", "acme", "-f", file, "--yes").status == 4
    # A listing is read, too.
    file.write_text(kvctl.text("rules", "list", "-o", "yaml"))
    kvctl.text("rules", "delete", "acme", "--yes")
    assert "'other' is not among its rules" in kvctl.run("rules", "set", "other", "-f", file).err
    assert "made rule acme" in kvctl.text("rules", "set", "acme", "-f", file)
    [again] = kvctl.data("rules", "list")["rules"]
    assert again == changed | {"etag": again["etag"]}
    kvctl.text("rules", "delete", "acme", "--yes")


def test_a_pool_is_made_smaller_and_larger_again(kvctl: Kvctl) -> None:
    assert kvctl.data("pool", "set", POOL, "--blocks", 120, "--yes")["pool"]["total_blocks"] == 120
    refused = kvctl.run("pool", "set", POOL, "--blocks", 1_000_000)
    assert (refused.status, "pool.total_blocks" in refused.err) == (2, True)
    deadline = time.monotonic() + patience(10)
    # The executor gives the memory of the blocks that went back first.
    while kvctl.run("pool", "set", POOL, "--blocks", 128).status:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_blocks_are_evicted_and_forgotten(own: Stack, kvctl: Kvctl) -> None:
    prompt = ("--tokens", listed(remember(own, 6, "gone")), "--salt", "gone")
    until_released(kvctl, "gone")
    assert "evicted 3 blocks" in kvctl.text("evict", *prompt, "--yes")
    assert "removed: purged" in kvctl.text("explain", *prompt)
    remember(own, 6, "gone")
    until_released(kvctl, "gone")
    receipt = kvctl.data("forget", *prompt, "--yes")
    assert (receipt["removed"], receipt["store_updated"]) == ([{"tier": "TIER_DEVICE", "num_blocks": "3"}], True)
    assert kvctl.data("blocks", "--salt", "gone")["blocks"] == []
    for nothing in (("pin", "--tokens", "1,2", "--for", "1m"), ("retain", "--tokens", "1,2", "--priority", 80)):
        assert kvctl.run(*nothing).status == 4


def test_events_are_watched_as_lines(own: Stack, kvctl: Kvctl) -> None:
    remember(own, 7, "told")
    until_released(kvctl, "told")
    lines = kvctl.text("watch", "--salt", "told", "--count", 5, "-o", "json").splitlines()
    seen = [json.loads(line) for line in lines]
    about_pools = ["EVENT_KIND_EXECUTOR_REGISTERED", "EVENT_KIND_CREATED"]
    assert [one["kind"] for one in seen] == [*about_pools, *["EVENT_KIND_STORED"] * 3]
    kvctl.text("evict", "--salt", "told", "--yes")
    gone = kvctl.text("watch", "--after", seen[0]["event_number"], "--salt", "told", "--count", 3).splitlines()
    assert len(gone) == 3
    assert all("removed" in line and "purged" in line for line in gone)
    # A watch with a time ends by itself, and nothing else has come.
    timed = kvctl.text("watch", "--after", seen[0]["event_number"], "--salt", "told", "--for", "2s").splitlines()
    assert len(timed) <= 3
    assert kvctl.text("watch", "--count", 1, "-o", "yaml").startswith("---\n")


def test_ghost_caches_have_a_row_per_size(own: Stack, kvctl: Kvctl) -> None:
    for _ in range(2):
        remember(own, 9, "ghost")
        until_released(kvctl, "ghost")
    found = kvctl.data("ghosts", "--executor", "executor-0")["ghosts"]["executor-0"]
    _, head, *rows, _ = kvctl.text("ghosts", "--window", "10m").splitlines()
    assert head.split() == ["SIZE", "BLOCKS", "RETENTION", "LRU", "SEGMENTED-LRU"]
    assert len(rows) == len(found["caches"]) / 3
    asked = int(found["tokens"]["queried_tokens"])
    hit = [int(cache["hit_tokens"]) for cache in found["caches"] if cache["total_blocks"] == 128]
    assert ["1x", "128", *(f"{one / asked:.1%}" for one in hit)] in [row.split() for row in rows]


def test_the_state_has_its_hash(kvctl: Kvctl) -> None:
    dumped = kvctl.data("state")
    assert dumped["state_hash"] == state_hash(dumped["lines"])
    assert all(json.loads(line) for line in kvctl.text("state").splitlines())


def test_a_drained_scheduler_takes_no_requests(own: Stack, kvctl: Kvctl) -> None:
    with running(own, "draining"):
        assert kvctl.data("drain", "--yes", "--for", "0s", status=1)["running_requests"] == 1
        with pytest.raises(grpc.RpcError, match="the scheduler is draining"):
            generate(own, text="x")
        assert "not serving" in kvctl.text("ping", status=1)
    kvctl.text("drain", "--undo")
    generate(own, text="x")


@pytest.mark.parametrize("verb", ["abort", "cancel"])
def test_an_aborted_request_ends_with_what_there_is_of_it(own: Stack, kvctl: Kvctl, verb: str) -> None:
    with grpc.insecure_channel(own.scheduler) as channel:
        stub: rpc.GenerationServiceStub = rpc.GenerationServiceStub(channel)
        request = pb.StreamGenerateRequest(request_id="mine", text="x", max_tokens=1000, ignore_eos=True)
        call = stub.StreamGenerate(request, timeout=patience(60))
        chunks = [next(call)]
        assert kvctl.text(verb, "mine", "--dry-run").strip() == "would abort 1 request"
        assert kvctl.run(verb, "mine", "--tenant", "other", "--yes").status == 4
        assert kvctl.data(verb, "mine", "--yes") == {"aborted_requests": 1}
        chunks += call
        assert chunks[-1].finish_reason == pb.FINISH_REASON_ABORT
        assert chunks[-1].usage.output_tokens == sum(len(chunk.token_ids) for chunk in chunks) < 1000


def test_top_shows_everything_once_where_no_terminal_is(own: Stack, kvctl: Kvctl) -> None:
    with running(own, "shown"):
        wanted, measured = {"steps_per_second", "step_seconds"}, set[str]()
        deadline = time.monotonic() + patience(60)
        # On a busy machine no step may end within the interval.
        while not measured >= wanted:
            assert time.monotonic() < deadline, measured
            found = kvctl.data("top", "--interval", 0.5)
            assert found["loads"]["running_requests"] == 1
            measured = {name for name, value in found["rates"].items() if value}
        text = kvctl.text("top", "--once", "--interval", 0.1)
    assert "\x1b" not in text
    for part in ("SmolLM2-135M-Instruct", POOL, "device", "host", "waiting", "step", "shown", "(no salt)"):
        assert part in text


@pytest.mark.parametrize("verb", [("top", "--interval", "0.1"), ("watch",)])
def test_ctrl_c_ends_a_running_verb_and_says_nothing(own: Stack, verb: tuple[str, ...]) -> None:
    controller, terminal = pty.openpty()
    with ctrl_c_is_heard():
        process = subprocess.Popen(
            command(*verb), stdin=terminal, stdout=terminal, stderr=subprocess.PIPE, env=environment(own)
        )
    os.close(terminal)
    shown = b""
    try:
        while POOL.encode() not in shown:
            shown += os.read(controller, 65_536)
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):
            while os.read(controller, 65_536):
                pass
        _, err = process.communicate(timeout=patience(60))
    finally:
        process.kill()
        os.close(controller)
    assert (process.returncode, err) == (130, b"")


def test_a_fault_is_found_and_a_lost_process_is_reported(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with own_stack() as own:
        break_and_look(own, Kvctl(own, capfd, monkeypatch))


def break_and_look(own: Stack, kvctl: Kvctl) -> None:
    remember(own, 8, "checked")
    until_released(kvctl, "checked")
    assert "clean, and Redis agrees" in kvctl.text("fsck")
    assert kvctl.data("fsck", "--no-store", "--pool", POOL)["store_compared"] is False
    with Redis(unix_socket_path=str(own.folder / "state/redis/socket")) as redis:
        # Not a block that is there: copied to host memory behind all else, it would be written again meanwhile.
        redis.hset("kvkeep:{executor-0}:blocks", "no slot", "no block")
    assert kvctl.data("fsck", status=1)["violations"]
    assert "violation in " in kvctl.text("fsck", status=1)
    replayed = kvctl.text("replay", own.folder / "operations.log")
    assert re.search(r"^pool executor-0/0: .*\nstate [0-9a-f]{64}\n\Z", replayed, re.MULTILINE), replayed
    own.kill("cachemgr", signal.SIGTERM)
    statuses = {one["name"]: one["status"] for one in kvctl.data("ping", status=3)["services"]}
    assert (statuses["admin"], statuses["executor"]) == ("no answer", "serving")
