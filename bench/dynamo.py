"""Checks that a third-party router knows from events which blocks each cache manager has.

`make peers ARGS=dynamo` installs the router first. Two cache managers publish their blocks over ZeroMQ. Meanwhile
executors, schedulers and the managers themselves die at random. dynamo's indexer follows both managers, and sometimes
misses batches. For random prompts it must find as many tokens as each cache and tier has. Exits with 1 if an answer
stays wrong for ten seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import structlog

from bench.peers.routers import RouterProcess
from bench.peers.set_up import DYNAMO, default_folder
from bench.result import Result
from bench.tables import table
from cachemgr.manager import CacheManager
from cachemgr.rpc import vllm_event_publisher
from cachemgr.rpc.vllm_event_publisher import ZmqSettings
from protos.kvcommon.block_keys import prompt_low_keys, root_key
from protos.kvcommon.tokens import pack, packed_bytes
from tests.chaos.proxies import SocketProxy
from tests.support.in_process_manager import BLOCK, FINGERPRINT
from tests.support.ports import free_address
from tests.support.random_operations import SALTS, RandomLife
from tests.support.zmq_reader import Publishing, truth

CACHES = 2
# Prompts between two parts of the random lives, and operations in each part.
PROMPTS, OPERATIONS = 1000, 150
PROBES = 100
# Each tier has room for some of the longest prompts.
SIZES: dict[str, Any] = {"windows": (None,), "num_blocks": 60, "host": 60, "disk": 60}
LONGEST = 16 * BLOCK
BEGINNINGS = 6
# Weights that replace a random life's usual weights, so that caches are mostly full.
WEIGHTS = {"work": 100, "begin_long_call": 0.5, "purge": 0.2, "forget": 0.2, "make_rule": 0.2, "set_quota": 0.2}
# Probability that the indexer misses a part of a life, and that only the newest batches are kept for a replay.
MISSED, FEW_KEPT = 0.3, 0.5
PATIENCE_SECONDS = 10.0
MODEL = "model"


class Prompt(NamedTuple):
    tokens: list[int]
    salt: str | None
    adapter: int | None


class Found(NamedTuple):
    """Leading tokens of a prompt that are found on the device, on device and host, and on all tiers."""

    device: int = 0
    host: int = 0
    disk: int = 0


def tokens_of(random: Random) -> list[int]:
    """Makes a prompt from one of a few shared beginnings and a few more tokens."""
    base = Random(random.randrange(BEGINNINGS)).choices(range(1000), k=LONGEST)
    return base[: random.randint(1, LONGEST - BLOCK)] + random.choices(range(3), k=random.randrange(BLOCK))


class Life(RandomLife):
    """A cache that serves longer prompts."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, moves=0.2, movable=0, **SIZES)
        self._weights |= WEIGHTS

    def prompt(self) -> list[int]:
        return tokens_of(self.random)


class Cache:
    """One cache manager with its executor and its published events."""

    def __init__(self, seed: int) -> None:
        self._life = Life(seed)
        self.events, self.replays = free_address(), free_address()
        # The indexer connects to this proxy instead of the publisher.
        self.proxy = SocketProxy(free_address(), self.events)
        self._publishing: Publishing | None = None
        self._manager: CacheManager | None = None

    async def start(self) -> None:
        """Starts to publish; starts again for a new manager."""
        manager = self._life.world.manager
        if manager is self._manager:
            return
        await self.stop()
        self._manager = manager
        settings = ZmqSettings(self.events, self.replays, token_ids=True)
        self._publishing = Publishing(manager.queries, settings, time.time_ns())

    async def stop(self) -> None:
        if self._publishing is not None:
            await self._publishing.stop()

    async def live(self) -> None:
        for _ in range(OPERATIONS):
            self._life.operate()
            await self.start()
            assert self._publishing is not None
            self._publishing.feed.notify()
            await asyncio.sleep(0)

    def expected(self, prompts: Sequence[Prompt]) -> list[Found]:
        """The tokens of each prompt that are cached."""
        media = {block_hash: known.medium for block_hash, known in truth(self._life.world.manager).items()}
        return [_runs([media.get(one) for one in _hashes(prompt)]) for prompt in prompts]


def _hashes(prompt: Prompt) -> list[int]:
    root = root_key(FINGERPRINT, prompt.salt, prompt.adapter)
    return list(prompt_low_keys(root, packed_bytes(pack(prompt.tokens)), BLOCK))


def _runs(media: list[str | None]) -> Found:
    """Each tier continues where the tier above ends."""
    found, at = [], 0
    for medium in ("GPU", "CPU", "STORAGE"):
        while at < len(media) and media[at] == medium:
            at += 1
        found.append(at * BLOCK)
    return Found(*found)


class Indexer(RouterProcess):
    """The indexer's process, and questions to the indexer. It listens on all addresses of this machine."""

    def __init__(self, python: Path, log: Path) -> None:
        address = free_address()
        port = address.partition(":")[2]
        super().__init__([str(python), "-m", "dynamo.indexer", "--port", port, "--threads", "1"], address, log)

    def find(self, prompts: Sequence[Prompt]) -> list[list[Found]]:
        """The tokens that each cache has of each prompt."""
        return [self._find(prompt) for prompt in prompts]

    def _find(self, prompt: Prompt) -> list[Found]:
        body: dict[str, object] = {"token_ids": prompt.tokens, "model_name": MODEL}
        if prompt.salt is not None:
            body["cache_salt"] = sha256(prompt.salt.encode()).hexdigest()[:16]
        if prompt.adapter is not None:
            body["lora_name"] = str(prompt.adapter)
        caches = self.post("/query", **body)["instances"]
        answers = [caches.get(str(number), {}) for number in range(CACHES)]
        return [Found(*(answer.get(tier, 0) for tier in ("gpu", "cpu", "disk"))) for answer in answers]


