"""One decision of the policy `cost` for a prompt of 100,000 tokens, 16 engines and a view of a million blocks.

Each case has a separate view. The prompts of a case take turns, so that no processor cache has the data that the next
prompt needs. Hashing of the prompt is measured separately: its time does not depend on the view.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from random import Random

from bench.result import percentile
from bench.router.made import PROMPT_BLOCKS, Caches, fleet, keys_of, other_keys, prompt
from bench.scale.row import Row
from scheduler.request import AdmissionAttempt
from scheduler.router.fleet import Prepared, hash_prompt

ENGINES, PROMPTS, ROUNDS = 16, 24, 10
TARGET_MS = 1.0

Store = Callable[[Caches, int, list[int]], None]


def nowhere(caches: Caches, number: int, keys: list[int]) -> None:
    """Nothing of the prompt is cached."""


def on_one(caches: Caches, number: int, keys: list[int]) -> None:
    """The whole prompt is on one device."""
    caches.store(number % len(caches.names), 1, keys)


def on_all(caches: Caches, number: int, keys: list[int]) -> None:
    """The whole prompt is on every device."""
    for engine in range(len(caches.names)):
        caches.store(engine, 1, keys)


def in_tiers(caches: Caches, number: int, keys: list[int]) -> None:
    """Every engine has a beginning: a part on the device, the next in host memory, the next on disk."""
    random = Random(number)
    for engine in range(len(caches.names)):
        ends = [0, *sorted(random.choices(range(len(keys) + 1), k=3))]
        for tier in (1, 2, 3):
            caches.store(engine, tier, keys[ends[tier - 1] : ends[tier]])


def in_any_tier(caches: Caches, number: int, keys: list[int]) -> None:
    """Every engine has the whole prompt, each block in any tier: no two blocks are alike."""
    random = Random(number)
    for engine in range(len(caches.names)):
        tiers = random.choices((1, 2, 3), k=len(keys))
        for tier in (1, 2, 3):
            caches.store(engine, tier, [key for key, at in zip(keys, tiers, strict=True) if at == tier])


CASES: Sequence[tuple[str, Store, float | None]] = (
    ("nothing cached", nowhere, TARGET_MS),
    ("all on one engine", on_one, TARGET_MS),
    ("all on every engine", on_all, TARGET_MS),
    ("a beginning on every engine, in three tiers", in_tiers, TARGET_MS),
    ("all on every engine, each block in any tier", in_any_tier, None),
)


def rows(blocks: int) -> Iterator[Row]:
    """The rows of this module."""
    attempts = [prompt(number) for number in range(PROMPTS)]
    hashing: list[float] = []
    whole: list[float] = []
    longest: list[float] = []
    for name, store, target in CASES:
        caches = filled(attempts, store, blocks, ENGINES)
        taken, hashed = decisions(caches, attempts)
        hashing += hashed
        if target is not None:
            whole += map(sum, zip(taken, hashed, strict=True))
            longest += turns(caches, attempts)
        yield from shown(f"{len(attempts[0].token_ids):,} tokens, {name}", taken, target)
    yield from shown(f"hashing of {PROMPT_BLOCKS:,} blocks, beside each", hashing, None)
    yield from shown("the whole decision with hashing, cases that have a target", whole, None)
    yield from shown("of it the longest turn of the event loop", longest, TARGET_MS)


def filled(attempts: Sequence[AdmissionAttempt], store: Store, blocks: int, engines: int, shards: int = 1) -> Caches:
    """Caches with the prompts of a case, and with other blocks up to a total number of blocks."""
    caches = Caches(engines, shards)
    for number, attempt in enumerate(attempts):
        store(caches, number, keys_of(attempt))
    others = max(0, blocks - len(caches.view))
    for engine in range(engines):
        caches.store(engine, 1, other_keys(engine, others // engines))
    return caches


def decisions(caches: Caches, attempts: Sequence[AdmissionAttempt]) -> tuple[list[float], list[float]]:
    """Process time in seconds of each decision without hashing, and of the hashing."""
    router, taken, hashed = fleet(caches), [], []
    links = list(router.links.values())
    gc.collect()
    for _ in range(ROUNDS):
        for attempt in attempts:
            before, begun = router.hashing, time.process_time()
            router._choose(attempt, links, time.monotonic())
            ended = time.process_time()
            hashed.append(router.hashing - before)
            taken.append(ended - begun - hashed[-1])
    return taken, hashed


def turns(caches: Caches, attempts: Sequence[AdmissionAttempt]) -> list[float]:
    """Process time of the longest turn that each decision takes on the event loop, in seconds."""
    router, longest = fleet(caches), []
    links = list(router.links.values())
    gc.collect()
    for _ in range(ROUNDS):
        for attempt in attempts:
            hashing, turn = hash_prompt(attempt, router._to_hash(attempt)), 0.0
            while True:
                begun = time.process_time()
                try:
                    hashing.send(None)
                except StopIteration as end:
                    router._choose(attempt, links, time.monotonic(), Prepared(keys=end.value))
                    break
                finally:
                    turn = max(turn, time.process_time() - begun)
            longest.append(turn)
    return longest


def shown(name: str, seconds: Sequence[float], target: float | None) -> Iterator[Row]:
    """Three percentiles in milliseconds."""
    for share in (50, 95, 99):
        bound = target if share == 95 else None
        yield Row(f"{name}: p{share}", percentile(seconds, share / 100) * 1e3, "ms", bound)
