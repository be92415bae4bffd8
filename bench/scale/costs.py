"""Cost of an admission by the number of tenants, rules, quotas, sessions, hints, pins and salts.

Each row is the median process time of one call on a cached prompt. More tenants, rules or pins should not raise it.
"""

from __future__ import annotations

import gc
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from statistics import median

from bench.scale.row import Row
from cachemgr.manager import CacheManager
from cachemgr.sequences.holds import MAX_PINS
from cachemgr.slices import at_once
from cachemgr.types import (
    AdmitRequest,
    ExecutorSpec,
    HintAction,
    Hints,
    ManagerConfig,
    PoolSpec,
    Quota,
    Retention,
    RetentionRange,
    RetentionRule,
    RuleAction,
    RuleMatch,
    SyncRequest,
)
from protos.errors import InvalidField

BLOCK = 16
PROMPT = array("I", range(64 * BLOCK + 1))
# Up to a million sessions have this prompt. It is short, since the benchmark's duration grows with its length.
SYSTEM_PROMPT = array("I", range(4 * BLOCK + 1))
SIZES = (1, 1_000, 100_000)
RUNS = 31
# The calls with a limit on their growth.
CALLS = ("admission", "release", "refused admission")
# Seconds that leases and pins of others last.
LASTS = 3600.0
# The limit on a call's cost at the largest size, as a multiple of its cost at the smallest size.
GROWTH = 2.0


class Costs:
    """A manager with one executor and one scheduler; process times of its calls in ms."""

    def __init__(self, blocks: int, **config: object) -> None:
        settings = ManagerConfig(capacity_ahead_tokens=0, free_watermark=0.0, **config)
        self.blocks = blocks
        self.manager = CacheManager(1, lambda: 0.0, settings)
        self.manager.register_executor(ExecutorSpec("e", 1, "m", b"f" * 32, BLOCK, [PoolSpec(0, blocks)]))
        self.manager.register_scheduler("s", 1)
        self._runs = 0

    def run(self, tokens: array[int] = PROMPT, **options: object) -> tuple[float, float]:
        """Admits, computes and releases a prompt; returns the costs of the admission and of the sync that releases."""
        self._runs += 1
        request = AdmitRequest(f"q{self._runs}", "s", 1, "e", tokens, **options)
        begun = time.process_time()
        admission = self.manager.admit(request)
        admitted = time.process_time()
        assert admission.admitted
        handles, number = [admission.sequence_handle], self._runs
        done = SyncRequest("s", 1, 1, number, number, handles, [len(tokens)], [0], [], released_handles=handles)
        computed = time.process_time()
        self.manager.sync(done)
        return (admitted - begun) * 1e3, (time.process_time() - computed) * 1e3

    def typical(self, **options: object) -> tuple[float, float]:
        """Medians of both costs, after the prompt is cached."""
        self.run(**options)
        times = [self.run(**options) for _ in range(RUNS)]
        return median(one for one, _ in times), median(other for _, other in times)

    def refused(self) -> float:
        """The median process time of an admission, in ms, that is refused for lack of free blocks."""
        free = self.manager.queries.pools()[0].free_blocks - 8
        while free > 0:
            hog = AdmitRequest("hog", "s", 1, "e", array("I", bytes(4 * free * BLOCK)), no_store=True, no_read=True)
            admission = self.manager.admit(hog)
            if admission.admitted:
                break
            # The floors of other accounts are not free for this request.
            free -= admission.missing_blocks

        def refuse() -> float:
            begun = time.process_time()
            admission = self.manager.admit(AdmitRequest("late", "s", 1, "e", PROMPT, salt="unused"))
            assert not admission.admitted
            return (time.process_time() - begun) * 1e3

        found = median(refuse() for _ in range(RUNS))
        self._runs += 1
        number, handles = self._runs, [admission.sequence_handle]
        self.manager.sync(SyncRequest("s", 1, 1, number, number, released_handles=handles))
        return found


def rows(blocks: int) -> Iterator[Row]:
    """The rows of this module, without sizes above `blocks`."""
    sizes = [size for size in SIZES if size <= blocks]
    yield from _grown("rules, each with its own prefix", sizes, _rules(prefix=True))
    yield from _grown("rules, each with its own salt", sizes, _rules(prefix=False))
    yield from _grown("tenants with a salt and a quota each", sizes, _tenants(quotas=True))
    yield from _grown("tenants with a salt each", sizes, _tenants(quotas=False))
    yield from _grown("actions of a hint", [1, 64], _hints)
    yield from _grown("pins of others", [1, MAX_PINS], _pins)
    yield from _sessions([*sizes, *([blocks] if blocks > sizes[-1] else [])])
    try:
        Costs(1_000).run(hints=_envelope(1_000))
    except InvalidField as refused:
        yield Row(f"1,000 actions of a hint are refused: {refused.message}", 1, "")


