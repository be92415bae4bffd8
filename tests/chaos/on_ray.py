"""Processes, actors and nodes of a fleet on a Ray cluster are lost under load, in an order that follows from the seed.

The cluster has a head and two nodes on this machine. The fleet has three engines, two shards and two routers, and its
executors compute tokens without a model, from the contents of their blocks. Sixteen streams run all the time. The
streams of a lost router are cut, and sent again.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from bench.result import spread
from bench.tables import table
from tests.support.ray_cluster import (
    BLOCK_STUB,
    HOSTS,
    LOSSES,
    PAUSES,
    ROUTER_LOSSES,
    STEP_SECONDS,
    BlockStubMember,
    RayFleet,
    ray_cluster,
)
from tests.support.ray_load import STREAMS, Answers, ask_while

ENGINES, MORE_ENGINES, SHARDS, ROUTERS = 3, 4, 2, 2
NODE, SCALE = "node", f"{MORE_ENGINES} engines, then {ENGINES} again"
WORK: dict[str, Callable[[RayFleet], None]] = LOSSES | ROUTER_LOSSES | PAUSES

Tell = Callable[[str], None]


@dataclass
class Report:
    """What happened, with the answers meanwhile. faults: wrong tokens, lost requests, a fleet not complete in time."""

    seed: int
    answers: list[tuple[str, Answers]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    # Promises about time; there are none.
    slow: tuple[str, ...] = ()

    def values(self) -> dict[str, object]:
        """For a Result."""
        return {"faults": self.faults, "losses": self.losses()}

    def losses(self) -> list[dict[str, Any]]:
        """Each kind of loss: sums over its times, and the spread of times."""
        kinds: dict[str, list[Answers]] = defaultdict(list)
        for what, one in self.answers:
            kinds[what].append(one)
        return [
            {
                "what": what,
                "requests": sum(one.requests for one in found),
                "wrong": sum(len(one.wrong) for one in found),
                "lost": sum(len(one.lost) for one in found),
                "cut": sum(one.cut for one in found),
                "pause": spread([one.pause for one in found]),
                "seconds": spread([one.seconds for one in found]),
            }
            for what, found in sorted(kinds.items())
        ]

    def text(self) -> str:
        """A table with a row for each kind of loss."""
        rows = [
            (
                str(one["what"]),
                str(one["seconds"]["repeats"]),
                *(str(one[name]) for name in ("requests", "wrong", "lost", "cut")),
                *(f"{one[name]['median']:.1f} / {one[name]['highest']:.1f}" for name in ("pause", "seconds")),
            )
            for one in self.losses()
        ]
        heads = (
            f"on Ray, seed {self.seed}",
            "times",
            "requests",
            "wrong",
            "lost",
            "cut with\ntheir router",
            "longest pause, s:\nmedian / max",
            "complete again, s:\nmedian / max",
        )
        return (
            table(heads, rows)
            + f"\n\nfaults {len(self.faults)}"
            + "".join(f"\n\nFAULT {fault}" for fault in self.faults)
        )


def lose_all(seed: int, seconds: float, tell: Tell) -> Report:
    """Loses members one after the other for about `seconds` seconds, each kind at least once."""
    report = Report(seed)
    with (
        pytest.MonkeyPatch.context() as patch,
        ray_cluster(
            ENGINES, SHARDS, ROUTERS, executor_max_tokens=16_384, executor_stub_step_seconds=STEP_SECONDS
        ) as fleet,
    ):
        patch.setattr("ray_fleet.Member", BlockStubMember)
        fleet.stub = BLOCK_STUB
        fleet.scale(ENGINES)
        fleet.wait_until_whole(ENGINES)
        end, rng = time.monotonic() + seconds, random.Random(f"ray {seed}")
        for number, what in enumerate(_order(rng)):
            if number >= len(WORK) + 2 and time.monotonic() > end:
                break
            if not _lose(fleet, what, rng, report, tell):
                break
        report.faults += fleet.faults()
    return report


def _order(rng: random.Random) -> Iterator[str]:
    """Kinds of loss in rounds, each with all of them."""
    kinds = [*WORK, SCALE, NODE]
    while True:
        yield from rng.sample(kinds, len(kinds))


def _lose(fleet: RayFleet, what: str, rng: random.Random, report: Report, tell: Tell) -> bool:
    """Whether the fleet was complete again in time."""
    host, cuts = "", ["router-0"] if what in ROUTER_LOSSES else []
    if what == NODE:
        host = rng.choice(HOSTS)
        there = fleet.members_on(host)
        cuts = [name for name in there if name.startswith("router")]
        what = f"node with {', '.join(there) or 'nothing'}"
        work: Callable[[RayFleet], None] = lambda fleet: fleet.lose(host)  # noqa: E731
    else:
        work = _scale if what == SCALE else WORK[what]
    tell(what)
    try:
        answers = ask_while(fleet, lambda: work(fleet), cuts=cuts)
    except (AssertionError, TimeoutError) as error:
        report.faults.append(f"{what}: {str(error) or 'requests are not answered in time'}")
        return False
    finally:
        if host:
            # The node comes back empty. Only the main thread may start a node.
            fleet.add(host)
    report.answers.append((what, answers))
    faults = [f"{what}: {error}" for error in answers.lost]
    faults += [f"{what}: wrong tokens for prompt {number}" for number in answers.wrong]
    if answers.requests < STREAMS:
        faults.append(f"{what}: only {answers.requests} requests were answered")
    report.faults += faults
    tell("\n".join([f"complete after {answers.seconds:.1f} s, longest pause {answers.pause:.1f} s", *faults]))
    return True


def _scale(fleet: RayFleet) -> None:
    for engines in (MORE_ENGINES, ENGINES):
        fleet.scale(engines)
        fleet.wait_until_whole(engines)
