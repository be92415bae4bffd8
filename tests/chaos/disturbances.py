"""Disturbances of a stage: a schedule that follows from a seed, and how each kind is performed."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import signal
from collections.abc import Iterator
from dataclasses import dataclass

from tests.chaos.measuring import Death, kill
from tests.chaos.meddling import Trouble
from tests.chaos.stage import (
    ENGINES,
    PROCESSES,
    REDIS,
    ROUTERS,
    SHARDS,
    Stage,
    engine_link,
    events_link,
    shard_link,
)
from tests.stack import MODULES

# Period of the cache manager's kills, which do not depend on other disturbances; the first is after half a period.
CACHEMGR_SECONDS = 20.0
# Seconds between other disturbances: on average, and at least in short runs. Disturbances may overlap.
MEAN_GAP_SECONDS, LEAST_GAP_SECONDS = 4.0, 3.0
# A silent process counts as lost after its lease, a silent connection after keepalive's 25 s.
PAUSES = (0.3, 6.0)
LONG_PAUSE = (26.0, 32.0)
# Long pauses only occur in runs of at least this length.
LONG_PAUSES_FROM = 300.0
REDIS_SECONDS = (3.0, 10.0)
REDIS_DELAYS = (0.05, 3.0)
# A killed Redis stays away for up to this share of the run.
REDIS_AWAY_SHARE = 0.1
TROUBLE_SECONDS = (2.0, 5.0)
TROUBLE_SHARE = (0.05, 0.2)
DISK_SECONDS = (3.0, 10.0)
# File sizes above every log, and below or in the middle of a disk tier's file.
NOTHING_FITS, HALF_FITS = 16 << 20, 128 << 20
# Pauses of a fleet: shorter and longer than a lease of three seconds and than an engine may be silent.
FLEET_PAUSES = {"short pause": (0.5, 2.0), "long pause": (5.5, 10.0)}
PARTITION_SECONDS, CUT_SECONDS = (4.0, 9.0), (2.0, 5.0)
# How long a killed Redis of a fleet stays away.
AWAY_SECONDS = (30.0, 60.0)
# Number of rounds with a pair of disturbances, among rounds with one disturbance each.
PAIRS = 3
KINDS = ("kill", "terminate", "pause", "slow", "cut off", "fill", "break streams", "refuse writes", *Trouble)


# Roles of a fleet that have numbers, with how many there are of each.
FLEET_ROLES = {"router": ROUTERS, "scheduler": ENGINES, "executor": ENGINES, "cachemgr": SHARDS}


@dataclass(frozen=True)
class Disturbance:
    """at: from the begin of the schedule. seconds: its length. strength: delay, share or size, by kind."""

    at: float
    kind: str
    target: str
    seconds: float = 0.0
    strength: float = 1.0

    @property
    def role(self) -> str:
        """The target without the numbers of processes."""
        words = (word.partition("-")[0] for word in self.target.split())
        return " ".join(words)

    def __str__(self) -> str:
        lasting = f" for {self.seconds:.1f} s ({self.strength:.3g})" if self.seconds else ""
        return f"{self.at:6.1f} s  {self.kind} {self.target}{lasting}"

    async def perform(self, stage: Stage) -> Death | None:
        """Returns when the disturbance is over."""
        match self.kind:
            case "kill":
                return await kill(stage, self.target, self.seconds)
            case "away":
                await kill(stage, self.target, self.seconds)
            case "terminate":
                await stage.restart(self.target, signal.SIGTERM)
            case "pause" | "short pause" | "long pause":
                await stage.pause(self.target, self.seconds)
            case "empty":
                await stage.empty_redis()
            case "break streams":
                for proxy in stage.proxies:
                    proxy.break_streams()
            case _:
                await self._set(stage, self.strength)
                await asyncio.sleep(self.seconds)
                await self._set(stage, 0)
        return None

    async def _set(self, stage: Stage, strength: float) -> None:
        match self.kind:
            case "slow":
                stage.links[self.target].delay = strength
            case "cut off":
                link = stage.links[self.target]
                link.cut() if strength else link.mend()
            case "partition":
                link = stage.links[self.target]
                link.hold() if strength else link.mend()
            case "fill":
                await stage.fill_redis(bool(strength))
            case "refuse writes":
                stage.limit_files(int(strength) or None)
            case _:
                stage.meddling.shares[Trouble(self.kind)] = strength


def _deck(rng: random.Random, seconds: float) -> list[Disturbance]:
    """Every kind once, except the cache manager's deaths, in random order."""
    deck = [Disturbance(0, "kill", name) for name in ("executor", "scheduler")]
    deck.append(Disturbance(0, "kill", REDIS, rng.uniform(0, REDIS_AWAY_SHARE * seconds)))
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


