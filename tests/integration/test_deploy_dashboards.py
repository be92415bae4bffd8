"""The dashboards: Grafana's own model of them knows all their fields, and every panel has data on a real stack."""

import asyncio
import contextlib
import http.client
import json
import math
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from protos.generation.v1 import generation_pb2 as pb
from protos.kvcommon.v1 import kvcommon_pb2 as common
from tests.stack import ROOT, Stack
from tests.support.generation import generate_all, greedy_request
from tests.support.names import unknown_metrics
from tests.support.patience import patience
from tests.support.ports import free_address
from tests.support.prometheus import Prometheus
from tests.support.tier_files import BLOCK_BYTES, flip_bytes, only_file

FOLDER = ROOT / "ops/deploy/grafana/dashboards"
ALERTS = ROOT / "ops/deploy/prometheus/alerts.yaml"
BOARDS = {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}
# The values that Grafana replaces variables with.
VALUES = {"$__rate_interval": "1m", "$pool": ".*"}
SHOWN_SECONDS = patience(20)


def queries(board: str) -> Iterator[tuple[str, str]]:
    """Title and expression of everything that a dashboard shows."""
    for panel in BOARDS[board]["panels"]:
        for target in panel.get("targets", ()):
            expression = target["expr"]
            for variable, value in VALUES.items():
                expression = expression.replace(variable, value)
            yield panel["title"], expression


@pytest.mark.parametrize("board", BOARDS)
def test_grafana_knows_every_field(board: str) -> None:
    plugins.register_default_plugins()
    known = json.loads(JSONEncoder().encode(Dashboard.from_json(BOARDS[board])))
    assert list(lost(BOARDS[board], known)) == []


def lost(ours: Any, known: Any, path: str = "") -> Iterator[str]:
    """Yields the paths at which a model lacks parts of ours; it may have defaults beside them."""
    if isinstance(ours, dict) and isinstance(known, dict):
        for key, value in ours.items():
            yield from lost(value, known.get(key), f"{path}/{key}")
    elif isinstance(ours, list) and isinstance(known, list) and len(ours) == len(known):
        for index, pair in enumerate(zip(ours, known, strict=True)):
            yield from lost(*pair, f"{path}/{index}")
    elif ours != known:
        yield path


@pytest.mark.parametrize("board", BOARDS)
def test_panels_have_positions_and_numbers_of_their_own(board: str) -> None:
    panels = BOARDS[board]["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken = [
        (column, line)
        for place in (panel["gridPos"] for panel in panels)
        for column in range(place["x"], place["x"] + place["w"])
        for line in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(taken)) == len(taken)
    assert {column for column, _ in taken} == set(range(24))


@pytest.mark.parametrize("board", BOARDS)
def test_every_metric_is_one(board: str) -> None:
    assert unknown_metrics(json.dumps(BOARDS[board]).replace("kvkeep_cache", "")) == set()


@pytest.mark.model
@pytest.mark.skipif(not shutil.which("prometheus"), reason="there is no prometheus on the PATH")
async def test_every_panel_has_data_on_a_real_stack(tmp_path: Path) -> None:
    jobs = {job: free_address() for job in ("scheduler", "cachemgr", "executor")}
    settings: dict[str, object] = {f"{job}_metrics_address": address for job, address in jobs.items()}
    settings |= {"scheduler_http_address": free_address()}
    settings |= {f"executor_{tier}_cache_dir": tmp_path / tier for tier in ("host", "disk")}
    # Few blocks on the device, some in host memory, more on disk.
    settings |= {"executor_max_tokens": 256}
    settings |= {"executor_host_cache_size": 16 * BLOCK_BYTES, "executor_disk_cache_size": 128 * BLOCK_BYTES}
    with Stack(**settings) as stack, Prometheus(tmp_path, jobs, ALERTS) as server:
        # Before and after: a rate of what was there the first time already.
        assert await asyncio.to_thread(answers_by_http, stack.http) == [200, 400, 404]
        await make_things_happen(stack.scheduler, tmp_path / "host")
        assert await asyncio.to_thread(answers_by_http, stack.http) == [200, 400, 404]
        wanted = [(board, *query) for board in BOARDS for query in queries(board)]
        assert len(wanted) > 60
        deadline = time.monotonic() + SHOWN_SECONDS
        # A rate takes two looks at what has happened.
        while wanted and time.monotonic() < deadline:
            wanted = [one for one in wanted if not has_data(server.query(one[-1]))]
            await asyncio.sleep(0.5)
        assert wanted == []


def has_data(series: list[dict[str, Any]]) -> bool:
    """Whether there is a number among the values."""
    return any(math.isfinite(float(one["value"][1])) for one in series)


async def make_things_happen(scheduler: str, host_dir: Path) -> None:
    """Some of all that is counted: hits, evictions of both kinds, copies up and down, broken ones, refused calls."""
    rng = random.Random(1)
    prompts = [[rng.randrange(1000, 40_000) for _ in range(161)] for _ in range(6)]
    requests = [greedy_request(prompt, 8) for prompt in prompts]
    for _ in range(2):
        await generate_all(scheduler, requests, concurrency=2)
    flip_bytes(only_file(host_dir))
    await generate_all(scheduler, requests, concurrency=2)
    policy = common.EvictionPolicy(kind="EVICTION_KIND_SLIDING_WINDOW", start_tokens=4, recent_tokens=44)
    await generate_all(scheduler, [greedy_request(prompts[0][:64], 8, eviction_policy=policy)], concurrency=1)
    with pytest.raises(grpc.RpcError):
        await generate_all(scheduler, [pb.StreamGenerateRequest(max_tokens=1)], concurrency=1)


def answers_by_http(address: str) -> list[int]:
    """The statuses of requests of which some fail."""
    statuses = []
    for body in ({}, {"temperature": -1}, {"model": "another"}):
        with contextlib.closing(http.client.HTTPConnection(address, timeout=patience(60))) as connection:
            asked = json.dumps({"prompt": "x", "max_tokens": 2} | body)
            connection.request("POST", "/v1/completions", asked, {"Content-Type": "application/json"})
            statuses.append(connection.getresponse().status)
    return statuses