Made = Iterator[tuple[str, float]]


def _grown(name: str, sizes: Sequence[int], measure: Callable[[int], Made]) -> Iterator[Row]:
    """The cost of each call at each size, and the cost at the last size as a multiple of the cost at the first."""
    first: dict[str, float] = {}
    for size in sizes:
        gc.collect()
        for call, cost in measure(size):
            yield Row(f"{call}, {size:,} {name}", cost, "ms")
            first.setdefault(call, cost)
            if size == sizes[-1] and call in CALLS:
                yield Row(f"{call}, {size:,} {name}: as a multiple of {sizes[0]}", cost / first[call], "x", GROWTH)


def _both(costs: Costs, **options: object) -> Made:
    admission, release = costs.typical(**options)
    yield "admission", admission
    yield "release", release


def _rules(*, prefix: bool) -> Callable[[int], Made]:
    def measure(size: int) -> Made:
        costs = Costs(1_000)
        begun = time.process_time()
        for number in range(size):
            match = RuleMatch(prefix_token_ids=(number + 5,) * 64) if prefix else RuleMatch(salt=f"s{number}")
            rule = RetentionRule(f"r{number}", number % 7, match, RuleAction(priority=50))
            at_once(costs.manager.operators.create_rule(rule, validate_only=False))
        yield "to create one", (time.process_time() - begun) * 1e3 / size
        yield from _both(costs)
        begun = time.process_time()
        at_once(costs.manager.operators.delete_rule("r0", "", validate_only=False))
        yield "to delete one", (time.process_time() - begun) * 1e3

    return measure


def _tenants(*, quotas: bool) -> Callable[[int], Made]:
    def measure(size: int) -> Made:
        # The cache is equally large for all numbers of tenants, so that only their number changes.
        costs = Costs(2 * max(SIZES))
        for number in range(size):
            names = {"salt": f"s{number}", "tenant_id": f"t{number}"}
            if quotas:
                at_once(
                    costs.manager.operators.set_quota(
                        Quota(tenant_id=f"t{number}", device_floor=1), validate_only=False
                    )
                )
            costs.run(array("I", [number, *range(BLOCK)]), **names)
        yield from _both(costs, tenant_id="t0", salt="s0")
        yield "refused admission", costs.refused()
        if quotas:
            begun = time.process_time()
            at_once(costs.manager.operators.delete_quota(Quota(tenant_id="t0")))
            yield "to delete a quota", (time.process_time() - begun) * 1e3

    return measure


def _envelope(actions: int, kind: str = "Retain", **payload: object) -> Hints:
    said = payload or {"priority": 60}
    return Hints("0.1", "m", tuple(HintAction(f"a{number}", kind, "0.1", said) for number in range(actions)))


def _hints(size: int) -> Made:
    yield from _both(Costs(1_000), hints=_envelope(size))


def _pins(size: int) -> Made:
    costs = Costs(1_000)
    costs.run()
    for number in range(size):
        costs.run(hints=_envelope(1, "Pin", owner=f"o{number}", duration_seconds=LASTS))
    yield from _both(costs, hints=_envelope(1, "Pin", owner="o0", duration_seconds=LASTS))


def _sessions(sizes: list[int]) -> Iterator[Row]:
    """All sessions lease one system prompt; the calls are measured at several numbers of sessions."""
    costs = Costs(100_000)
    retention = Retention((RetentionRange(0, None, 60, LASTS),), 60, LASTS)
    begun, first, longest = 0, (0.0, 0.0), 0.0
    for size in sizes:
        for number in range(begun, size):
            longest = max(longest, *costs.run(SYSTEM_PROMPT, session_id=f"x{number}", retention=retention))
        begun = size
        times = [costs.run(SYSTEM_PROMPT, session_id=f"y{size}-{at}", retention=retention) for at in range(RUNS)]
        found = median(one for one, _ in times), median(other for _, other in times)
        first = first if any(first) else found
        for call, cost in zip(("admission", "release"), found, strict=True):
            yield Row(f"{call}, {size:,} sessions lease one prompt", cost, "ms")
    for call, cost, before in zip(("admission", "release"), found, first, strict=True):
        yield Row(f"{call}, {size:,} sessions: as a multiple of {sizes[0]}", cost / before, "x", GROWTH)
    yield Row("longest call of them all", longest, "ms", 50)
