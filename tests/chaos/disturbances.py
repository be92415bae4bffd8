"""What is done to a stage, and when: a schedule that follows from a seed."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tests.chaos import measuring
from tests.chaos.measuring import Death
from tests.chaos.meddling import Trouble
from tests.chaos.stage import PROCESSES, REDIS, Stage
from tests.stack import MODULES

# The cache manager dies this often whatever else happens, for the first time after half of it.
CACHEMGR_SECONDS = 20.0
# Between other disturbances, on average; they may overlap. Short runs are more crowded, but something must get done.
MEAN_GAP_SECONDS, LEAST_GAP_SECONDS = 4.0, 3.0
# A silent process is taken for gone after a lease, a silent connection after keepalive's 25 s.
PAUSES = (0.3, 6.0)
LONG_PAUSE = (26.0, 32.0)
# Only where there is time for it.
LONG_PAUSES_FROM = 300.0
REDIS_SECONDS = (3.0, 10.0)
REDIS_DELAYS = (0.05, 3.0)
TROUBLE_SECONDS = (2.0, 5.0)
TROUBLE_SHARE = (0.05, 0.2)
DISK_SECONDS = (3.0, 10.0)
# Behind every log, before or in the middle of a disk tier's file.
NOTHING_FITS, HALF_FITS = 16 << 20, 128 << 20


@dataclass(frozen=True)
class Disturbance:
    """at, seconds: from the begin of the schedule, and how long it lasts. strength: what its kind makes of it."""

    at: float
    kind: str
    target: str
    seconds: float = 0.0
    strength: float = 0.0

    def __str__(self) -> str:
        lasting = f" for {self.seconds:.1f} s" if self.seconds else ""
        strength = f" ({self.strength:.3g})" if self.strength else ""
        return f"{self.at:6.1f} s  {self.kind} {self.target}{lasting}{strength}"


Do = Callable[[Stage, Disturbance], Awaitable[Death | None]]


async def _kill(stage: Stage, one: Disturbance) -> Death:
    return await measuring.kill(stage, one.target)


async def _ask_to_end(stage: Stage, one: Disturbance) -> None:
    await stage.restart(one.target, signal.SIGTERM)


async def _pause(stage: Stage, one: Disturbance) -> None:
    await stage.pause(one.target, one.seconds)


async def _slow_redis(stage: Stage, one: Disturbance) -> None:
    stage.redis_proxy.delay = one.strength
    await asyncio.sleep(one.seconds)
    stage.redis_proxy.delay = 0.0


async def _cut_redis(stage: Stage, one: Disturbance) -> None:
    stage.redis_proxy.cut()
    await asyncio.sleep(one.seconds)
    stage.redis_proxy.mend()


async def _fill_redis(stage: Stage, one: Disturbance) -> None:
    await stage.fill_redis(True)
    await asyncio.sleep(one.seconds)
    await stage.fill_redis(False)


async def _meddle(stage: Stage, one: Disturbance) -> None:
    stage.meddling.begin(Trouble(one.kind), one.strength)
    await asyncio.sleep(one.seconds)
    stage.meddling.end(Trouble(one.kind))


async def _break_streams(stage: Stage, one: Disturbance) -> None:
    for proxy in stage.proxies:
        proxy.break_streams()


async def _fill_disk(stage: Stage, one: Disturbance) -> None:
    stage.limit_files(int(one.strength))
    await asyncio.sleep(one.seconds)
    stage.limit_files(None)


PERFORM: dict[str, Do] = {
    "kill": _kill,
    "terminate": _ask_to_end,
    "pause": _pause,
    "slow": _slow_redis,
    "cut off": _cut_redis,
    "fill": _fill_redis,
    "break streams": _break_streams,
    "refuse writes": _fill_disk,
    **dict.fromkeys(Trouble, _meddle),
}


def _deck(rng: random.Random, seconds: float) -> list[Disturbance]:
    """Every kind once, but for the cache manager's deaths, in an order of chance."""
    deck = [Disturbance(0, "kill", name) for name in ("executor", "scheduler", REDIS)]
    deck += [Disturbance(0, "terminate", name) for name in MODULES]
    deck += [Disturbance(0, "pause", name, rng.uniform(*PAUSES)) for name in PROCESSES]
    if seconds >= LONG_PAUSES_FROM:
        deck.append(Disturbance(0, "pause", rng.choice(PROCESSES), rng.uniform(*LONG_PAUSE)))
    deck += [
        Disturbance(0, "slow", REDIS, rng.uniform(*REDIS_SECONDS), rng.uniform(*REDIS_DELAYS)),
        Disturbance(0, "cut off", REDIS, rng.uniform(*REDIS_SECONDS)),
        Disturbance(0, "fill", REDIS, rng.uniform(*REDIS_SECONDS)),
        Disturbance(0, "break streams", "between services"),
    ]
    deck += [
        Disturbance(0, kind, "messages", rng.uniform(*TROUBLE_SECONDS), rng.uniform(*TROUBLE_SHARE)) for kind in Trouble
    ]
    sizes = (NOTHING_FITS, HALF_FITS)
    deck += [Disturbance(0, "refuse writes", "disk", rng.uniform(*DISK_SECONDS), size) for size in sizes]
    rng.shuffle(deck)
    return deck


def mixed(seed: int, seconds: float) -> list[Disturbance]:
    """Everything there is, within so many seconds: crowded where each kind can come once."""
    rng = random.Random(f"schedule {seed}")
    found = regular("cachemgr", seconds, CACHEMGR_SECONDS)
    at = 1.0
    while at < seconds:
        deck = _deck(rng, seconds)
        gap = min(MEAN_GAP_SECONDS, max(LEAST_GAP_SECONDS, (seconds - 2) / len(deck)))
        if seconds < gap * len(deck):
            # Not all of them will come: deaths must.
            deck.sort(key=lambda one: one.kind != "kill")
        for one in deck:
            if at < seconds:
                found.append(Disturbance(at, one.kind, one.target, one.seconds, one.strength))
            at += rng.uniform(0.5, 1.5) * gap
    return sorted(found, key=lambda one: one.at)


def regular(target: str, seconds: float, period: float) -> list[Disturbance]:
    """A process is killed once in each period."""
    times = range(int((seconds - period / 2) // period) + 1)
    return [Disturbance(period / 2 + number * period, "kill", target) for number in times]
