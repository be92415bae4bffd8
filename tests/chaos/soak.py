"""Memory of every process while nothing but requests happens."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence

import psutil

from bench.driver import prompt
from bench.manager_rpc import BLOCK, Client
from cachemgr.types import ManagerConfig
from tests.chaos.report import Report
from tests.chaos.stage import PROCESSES, Stage
from tests.support.patience import patience

MB = 1e6
LOOK_SECONDS = 5.0
# Pools, allocators and bounded histories fill up first.
WARM_UP_SECONDS = 300.0
# The first and the last share of the time after the warm-up, which are compared.
PART = 0.2
GROWTH = 0.02
# Events that the cache manager keeps, and blocks of the prompts that cause them: each block is stored and evicted.
EVENTS = ManagerConfig().event_history
PROMPT_BLOCKS = 512
CALL_SECONDS = patience(10)


def fill_history(address: str) -> None:
    """Stores and evicts blocks until the cache manager's history of events is full: a real load takes hours for it."""
    client = Client(address, 2 * PROMPT_BLOCKS)
    try:
        for number in range(EVENTS // (2 * PROMPT_BLOCKS) + 3):
            tokens = prompt(number, PROMPT_BLOCKS * BLOCK)
            admitted = client.admit(f"filler-{number}", tokens)
            handles = [admitted.sequence_handle]
            columns = {"computed_tokens": [len(tokens)], "new_token_counts": [0], "released_handles": handles}
            client.stub.SyncSequences(client.progress(number + 1, handles=handles, **columns), timeout=CALL_SECONDS)
    finally:
        client.close()


async def watch_memory(stage: Stage, report: Report, tell: Callable[[str], None], seconds: float) -> None:
    """Watches the memory for `seconds`; short runs warm up for a third of the time."""
    await asyncio.to_thread(fill_history, stage.stack.cachemgr)
    seen: dict[str, list[float]] = {name: [] for name in PROCESSES}
    begin = time.monotonic()
    warm_up = min(WARM_UP_SECONDS, seconds / 3)
    while time.monotonic() < begin + seconds:
        await asyncio.sleep(LOOK_SECONDS)
        resident = {name: psutil.Process(stage.pid(name)).memory_info().rss / MB for name in PROCESSES}
        tell("  ".join(f"{name} {value:.1f} MB" for name, value in resident.items()))
        if time.monotonic() > begin + warm_up:
            for name, value in resident.items():
                seen[name].append(value)
    for name, values in seen.items():
        change = change_of(values)
        report.figures[f"memory of {name}, MB"] = values[-1]
        report.figures[f"change of {name}, %"] = 100 * change
        if abs(change) > GROWTH:
            report.faults.append(f"memory of {name} changed by {change:.1%} after the warm-up")


def change_of(values: Sequence[float]) -> float:
    """From the first to the last part of the values, as a share."""
    part = max(1, int(PART * len(values)))
    first, last = statistics.median(values[:part]), statistics.median(values[-part:])
    return last / first - 1
