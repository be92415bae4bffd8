"""A run: a stage, a load, what is done to them, and what must hold at the end."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from protos.generation.v1 import generation_pb2_grpc as generation_rpc
from tests.chaos.checks import check_pools, check_store
from tests.chaos.disturbances import Disturbance, schedule_of
from tests.chaos.load import Load
from tests.chaos.measuring import Death, Manager, kill, steady_hit_rate, ttft_seconds
from tests.chaos.report import Report
from tests.chaos.requests import learn
from tests.chaos.soak import watch_memory
from tests.chaos.stage import Stage

# What starting, learning the outputs and the last checks take of the whole.
RESERVE_SECONDS = 45.0
LEAST_SECONDS = 20.0
# The load continues in calm for so long before it ends.
CALM_SECONDS = 3.0
PROGRESS_SECONDS = 5.0
# A disturbance's effects are over so long after it.
QUIET_SECONDS = 3.0
# What a process may take to start before the next disturbance waits for it.
START_SECONDS = 6.0
# Leases that end while processes are paused, and short drains; a pool that moves blocks between tiers.
MIXED = {
    "executor_max_tokens": 6144,
    "cachemgr_lease_seconds": 3,
    "scheduler_drain_seconds": 3,
    "cachemgr_drain_seconds": 2,
}
# Tokens of a prompt, and the most that its first token may take from a lower tier, of the time of a cold prompt.
CACHED_PROMPT, COLD_SHARE = 1024, 0.5

Tell = Callable[[str], None]


@dataclass
class Run:
    """A run in progress."""

    stage: Stage
    load: Load
    report: Report
    tell: Tell
    # Begin and end of all disturbances so far.
    disturbed: list[tuple[float, float]] = field(default_factory=list)

    async def perform(self, seconds: float) -> None:
        """Performs a schedule and waits until its last disturbance is over.

        The schedule waits for a killed process that takes long to start, so that a slow machine has every disturbance
        too; a disturbance that has not begun after so many seconds is left out.
        """
        schedule = schedule_of(self.report.seed, seconds)
        self.tell("\n".join(["the schedule:", *map(str, schedule)]))
        begin, end = time.monotonic(), time.monotonic() + seconds
        async with asyncio.TaskGroup() as tasks:
            for number, one in enumerate(schedule):
                await asyncio.sleep(max(0.0, begin + one.at - time.monotonic()))
                waiting = time.monotonic()
                while self.stage.starting_for() > START_SECONDS and time.monotonic() < end:
                    await asyncio.sleep(0.1)
                begin += time.monotonic() - waiting
                if time.monotonic() > end:
                    self.tell(f"no time is left for {len(schedule) - number} disturbances")
                    return
                tasks.create_task(self._perform(one))

    async def _perform(self, one: Disturbance) -> None:
        self.tell(str(one))
        begin = time.monotonic()
        death = await one.perform(self.stage)
        self.disturbed.append((begin, time.monotonic()))
        self.report.disturbances[f"{one.kind} {one.target}"] += 1
        if death is not None:
            self.report.deaths.append(death)

    def undisturbed(self, death: Death) -> bool:
        """Whether nothing else happened around a death."""
        begin, end = death.at - QUIET_SECONDS, death.at + death.back_seconds + QUIET_SECONDS
        return sum(one_begin < end and begin < one_end for one_begin, one_end in self.disturbed) <= 1

    async def kill_executor_in_calm(self) -> None:
        """Nothing disturbs this death, and how soon the first token comes of prompts that only a lower tier has."""
        report, address = self.report, self.stage.stack.scheduler
        rng = random.Random(f"prompts {report.seed}")
        prompts = [[rng.randrange(1000, 40_000) for _ in range(CACHED_PROMPT)] for _ in range(9)]
        # The later ones evict the first from the device.
        cold = await ttft_seconds(address, prompts)
        death = await kill(self.stage, "executor")
        report.deaths.append(death)
        if not death.lower_blocks:
            report.faults.append("nothing was in a lower tier when the executor died")
        cached = await ttft_seconds(address, prompts[:3])
        report.figures["first token of 1,024 tokens, cold, s"] = cold
        report.figures["the same cached, after the executor's death, s"] = cached
        if cached > COLD_SHARE * cold:
            report.faults.append(f"a cached prompt's first token takes {cached / cold:.2f} of a cold one's time")


async def mixed(seed: int, seconds: float, tell: Tell) -> Report:
    """Every disturbance, for about so many seconds in all."""
    length = max(LEAST_SECONDS, seconds - RESERVE_SECONDS)
    async with _running("mixed", seed, tell, proxied=True, **MIXED) as run:
        await run.perform(length)
    return run.report


async def soak(seed: int, seconds: float, tell: Tell) -> Report:
    """Nothing but requests, for about so many seconds in all."""
    length = max(LEAST_SECONDS, seconds - RESERVE_SECONDS)
    async with _running("soak", seed, tell, clients=24, executor_max_tokens=6144) as run:
        await watch_memory(run.stage, run.report, tell, length)
    return run.report


@contextlib.asynccontextmanager
async def _running(
    name: str, seed: int, tell: Tell, *, proxied: bool = False, clients: int = 12, **settings: object
) -> AsyncIterator[Run]:
    """A stack under load; at the end of the block the load ends and everything is checked."""
    begin, report = time.monotonic(), Report(name, seed)
    stage = Stage(seed, proxied=proxied, tell=tell, **settings)
    async with stage, Manager(stage.stack.admin) as manager:
        address = stage.stack.scheduler
        tell(f"the stack serves after {time.monotonic() - begin:.1f} s; its logs are in {stage.stack.folder}")
        async with grpc.aio.insecure_channel(address) as channel:
            known = await learn(generation_rpc.GenerationServiceStub(channel), tell)
        hit_rate = await steady_hit_rate(address)
        tell(f"{len(known)} requests are known after {time.monotonic() - begin:.1f} s")
        load = Load(address, known, seed, clients, lambda begin, end: stage.absent("scheduler", begin, end))
        report.tally = load.tally
        run = Run(stage, load, report, tell)
        async with _reporting(load, tell):
            load.start()
            yield run
            tell("calm")
            await asyncio.sleep(CALM_SECONDS)
            await load.stop()
        report.faults += [*load.tally.faults, *await check_pools(manager)]
        report.checked.append("every slot free or cached, CheckPool")
        report.hit_rates = [hit_rate, await steady_hit_rate(address)]
        if report.hit_rates[-1] < report.hit_rates[0]:
            report.faults.append("fewer tokens of the repeated prompts are cached than before")
        if proxied:
            await run.kill_executor_in_calm()
        report.faults += await check_store(stage, manager)
        report.checked.append("index and Redis agree")
        report.judge([one for one in report.deaths if run.undisturbed(one)])
        report.messages = {str(trouble): count for trouble, count in stage.meddling.met.items()}
        report.faults += stage.failures
        report.deaths = [dataclasses.replace(death, at=death.at - begin) for death in report.deaths]
        report.seconds = time.monotonic() - begin
        if report.faults:
            folder = Path(tempfile.mkdtemp(prefix=f"kvkeep-chaos-{seed}-"))
            stage.keep_logs(folder)
            tell(f"the logs are kept in {folder}")


@contextlib.asynccontextmanager
async def _reporting(load: Load, tell: Tell) -> AsyncIterator[None]:
    """Reports progress every few seconds."""

    async def say() -> None:
        while True:
            await asyncio.sleep(PROGRESS_SECONDS)
            tally = load.tally
            endings = ", ".join(f"{count} {kind}" for kind, count in sorted(tally.endings.items()))
            faults = f", {len(tally.faults)} FAULTS" if tally.faults else ""
            tell(f"{tally.running} running; {endings or 'none ended'}{faults}")

    task = asyncio.create_task(say())
    try:
        yield
    finally:
        task.cancel()
