"""One run: a stage, a load, what is done to them, and what is true at the end."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from protos.generation.v1 import generation_pb2_grpc as generation_rpc
from tests.chaos.checks import check_pools, check_store
from tests.chaos.disturbances import PERFORM, Disturbance
from tests.chaos.load import Load
from tests.chaos.measuring import Death, Manager, PrefixSet
from tests.chaos.report import Report
from tests.chaos.requests import learn
from tests.chaos.stage import Stage, Tiers

# The load goes on in calm for so long before it ends.
CALM_SECONDS = 3.0
PROGRESS_SECONDS = 5.0
# A disturbance's effects are over so long after it.
QUIET_SECONDS = 3.0
# What a process may take to start before the next disturbance waits for it.
START_SECONDS = 6.0

Tell = Callable[[str], None]


@dataclass
class Scene:
    """A run in progress."""

    stage: Stage
    load: Load
    report: Report
    tell: Tell
    # Begin and end of all disturbances so far.
    disturbed: list[tuple[float, float]] = field(default_factory=list)

    async def perform(self, schedule: Sequence[Disturbance], seconds: float) -> None:
        """Does everything in its time and waits until the last one is over.

        Time in which a killed process takes long to start does not count, as nothing else would get done on a slow
        machine; what has not been done after so many seconds is left out.
        """
        begin, end = time.monotonic(), time.monotonic() + seconds
        async with asyncio.TaskGroup() as tasks:
            for number, one in enumerate(schedule):
                await asyncio.sleep(max(0.0, begin + one.at - time.monotonic()))
                begin += await self._until_started(end)
                if time.monotonic() > end:
                    self.tell(f"no time is left for {len(schedule) - number} disturbances")
                    return
                tasks.create_task(self._perform(one))

    async def _until_started(self, end: float) -> float:
        """Waits for processes that take longer to start than they may; returns for how many seconds."""
        begin = time.monotonic()
        while self.stage.starting_for() > START_SECONDS and time.monotonic() < end:
            await asyncio.sleep(0.1)
        return time.monotonic() - begin

    async def _perform(self, one: Disturbance) -> None:
        self.tell(str(one))
        begin = time.monotonic()
        death = await PERFORM[one.kind](self.stage, one)
        self.disturbed.append((begin, time.monotonic()))
        self.report.disturbances[f"{one.kind} {one.target}"] += 1
        if death is not None:
            self.report.deaths.append(death)

    def alone(self, death: Death) -> bool:
        """Whether nothing else happened around a death."""
        begin, end = death.at - QUIET_SECONDS, death.at + death.back_seconds + QUIET_SECONDS
        return sum(one_begin < end and begin < one_end for one_begin, one_end in self.disturbed) <= 1


Act = Callable[[Scene], Awaitable[object]]


async def nothing(_: Scene) -> None:
    """For runs that do nothing more."""


@dataclass(frozen=True)
class Plan:
    """What a run is made of. act: while the load runs. finish: behind it, in calm, before the last checks.

    strict: every death is judged, not only those that nothing else disturbed. keeps_store: whether Redis is there at
    the end. settings: of the stack.
    """

    name: str
    act: Act
    finish: Act = nothing
    proxied: bool = False
    strict: bool = True
    keeps_store: bool = True
    clients: int = 12
    tiers: Tiers | None = None
    settings: dict[str, object] = field(default_factory=dict)


async def run(plan: Plan, seed: int, tell: Tell, logs: Path | None = None) -> Report:
    """Carries out a plan. logs: folder to keep them in; None is a temporary one, where something is wrong."""
    begin, report = time.monotonic(), Report(plan.name, seed)
    stage = Stage(seed, proxied=plan.proxied, tiers=plan.tiers, tell=tell, **plan.settings)
    async with stage, Manager(stage.stack.admin) as manager:
        tell(f"the stack serves after {time.monotonic() - begin:.1f} s; its logs are in {stage.stack.folder}")
        prefixes = PrefixSet()
        async with grpc.aio.insecure_channel(stage.stack.scheduler) as channel:
            known = await learn(generation_rpc.GenerationServiceStub(channel), tell)
        report.hit_rates = [await prefixes.steady_hit_rate(stage.stack.scheduler)]
        tell(f"{len(known)} requests are known after {time.monotonic() - begin:.1f} s")
        load = Load(
            stage.stack.scheduler, known, seed, plan.clients, lambda begin, end: stage.absent("scheduler", begin, end)
        )
        report.tally = load.tally
        scene = Scene(stage, load, report, tell)
        async with _telling(load, tell):
            load.start()
            await plan.act(scene)
            tell("calm")
            await asyncio.sleep(CALM_SECONDS)
            await load.stop()
        report.faults += [*load.tally.faults, *await check_pools(manager)]
        report.checked.append("every slot free or cached, CheckPool")
        report.hit_rates.append(await prefixes.hit_rate(stage.stack.scheduler))
        report.hit_rates.append(await prefixes.steady_hit_rate(stage.stack.scheduler))
        if report.hit_rates[-1] < report.hit_rates[0]:
            report.faults.append("the repeated prefixes are found less than before")
        await plan.finish(scene)
        if plan.keeps_store:
            report.faults += await check_store(stage, manager)
            report.checked.append("index and Redis agree")
        report.judge([one for one in report.deaths if plan.strict or scene.alone(one)], tiers=plan.tiers is not None)
        report.messages = {str(trouble): count for trouble, count in stage.meddling.met.items()}
        report.faults += stage.failures
        report.deaths = [_since(begin, death) for death in report.deaths]
        report.seconds = time.monotonic() - begin
        if report.faults or logs is not None:
            folder = logs or Path(tempfile.mkdtemp(prefix=f"kvkeep-chaos-{seed}-"))
            stage.keep_logs(folder)
            tell(f"the logs are kept in {folder}")
    return report


def _since(begin: float, death: Death) -> Death:
    return dataclasses.replace(death, at=death.at - begin)


@contextlib.asynccontextmanager
async def _telling(load: Load, tell: Tell) -> AsyncIterator[None]:
    """Says now and then how it goes."""

    async def say() -> None:
        begin = time.monotonic()
        while True:
            await asyncio.sleep(PROGRESS_SECONDS)
            tally = load.tally
            endings = ", ".join(f"{count} {kind}" for kind, count in sorted(tally.endings.items()))
            faults = f", {len(tally.faults)} FAULTS" if tally.faults else ""
            tell(f"{time.monotonic() - begin:6.1f} s  {tally.running} running; {endings or 'none ended'}{faults}")

    task = asyncio.create_task(say())
    try:
        yield
    finally:
        task.cancel()
