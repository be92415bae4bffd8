"""The plans that can be chosen: what happens while the load runs, and what is measured behind it."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence

from tests.chaos import disturbances
from tests.chaos.checks import check_pools, check_store
from tests.chaos.disturbances import Disturbance
from tests.chaos.measuring import Manager, first_token_seconds, kill
from tests.chaos.run import Act, Plan, Scene
from tests.chaos.soak import watch_memory
from tests.chaos.stage import REDIS, RESTART_SECONDS, Tiers

# What starting, learning the outputs and the last checks take of the whole.
RESERVE_SECONDS = 45.0
LEAST_SECONDS = 20.0
SECONDS = {"mixed": 600.0, "cachemgr": 660.0, "executor": 300.0, "redis": 240.0, "soak": 1800.0}
EXECUTOR_SECONDS = 25.0
REDIS_AWAY_SECONDS = 60.0
# Leases that end while processes are paused, and short drains.
QUICK = {"cachemgr_lease_seconds": 3, "scheduler_drain_seconds": 3, "cachemgr_drain_seconds": 2}
# Blocks of the default model in float32 take 737 kB.
TIERS = Tiers(host_bytes=192 << 20, disk_bytes=384 << 20)
CACHED_PROMPT, COLD_SHARE = 1024, 0.5


def make(name: str, seed: int, seconds: float | None = None) -> Plan:
    """The plan of a name, for about so many seconds in all."""
    length = max(LEAST_SECONDS, (seconds or SECONDS[name]) - RESERVE_SECONDS)
    match name:
        case "mixed":
            schedule = disturbances.mixed(seed, length)
            settings = {"executor_max_tokens": 6144, **QUICK}
            return Plan(
                name,
                _performing(schedule, length),
                _death_in_calm,
                proxied=True,
                strict=False,
                tiers=TIERS,
                settings=settings,
            )
        case "cachemgr":
            schedule = disturbances.regular(name, length, disturbances.CACHEMGR_SECONDS)
            return Plan(name, _performing(schedule, length), settings={"executor_max_tokens": 24_576})
        case "executor":
            schedule = disturbances.regular(name, length, EXECUTOR_SECONDS)
            return Plan(
                name,
                _performing(schedule, length),
                _cached_after_death,
                tiers=TIERS,
                settings={"executor_max_tokens": 4096},
            )
        case "redis":
            return Plan(name, _redis_away(length), keeps_store=False, settings={"executor_max_tokens": 8192})
        case "soak":
            return Plan(name, watch_memory(length), clients=24, tiers=TIERS, settings={"executor_max_tokens": 6144})
    raise ValueError(f"there is no plan {name}")


def _performing(schedule: Sequence[Disturbance], seconds: float) -> Act:
    async def act(scene: Scene) -> None:
        scene.tell("\n".join(["what will happen:", *map(str, schedule)]))
        await scene.perform(schedule, seconds)

    return act


async def _death_in_calm(scene: Scene) -> tuple[list[list[int]], float]:
    """The executor's death, that nothing disturbs, with prompts that only a lower tier has.

    Returns the prompts, and how many seconds the first token of one took.
    """
    stage, report = scene.stage, scene.report
    rng = random.Random(f"prompts {report.seed}")
    prompts = [[rng.randrange(1000, 40_000) for _ in range(CACHED_PROMPT)] for _ in range(9)]
    # The later ones take the device's room.
    cold = await first_token_seconds(stage.stack.scheduler, prompts)
    death = await kill(stage, "executor")
    report.deaths.append(death)
    if not death.lower_blocks:
        report.faults.append("nothing was in a lower tier when the executor died")
    return prompts, cold


async def _cached_after_death(scene: Scene) -> None:
    """How soon the first token comes of prompts that only a lower tier has, after the executor's death."""
    stage, figures = scene.stage, scene.report.figures
    prompts, cold = await _death_in_calm(scene)
    cached = await first_token_seconds(stage.stack.scheduler, prompts[:3])
    figures["first token of 1,024 tokens, cold, s"] = cold
    figures["the same cached, after the executor's death, s"] = cached
    figures["share"] = cached / cold
    if cached > COLD_SHARE * cold:
        scene.report.faults.append(f"a cached prompt's first token takes {cached / cold:.2f} of a cold one's time")


def _redis_away(seconds: float) -> Act:
    """Redis dies, stays away, comes back, agrees with the index; then it dies for good."""

    async def act(scene: Scene) -> None:
        stage, away = scene.stage, min(REDIS_AWAY_SECONDS, seconds / 3)
        await asyncio.sleep(min(5.0, away))
        scene.tell(f"redis is killed, and away for {away:.0f} s")
        await stage.restart(REDIS, away=away)
        scene.tell("redis is back")
        await asyncio.sleep(away / 4)
        await scene.load.stop()
        async with Manager(stage.stack.admin) as manager:
            scene.report.faults += [*await check_pools(manager), *await check_store(stage, manager)]
        scene.report.checked.append("index and Redis agree after its return")
        scene.load.start()
        begin = time.monotonic()
        scene.tell("redis is killed for good")
        await stage.lose_redis()
        await asyncio.sleep(max(LEAST_SECONDS / 2, seconds - away * 1.5))
        scene.report.figures["without Redis at the end, s"] = time.monotonic() - begin + RESTART_SECONDS

    return act
