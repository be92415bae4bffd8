"""Cost of the cache manager's decisions: time per call and block, and memory per block.

Run it with `make bench-manager`. It uses one core, a virtual clock and no device; the second part calls a real process
over a unix socket. Times are medians, minima and maxima of several runs. Missed targets are reported, but do not fail
the run.
"""

import argparse
import gc
import itertools
import random
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from bench import manager_rpc
from bench.driver import CONFIG, Driver, prompt
from bench.result import Result, add_json_argument
from cachemgr.retention.leases import ENDED_AT_A_TIME
from cachemgr.types import Retention, RetentionRange
from protos.rpc.startup import collect_rarely

BLOCK = 16
PROMPT_TOKENS = 8_192
CHAIN = PROMPT_TOKENS // BLOCK
SIZES = (1_000, 10_000, 100_000, 1_000_000)
LEASES = 100_000
SEQUENCES = 256


@dataclass(frozen=True)
class Row:
    """One measurement in its unit; `target` is the upper limit for the median."""

    name: str
    unit: str
    values: Sequence[float]
    target: float | None = None

    @property
    def median(self) -> float:
        """The middle value."""
        return statistics.median(self.values)

    def show(self) -> None:
        """Prints a line of the table."""
        bound = "" if self.target is None else f"< {self.target:g}"
        verdict = "" if self.target is None else "met" if self.median < self.target else "MISSED"
        numbers = "".join(f"{value:>10.2f}" for value in (self.median, min(self.values), max(self.values)))
        print(f"{self.name:<54}{self.unit:<13}{bound:>7}{numbers}{len(self.values):>6}  {verdict}", flush=True)


def header(title: str) -> None:
    """Prints the head of a table."""
    print(f"\n{title:<54}{'unit':<13}{'target':>7}{'median':>10}{'min':>10}{'max':>10}{'runs':>6}")


def timed(call: Callable[..., Any], *arguments: object) -> tuple[float, Any]:
    """The time of a call in seconds, and its result."""
    begin = time.perf_counter()
    answer = call(*arguments)
    return time.perf_counter() - begin, answer


class Pauses:
    """Durations in milliseconds of full garbage collections that Python started by itself."""

    def __init__(self) -> None:
        self.full: list[float] = []
        self._begin = 0.0
        gc.callbacks.append(self._note)

    def _note(self, phase: str, info: dict[str, int]) -> None:
        if info["generation"] < 2:
            return
        if phase == "start":
            self._begin = time.perf_counter()
        else:
            self.full.append((time.perf_counter() - self._begin) * 1e3)

    def show(self) -> None:
        """Prints a line about the collections since the previous call."""
        print(f"full garbage collections: {len(self.full)}, {sum(self.full):.0f} ms in all, ", end="")
        print(f"the longest {max(self.full, default=0.0):.0f} ms", flush=True)
        self.full = []