def schedule_of(seed: int, seconds: float) -> list[Disturbance]:
    """Every kind within `seconds`, as close together as necessary if there is time for each kind."""
    rng = random.Random(f"schedule {seed}")
    deaths = range(int((seconds - CACHEMGR_SECONDS / 2) // CACHEMGR_SECONDS) + 1)
    found = [Disturbance((0.5 + number) * CACHEMGR_SECONDS, "kill", "cachemgr") for number in deaths]
    at = 1.0
    while at < seconds:
        deck = _deck(rng, seconds)
        gap = min(MEAN_GAP_SECONDS, max(LEAST_GAP_SECONDS, (seconds - 2) / len(deck)))
        if seconds < gap * len(deck):
            # There is no time for all disturbances, but deaths must occur.
            deck.sort(key=lambda one: one.kind != "kill")
        for one in deck:
            if at < seconds:
                found.append(dataclasses.replace(one, at=at))
            at += rng.uniform(0.5, 1.5) * gap
    return sorted(found, key=lambda one: one.at)


def _of_fleet(rng: random.Random) -> tuple[list[Disturbance], list[Disturbance]]:
    """A kill of each role, and every other disturbance of a fleet, once each, with random processes."""

    def process(role: str) -> str:
        return f"{role}-{rng.randrange(FLEET_ROLES[role])}"

    processes = [*map(process, FLEET_ROLES), REDIS]
    kills = [Disturbance(0, "kill", name) for name in processes]
    rest = [
        Disturbance(0, kind, name if name == REDIS else process(name.partition("-")[0]), rng.uniform(*seconds))
        for kind, seconds in FLEET_PAUSES.items()
        for name in processes
    ]
    ways = (
        engine_link(rng.randrange(ROUTERS), rng.randrange(ENGINES)),
        shard_link(rng.randrange(ENGINES)),
        events_link(rng.randrange(SHARDS)),
    )
    rest += [Disturbance(0, "partition", way, rng.uniform(*PARTITION_SECONDS)) for way in ways]
    rest += [Disturbance(0, "cut off", way, rng.uniform(*CUT_SECONDS)) for way in (*ways, REDIS)]
    rest += [Disturbance(0, "empty", REDIS), Disturbance(0, "away", REDIS, rng.uniform(*AWAY_SECONDS))]
    rng.shuffle(kills)
    rng.shuffle(rest)
    return kills, rest


def fleet_rounds(seed: int) -> Iterator[tuple[Disturbance, ...]]:
    """Rounds of disturbances of a fleet, without end; each begins after the fleet has recovered from the round before.

    The first rounds kill each role. Most rounds have one disturbance, some have two with different targets.
    """
    rng = random.Random(f"rounds {seed}")
    kills, rest = _of_fleet(rng)
    yield from ((one,) for one in kills)
    while True:
        rounds: list[tuple[Disturbance, ...]] = [(one,) for one in rest]
        for _ in range(PAIRS):
            one, other = rng.sample([*kills, *rest], 2)
            rounds.append((one, other) if one.target != other.target else (one,))
        rng.shuffle(rounds)
        yield from rounds
        kills, rest = _of_fleet(rng)
        rest += kills