class Figures:
    """Counts of the answers so far."""

    def __init__(self) -> None:
        self.prompts = 0
        # How often answers were not yet right.
        self.late = 0
        self.wrong: list[tuple[Prompt, int, Found, Found]] = []
        # By tier: the number of answers in which the tier had tokens, and the number of these tokens.
        self.hits: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()

    def add(self, found: Sequence[Found]) -> None:
        self.prompts += 1
        for one in found:
            above = 0
            for tier, tokens in one._asdict().items():
                self.hits[tier] += tokens > above
                self.tokens[tier] += tokens - above
                above = tokens
            self.hits["nothing"] += not above


async def compare(indexer: Indexer, caches: Sequence[Cache], prompts: Sequence[Prompt], figures: Figures) -> None:
    """Asks for prompts until the answers are right or the time is up."""
    columns = [cache.expected(prompts) for cache in caches]
    expected = [list(row) for row in zip(*columns, strict=True)]
    for row in expected:
        figures.add(row)
    end = time.monotonic() + PATIENCE_SECONDS
    # Asks for a few prompts first, until the indexer knows the latest events.
    left, is_asked = list(range(min(PROBES, len(prompts)))), False
    while True:
        answers = await asyncio.to_thread(indexer.find, [prompts[at] for at in left])
        answered = list(zip(left, answers, strict=True))
        left = [at for at, answer in answered if answer != expected[at]]
        if time.monotonic() > end or (is_asked and not left):
            break
        if left:
            figures.late += is_asked
            await asyncio.sleep(0.1)
        else:
            left, is_asked = list(range(len(prompts))), True
    for at, answer in answered:
        # The last answers include right answers, too.
        for number, (right, given) in enumerate(zip(expected[at], answer, strict=True)):
            if right != given:
                figures.wrong.append((prompts[at], number, right, given))


async def run(indexer: Indexer, count: int, seed: int) -> tuple[Figures, dict[str, float]]:
    """Asks for `count` prompts; returns figures, and how often batches were missed and replayed."""
    random, figures = Random(seed), Figures()
    caches = [Cache(seed + number) for number in range(CACHES)]
    before = list(_replays())
    missed = 0
    try:
        for number, cache in enumerate(caches):
            await cache.proxy.start()
            await cache.start()
            addresses = {
                "endpoint": f"tcp://{cache.proxy.address}",
                "replay_endpoint": f"tcp://{cache.replays}",
                "instance_id": number,
            }
            await asyncio.to_thread(indexer.post, "/register", model_name=MODEL, block_size=BLOCK, **addresses)
        while figures.prompts < count:
            vllm_event_publisher.KEPT_BYTES = 2000 if random.random() < FEW_KEPT else 16 << 20
            for cache in caches:
                misses = random.random() < MISSED
                missed += misses
                if misses:
                    cache.proxy.cut()
                await cache.live()
                cache.proxy.mend()
            prompts = [
                Prompt(tokens_of(random), random.choice(SALTS), random.choice([None] * 8 + [0]))
                for _ in range(min(PROMPTS, count - figures.prompts))
            ]
            await compare(indexer, caches, prompts, figures)
            print(f"\r{figures.prompts} prompts, {len(figures.wrong)} wrong answers", end="", file=sys.stderr)
    finally:
        for cache in caches:
            await cache.stop()
            await cache.proxy.stop()
    kept, everything = (after - first for after, first in zip(_replays(), before, strict=True))
    return figures, {"missed": missed, "replays_of_kept_batches": kept, "replays_of_everything": everything}


def _replays() -> Iterator[float]:
    for source in ("kept", "everything"):
        yield vllm_event_publisher.REPLAYS.labels(source)._value.get()


def main() -> int:
    """Runs the comparison and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--folder", type=Path, default=default_folder(), help="folder of the environments of `make peers`"
    )
    parser.add_argument("--json", type=Path, help="file of the result")
    given = parser.parse_args()
    if reason := DYNAMO.missing(given.folder):
        print(f"dynamo: {reason}", file=sys.stderr)
        return 2
    # Drops the line in which each of very many publishers logs its address.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    indexer = Indexer(DYNAMO.python(given.folder), given.folder / "cache/dynamo.log")
    begun = time.monotonic()
    try:
        indexer.wait()
        figures, replays = asyncio.run(run(indexer, given.prompts, given.seed))
    except RuntimeError as error:
        print(f"dynamo: {error}", file=sys.stderr)
        return 1
    finally:
        indexer.close()
    seconds = time.monotonic() - begun
    rows = [[tier, f"{count}", f"{figures.tokens[tier]}"] for tier, count in sorted(figures.hits.items())]
    print(f"\n\n{figures.prompts} prompts, for each of {CACHES} caches:\n")
    print(table(["found in", "answers", "tokens"], rows))
    print(f"\nwrong answers: {len(figures.wrong)}; times that some were not right yet: {figures.late}")
    print(", ".join(f"{name.replace('_', ' ')}: {value:.0f}" for name, value in replays.items()))
    for prompt, number, right, wrong in figures.wrong[:10]:
        print(f"cache {number}, {len(prompt.tokens)} tokens, salt {prompt.salt}: {right} is there, {wrong} is said")
    kept = {
        "prompts": figures.prompts,
        "wrong": len(figures.wrong),
        "late": figures.late,
        "answers": dict(figures.hits),
        "tokens": dict(figures.tokens),
        **replays,
        "seconds": seconds,
    }
    settings = {"seed": given.seed, "caches": CACHES, "dynamo": DYNAMO.requirements, **SIZES}
    print(f"figures: {Result('dynamo', kept, settings).write(given.json)}")
    return 1 if figures.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