class FullPool:
    """A pool in which every block is cached: prompts of `chain` blocks, each computed once and released."""

    def __init__(self, num_blocks: int) -> None:
        self.chain = min(CHAIN, num_blocks // 8)
        self.driver = Driver(num_blocks)
        self._prompts = itertools.count()
        while self.driver.pool.cached_blocks + self.chain <= num_blocks:
            self.cache()
        self.cache()

    def _prompt(self) -> tuple[str, list[int]]:
        number = next(self._prompts)
        return f"p{number}", prompt(number, self.chain * BLOCK).tolist()

    def cache(self) -> None:
        """Caches a new prompt."""
        self.driver.cache(*self._prompt())

    def admit_cached(self) -> float:
        """Caches a new prompt; returns the seconds to admit the prompt again."""
        name, tokens = self._prompt()
        self.driver.cache(name, tokens)
        taken, admission = timed(self.driver.admit, name, tokens)
        self.driver.confirm(admission)
        self.driver.sync(released=[admission.sequence_handle])
        return taken

    def admit_unseen(self) -> tuple[float, float]:
        """Seconds to admit a new prompt, which evicts blocks, and seconds to store the prompt."""
        name, tokens = self._prompt()
        taken, admission = timed(self.driver.admit, name, tokens)
        stored, _ = timed(self.driver.sync, {admission.sequence_handle: len(tokens)})
        self.driver.sync(released=[admission.sequence_handle])
        return taken, stored

    def extend(self) -> float:
        """Seconds to extend a sequence by a chain's blocks, which evicts blocks. Fills the pool again afterwards."""
        handle = self.driver.admit("long", [1]).sequence_handle
        capacity = (self.chain + 1) * BLOCK
        evicted = self.driver.pool.evicted_blocks
        taken, _ = timed(self.driver.reserve, handle, capacity)
        assert self.driver.pool.evicted_blocks - evicted >= self.chain - 1
        self.driver.sync(released=[handle])
        self.cache()
        return taken


def grow(sizes: Sequence[int], runs: int, pauses: Pauses) -> tuple[list[dict[str, Any]], list[Row]]:
    """Returns the curve over the number of cached blocks, and the rows that have targets.

    The pools take turns, so that the sizes stay comparable on a machine whose speed changes.
    """
    pools = [FullPool(size) for size in sizes]
    extensions: dict[int, list[float]] = {size: [] for size in sizes}
    unseen: dict[int, list[float]] = {size: [] for size in sizes}
    stored: dict[int, list[float]] = {size: [] for size in sizes}
    cached: dict[int, list[float]] = {size: [] for size in sizes}
    order = list(zip(sizes, pools, strict=True)) * runs
    # In a fixed order, every garbage collection might fall into the same call.
    random.Random(1).shuffle(order)
    for size, pool in order:
        per_block = 1e6 / pool.chain
        extensions[size].append(pool.extend() * per_block)
        for column, value in zip((unseen, stored), pool.admit_unseen(), strict=True):
            column[size].append(value * per_block)
        cached[size].append(pool.admit_cached() * per_block)
    print(f"\n{'us per block, medians':>22}{'eviction by':>13}{'eviction by':>13}{'storing':>10}{'admission of':>14}")
    print(f"{'cached blocks':>22}{'extension':>13}{'admission':>13}{'':>10}{'cached blocks':>14}")
    columns = {
        "eviction_by_extension": extensions,
        "eviction_by_admission": unseen,
        "storing": stored,
        "admission_of_cached_blocks": cached,
    }
    for size in sizes:
        values = [statistics.median(column[size]) for column in columns.values()]
        print(f"{size:>22,}{values[0]:>13.2f}{values[1]:>13.2f}{values[2]:>10.2f}{values[3]:>14.2f}")
    pauses.show()
    # In microseconds per block.
    curve = [{"cached_blocks": size} | {name: column[size] for name, column in columns.items()} for size in sizes]
    return curve, list(_judged(sizes, extensions, unseen, cached))


def _judged(
    sizes: Sequence[int],
    extensions: dict[int, list[float]],
    unseen: dict[int, list[float]],
    cached: dict[int, list[float]],
) -> Iterator[Row]:
    """Points of the curve that have targets."""
    if 100_000 in sizes:
        yield Row("admission of 8,192 cached tokens", "ms", [value * CHAIN / 1e3 for value in cached[100_000]], 3)
        yield Row("eviction by extension, 100,000 blocks", "us per block", extensions[100_000], 3)
        yield Row("eviction by admission, 100,000 blocks", "us per block", unseen[100_000], 3)
        if 1_000_000 in sizes:
            for name, column in (("extension", extensions), ("admission", unseen)):
                ratios = [more / few for more, few in zip(column[1_000_000], column[100_000], strict=True)]
                yield Row(f"eviction by {name}, 1,000,000 to 100,000 blocks", "ratio", ratios, 1.3)


def extension(runs: int) -> Row:
    """Measures how a sequence takes blocks from an empty pool."""
    driver = Driver((runs + 1) * CHAIN)
    handle = driver.admit("a", [1]).sequence_handle
    taken = [timed(driver.reserve, handle, run * PROMPT_TOKENS)[0] for run in range(1, runs + 1)]
    return Row("extension into an empty pool", "us per block", [value * 1e6 / CHAIN for value in taken], 2)


def expiry(runs: int) -> Row:
    """Measures the end of all leases of a pool at one moment; each call ends at most `ENDED_AT_A_TIME` leases."""
    calls = -(-LEASES // ENDED_AT_A_TIME)
    prompts = [prompt(number, PROMPT_TOKENS).tolist() for number in range(-(-LEASES // CHAIN))]
    driver = Driver((len(prompts) + 1) * CHAIN)
    values = []
    for run in range(runs):
        for number, tokens in enumerate(prompts):
            # The last prompt asks for the rest of the leases.
            left = min(PROMPT_TOKENS, LEASES * BLOCK - number * PROMPT_TOKENS)
            retention = Retention((RetentionRange(0, left, 60, 10.0),))
            driver.cache(f"{run}/{number}", tokens, session_id=f"session {number}", retention=retention)
            driver.now += 0.001
        driver.now += 60.0
        before = driver.manager.queries.last_event
        values.append(timed(lambda: [driver.manager.expire() for _ in range(calls)])[0] * 1e3)
        assert driver.manager.queries.last_event - before == 2 * LEASES
    return Row(f"expiry of {LEASES:,} leases", "ms", values, 200)


def synchronisation(runs: int) -> Row:
    """Measures a sync of running sequences with one new token each; one sequence in sixteen fills a block."""
    driver = Driver(100_000)
    computed = {}
    for number in range(SEQUENCES):
        tokens = prompt(number, 1_024)[: 512 + number]
        computed[driver.admit(f"r{number}", tokens.tolist()).sequence_handle] = len(tokens)
    new_tokens = [[7]] * SEQUENCES
    driver.sync(computed, new_tokens)
    values = []
    for _ in range(runs):
        computed = {handle: length + 1 for handle, length in computed.items()}
        values.append(timed(driver.sync, computed, new_tokens)[0] * 1e3)
    return Row(f"{SEQUENCES} running sequences in one sync", "ms", values, 1.5)


def memory(num_blocks: int = 100_000) -> Row:
    """Bytes per cached block that Python allocates for a new pool and its blocks, without the history of events."""
    rng = random.Random(3)
    gc.collect()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    driver = Driver(num_blocks, config=replace(CONFIG, event_history=1))
    trunk = prompt(0, PROMPT_TOKENS)
    for number in itertools.count(1):
        # Every second prompt branches off from the previous prompt at a random position.
        common = rng.randrange(PROMPT_TOKENS) if number % 2 else 0
        trunk = trunk[:common] + prompt(number, PROMPT_TOKENS)[common:]
        if driver.pool.cached_blocks + CHAIN > num_blocks:
            break
        driver.cache(f"p{number}", trunk)
    del trunk
    gc.collect()
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return Row("memory per cached block of 16 tokens (tracemalloc)", "bytes", [used / driver.pool.cached_blocks], 400)


def _spin() -> None:
    for _ in range(1_000_000):
        pass


def main() -> None:
    """Prints the curve, then everything that has a target."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="blocks of the pools on the curve")
    parser.add_argument("--runs", type=int, default=30, help="times that each call is measured")
    add_json_argument(parser)
    arguments = parser.parse_args()
    collect_rarely()
    print(f"Python {sys.version.split()[0]}, collector thresholds {gc.get_threshold()}, {gc.get_freeze_count()} frozen")
    # Brings the processor up to speed.
    FullPool(10_000)
    print(f"one million iterations of an empty loop take {timed(_spin)[0] * 1e3:.0f} ms")
    pauses = Pauses()
    curve, rows = grow(arguments.sizes, arguments.runs, pauses)
    header("in process")
    for row in rows:
        row.show()
    for measure in (lambda: extension(arguments.runs), lambda: synchronisation(8 * arguments.runs), lambda: expiry(5)):
        rows.append(measure())
        rows[-1].show()
    pauses.show()
    rows.append(memory())
    rows[-1].show()
    header("over gRPC, from a client's view")
    over_grpc = []
    for name, unit, values, target in manager_rpc.measure(arguments.runs):
        over_grpc.append(Row(name, unit, values, target))
        over_grpc[-1].show()
    print(f"one million iterations of an empty loop take {timed(_spin)[0] * 1e3:.0f} ms")
    parts = {"in_process": [asdict(row) for row in rows], "over_grpc": [asdict(row) for row in over_grpc]}
    asked = {"sizes": arguments.sizes, "runs": arguments.runs}
    Result("manager", {"curve_us_per_block": curve, **parts}, asked).write(arguments.json)


if __name__ == "__main__":
    main()
