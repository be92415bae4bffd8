"""A run: a stage, a load, their disturbances, and the checks at the end."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import grpc

from protos.generation.v1 import generation_pb2_grpc as generation_rpc
from tests.chaos.checks import check_pools, check_store
from tests.chaos.disturbances import FLEET_ROLES, Disturbance, fleet_rounds, schedule_of
from tests.chaos.fleet_checks import check_fleet, check_fleet_store, continued, contradictions
from tests.chaos.load import Load
from tests.chaos.measuring import Death, Manager, kill, steady_hit_rate, ttft_seconds
from tests.chaos.recovery import Prober, Recovery
from tests.chaos.report import Report, streams
from tests.chaos.requests import learn
from tests.chaos.soak import watch_memory
from tests.chaos.stage import ENGINES, ROUTERS, Stage, single
from tests.chaos.stage import fleet as fleet_stage
from tests.support.scheduler.fake_executor import continuation
from tests.support.scheduler.tokenizers import byte_level_tokenizer

# Seconds of the run for starting, learning the outputs and the last checks.
RESERVE_SECONDS = 45.0
LEAST_SECONDS = 20.0
# The load continues in calm for this time before it ends.
CALM_SECONDS = 3.0
PROGRESS_SECONDS = 5.0
# The effects of a disturbance are over after this time.
QUIET_SECONDS = 3.0
# The next disturbance waits for a process that takes longer than this to start.
START_SECONDS = 6.0
# Leases that end while processes are paused, and short drains; a pool that moves blocks between tiers.
MIXED = {
    "executor_max_tokens": 6144,
    "cachemgr_lease_seconds": 3,
    "scheduler_drain_seconds": 3,
    "cachemgr_drain_seconds": 2,
}
# Pools that keep most of what is asked; leases that end while processes are paused.
FLEET = {
    "executor_max_tokens": 8192,
    "cachemgr_lease_seconds": 3,
    "scheduler_drain_seconds": 3,
    "cachemgr_drain_seconds": 2,
    "router_drain_seconds": 3,
    # A stub's step takes the same time for any number of tokens: prompts need not be spread over many steps.
    "scheduler_target_itl_seconds": 0.2,
}
REAL = {"executor_batch_invariant": 1}
FLEET_CLIENTS = 9
# Seconds between the recovery from a disturbance and the next disturbance.
ROUND_GAP_SECONDS = (0.5, 2.0)
# Tokens of a prompt, and the most time to its first token from a lower tier, as a share of a cold prompt's time.
CACHED_PROMPT, COLD_SHARE = 1024, 0.5

Tell = Callable[[str], None]


@dataclass
class Run:
    """A run in progress."""

    stage: Stage
    load: Load
    report: Report
    tell: Tell
    # Begin and end of each disturbance so far.
    disturbed: list[tuple[float, float]] = field(default_factory=list)

    async def perform(self, seconds: float) -> None:
        """Performs a schedule of about `seconds` and waits until its last disturbance is over.

        The schedule waits for a killed process that takes long to start, so that slow machines have all disturbances.
        """
        schedule = schedule_of(self.report.seed, seconds)
        self.tell("\n".join(["the schedule:", *map(str, schedule)]))
        begin = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for one in schedule:
                await asyncio.sleep(max(0.0, begin + one.at - time.monotonic()))
                waiting = time.monotonic()
                while self.stage.starting_for() > START_SECONDS:
                    await asyncio.sleep(0.1)
                begin += time.monotonic() - waiting
                tasks.create_task(self._perform(one))

    async def _perform(self, one: Disturbance) -> float:
        """Returns the time when a process was killed, or when the disturbance was over."""
        self.tell(str(one))
        begin = time.monotonic()
        death = await one.perform(self.stage)
        end = time.monotonic()
        self.disturbed.append((begin, end))
        self.report.disturbances[f"{one.kind} {one.role}"] += 1
        if death is not None:
            self.report.deaths.append(death)
        return end if death is None else death.at

    async def perform_rounds(self, prober: Prober, seconds: float) -> None:
        """Disturbs a fleet again and again, and measures how soon it recovers; kills each role even after the time.

        The time to recover is only known for a single disturbance.
        """
        rng, end = random.Random(f"gaps {self.report.seed}"), time.monotonic() + seconds

        async def recover(one: Disturbance) -> float | None:
            begin = await self._perform(one)
            if await prober.recovered(one.target):
                return time.monotonic() - begin
            self.report.faults.append(f"{one.target} has not recovered from: {one.kind}")
            return None

        for number, disturbances in enumerate(fleet_rounds(self.report.seed)):
            if number >= len(FLEET_ROLES) + 1 and time.monotonic() > end:
                return
            took = await asyncio.gather(*map(recover, disturbances))
            self.tell(", ".join("not recovered" if one is None else f"recovered in {one:.1f} s" for one in took))
            if len(disturbances) == 1 and took[0] is not None:
                self.report.recoveries.append(Recovery(disturbances[0].role, disturbances[0].kind, took[0]))
            await asyncio.sleep(rng.uniform(*ROUND_GAP_SECONDS))

    def undisturbed(self, death: Death) -> bool:
        """Whether no other disturbance was near a death."""
        begin, end = death.at - QUIET_SECONDS, death.at + death.back_seconds + QUIET_SECONDS
        return sum(one_begin < end and begin < one_end for one_begin, one_end in self.disturbed) <= 1

    async def kill_executor_in_calm(self) -> None:
        """Kills the executor in calm; measures the time to first token of prompts that are only in a lower tier."""
        report, address = self.report, self.stage.stack.scheduler
        rng = random.Random(f"prompts {report.seed}")
        prompts = [[rng.randrange(1000, 40_000) for _ in range(CACHED_PROMPT)] for _ in range(9)]
        # The later prompts evict the first prompts from the device.
        cold = await ttft_seconds(address, prompts)
        death = await kill(self.stage, "executor")
        report.deaths.append(death)
        if not death.lower_blocks:
            report.faults.append("nothing was in a lower tier when the executor died")
        cached = await ttft_seconds(address, prompts[:3])
        report.figures["first token of 1,024 tokens, cold, s"] = cold
        report.figures["the same cached, after the executor's death, s"] = cached
        report.note_time(
            "the first token's time of a cached prompt, as a share of a cold one's", cached / cold, COLD_SHARE
        )


async def mixed(seed: int, seconds: float, tell: Tell) -> Report:
    """A run with every disturbance, of about `seconds` in all."""
    length = max(LEAST_SECONDS, seconds - RESERVE_SECONDS)
    async with _running("mixed", seed, tell, proxied=True, **MIXED) as run:
        await run.perform(length)
    return run.report


async def fleet(seed: int, seconds: float, tell: Tell, *, real: bool = False) -> Report:
    """A run with every disturbance of a fleet, of about `seconds` in all.

    real: with the default model, if three of them can run on this machine.
    """
    begin, report = time.monotonic(), Report("fleet", seed)
    stage = fleet_stage(seed, real=real, tell=tell, **(FLEET | (REAL if real else {})))
    expected = None if real else partial(continuation, vocab_size=byte_level_tokenizer().get_vocab_size())
    async with stage, Prober(stage, seed, expected) as prober:
        for engine in range(ENGINES):
            if not await prober.recovered(f"scheduler-{engine}"):
                raise TimeoutError(f"engine {engine} does not answer")
        tell(f"the fleet serves after {time.monotonic() - begin:.1f} s; its logs are in {stage.stack.folder}")
        known = await learn(prober.stub("router-0"), tell, evicting=False)
        names = [f"router-{router}" for router in range(ROUTERS)]
        addresses = [str(stage.stack.address(name)) for name in names]
        hit_rate, _ = await steady_hit_rate(addresses[0])
        load = Load(addresses, known, seed, FLEET_CLIENTS, lambda one, begin, end: stage.silent(names[one], begin, end))
        report.tally = load.tally
        run = Run(stage, load, report, tell)
        async with _reporting(load, tell):
            load.start()
            await run.perform_rounds(prober, max(LEAST_SECONDS, seconds - RESERVE_SECONDS))
            tell("calm")
            await asyncio.sleep(CALM_SECONDS)
            await load.stop()
        report.faults += [*load.tally.faults, *await check_fleet(stage, prober, known)]
        report.checked.append("every slot free or cached, no sequence, hold or ended lease left")
        report.checked.append("both routers expect what admissions find")
        report.hit_rates = [hit_rate]
        for address in addresses:
            await _check_hit_rate(report, address)
        report.faults += await check_fleet_store(stage, prober)
        report.checked.append("indexes and Redis agree")
        report.faults += [*prober.faults, *contradictions(stage), *stage.failures]
        report.deaths = [dataclasses.replace(death, at=death.at - begin) for death in report.deaths]
        report.streams = streams(load.tally, continued(stage))
        report.seconds = time.monotonic() - begin
        _keep_logs(stage, report, tell)
    return report


async def soak(seed: int, seconds: float, tell: Tell) -> Report:
    """A run with requests only, of about `seconds` in all."""
    length = max(LEAST_SECONDS, seconds - RESERVE_SECONDS)
    async with _running("soak", seed, tell, clients=24, executor_max_tokens=6144) as run:
        await watch_memory(run.stage, run.report, tell, length)
    return run.report


@contextlib.asynccontextmanager
async def _running(
    name: str, seed: int, tell: Tell, *, proxied: bool = False, clients: int = 12, **settings: object
) -> AsyncIterator[Run]:
    """A stack under load; at the end of the with statement the load ends and everything is checked."""
    begin, report = time.monotonic(), Report(name, seed)
    stage = single(seed, proxied=proxied, tell=tell, **settings)
    async with stage, Manager(stage.stack.admin) as manager:
        address = stage.stack.scheduler
        tell(f"the stack serves after {time.monotonic() - begin:.1f} s; its logs are in {stage.stack.folder}")
        async with grpc.aio.insecure_channel(address) as channel:
            known = await learn(generation_rpc.GenerationServiceStub(channel), tell)
        hit_rate, _ = await steady_hit_rate(address)
        tell(f"{len(known)} requests are known after {time.monotonic() - begin:.1f} s")
        load = Load([address], known, seed, clients, lambda _, begin, end: stage.absent("scheduler", begin, end))
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
        report.hit_rates = [hit_rate]
        await _check_hit_rate(report, address)
        if proxied:
            await run.kill_executor_in_calm()
        report.faults += await check_store(stage, manager)
        report.checked.append("index and Redis agree")
        report.judge([one for one in report.deaths if run.undisturbed(one)])
        report.messages = {str(trouble): count for trouble, count in stage.meddling.met.items()}
        report.faults += stage.failures
        report.deaths = [dataclasses.replace(death, at=death.at - begin) for death in report.deaths]
        report.seconds = time.monotonic() - begin
        _keep_logs(stage, report, tell)


async def _check_hit_rate(report: Report, address: str) -> None:
    """Adds the hit rate of repeated prompts, and a fault if the hit rate is lower than the first."""
    hit_rate, missed = await steady_hit_rate(address)
    report.hit_rates.append(hit_rate)
    if hit_rate < report.hit_rates[0]:
        report.faults.append(f"fewer tokens of the repeated prompts are cached than before: {', '.join(missed)}")


def _keep_logs(stage: Stage, report: Report, tell: Tell) -> None:
    """Keeps the logs of a run with faults."""
    if report.faults:
        folder = Path(tempfile.mkdtemp(prefix=f"kvkeep-chaos-{report.seed}-"))
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
