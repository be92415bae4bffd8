"""What cache managers have written into Redis, for engines whose cache the view does not know yet. Advisory."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping
from time import monotonic
from typing import Any

import structlog

from protos.kvcommon.block_keys import extend_chain
from protos.kvcommon.key_index import Entry, FormatError, IndexedExecutor, block_name, executor_name
from protos.kvcommon.tokens import TOKEN_BYTES, packed_bytes
from protos.rpc.redis_client import UNAVAILABLE, open_redis, reason
from scheduler.router.expected_seconds import Match
from scheduler.router.key_space import KeySpace

# How long a decision waits at most, in seconds.
LOOKUP_SECONDS = 0.02
# How often executors are read while the view lacks some of them, and how long Redis may take to answer.
READ_SECONDS, ANSWER_SECONDS = 0.1, 0.5
# Blocks of a prompt that are looked up at a time: half a millisecond of work.
BLOCKS_AT_A_TIME = 64

log = structlog.get_logger()


class KeyIndex:
    """Answers only while it knows executors.

    If Redis fails or is late, no prompt is looked up until `run` has read the executors again.
    """

    def __init__(self, url: str) -> None:
        self._redis = open_redis(url)
        # The executors that were asked for and are in Redis.
        self.executors: dict[str, IndexedExecutor] = {}
        # Exchanges with Redis that have not ended, even if their caller no longer waits. Only `close` cancels them: a
        # cancellation leaves the connection in an unknown state.
        self._exchanges: set[asyncio.Task[Any]] = set()
        self._said = ""

    async def run(self, wanted: Callable[[], Iterable[str]]) -> None:
        """Reads the executors with these ids every READ_SECONDS, until cancelled."""
        while True:
            ids = list(wanted())
            try:
                found = await self._bounded(self._read(ids), ANSWER_SECONDS) if ids else {}
            except UNAVAILABLE as error:
                found = {}
                self._say(reason(error) or type(error).__name__)
            else:
                self._say("")
            self.executors = found
            await asyncio.sleep(READ_SECONDS)

    async def close(self) -> None:
        for task in self._exchanges:
            task.cancel()
        await self._redis.aclose()

    def find(self, executor_id: str) -> KeySpace | None:
        """Returns the key space of an executor, None if it is not in Redis."""
        executor = self.executors.get(executor_id)
        if executor is None:
            return None
        return KeySpace(executor.model_fingerprint, executor.block_size, executor.weight_version)

    async def match(
        self, executor_ids: Iterable[str], token_ids: array[int], salt: str | None, adapter_id: int | None = None
    ) -> dict[str, Match]:
        """Returns the leading blocks of a prompt that each executor has, as far as Redis answers in time."""
        by_space: dict[KeySpace, dict[str, IndexedExecutor]] = {}
        for executor_id in executor_ids:
            if (space := self.find(executor_id)) is not None:
                by_space.setdefault(space, {})[executor_id] = self.executors[executor_id]
        found: dict[str, Match] = {}
        deadline = monotonic() + LOOKUP_SECONDS

        async def look_up() -> None:
            for space, executors in by_space.items():
                root, packed = space.root(salt, adapter_id), packed_bytes(token_ids)
                async for matches in self._matches(executors, root, packed, space.block_size):
                    found.update(matches)
                    if monotonic() >= deadline:
                        return

        try:
            await self._bounded(look_up(), LOOKUP_SECONDS)
        except UNAVAILABLE as error:
            if not found:
                # Nobody waits for Redis again until the executors have been read.
                self.executors = {}
                self._say(reason(error) or type(error).__name__)
        return dict(found)

    async def _bounded(self, work: Any, seconds: float) -> Any:
        """Returns the result of an exchange with Redis. Raises TimeoutError, after which the exchange goes on."""
        task = asyncio.ensure_future(work)
        self._exchanges.add(task)
        task.add_done_callback(self._ended)
        await asyncio.wait({task}, timeout=seconds)
        if not task.done():
            raise TimeoutError(f"no answer within {seconds:g} seconds")
        return task.result()

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._exchanges.discard(task)
        if not task.cancelled():
            # The exchange may have failed after the timeout.
            task.exception()

    async def _read(self, executor_ids: Collection[str]) -> dict[str, IndexedExecutor]:
        async with self._redis.pipeline(transaction=False) as pipeline:
            for executor_id in executor_ids:
                pipeline.get(executor_name(executor_id))
            values = await pipeline.execute()
        found = {}
        for executor_id, value in zip(executor_ids, values, strict=True):
            if value is not None:
                try:
                    found[executor_id] = IndexedExecutor.decode(value)
                except FormatError:
                    # Written by another version.
                    continue
        return found

    async def _matches(
        self, executors: Mapping[str, IndexedExecutor], root: bytes, packed: bytes, block_size: int
    ) -> AsyncIterator[dict[str, Match]]:
        """Yields the matches known after each answer, up to the first block that no executor has."""
        counts: dict[str, list[int]] = {}
        going = list(executors)
        width = BLOCKS_AT_A_TIME * block_size * TOKEN_BYTES
        first = b""
        for start in range(0, len(packed), width):
            keys: list[bytes] = []
            extend_chain(keys, root, packed[start : start + width], block_size)
            if not keys:
                break
            first, root = first or keys[0], keys[-1]
            async with self._redis.pipeline(transaction=False) as pipeline:
                for key in keys:
                    pipeline.hmget(block_name(first, key), going)
                answers = await pipeline.execute()
            asked = going
            for values in answers:
                tiers = {
                    executor_id: tier
                    for executor_id, value in zip(asked, values, strict=True)
                    if (tier := _tier(executors[executor_id], value)) is not None and executor_id in going
                }
                for executor_id, tier in tiers.items():
                    counts.setdefault(executor_id, [0, 0, 0])[tier] += 1
                going = list(tiers)
            yield {executor_id: Match(*count) for executor_id, count in counts.items()}
            if not going:
                break

    def _say(self, cause: str) -> None:
        if cause != self._said:
            if cause:
                log.warning("the index by key cannot be read", cause=cause)
            else:
                log.info("the index by key can be read again")
            self._said = cause


def _tier(executor: IndexedExecutor, value: bytes | None) -> int | None:
    """Returns the tier of a block, 0 for the device; None if the executor lacks the block or the entry is outdated."""
    if value is None:
        return None
    try:
        entry = Entry.decode(value)
    except FormatError:
        return None
    return entry.tier if executor.counts(entry.position) and entry.tier < len(Match._fields) else None
