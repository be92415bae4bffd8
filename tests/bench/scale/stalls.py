"""How long single calls keep the cache manager's event loop from everybody else."""

import asyncio
import contextlib
import time
from array import array
from collections.abc import Awaitable, Callable, Iterable, Iterator

from cachemgr import paging
from cachemgr.admin_api import BlockFilter, ForgetTarget, Prefix, Quota
from cachemgr.api import Admission, AdmitRequest, ExecutorSpec, ManagerConfig, PoolSpec, SyncRequest
from cachemgr.manager import CacheManager
from cachemgr.slices import sliced, steady
from tests.bench.scale.row import Row

BLOCK = 16
LONG_PROMPT_TOKENS = 131_072
# Blocks of a prompt, and salts that all prompts are divided among.
CHAIN, SALTS = 50, 100


class Cache:
    """A manager with one executor and one scheduler, and prompts that run one after the other."""

    def __init__(self, blocks: int, host_blocks: int = 0) -> None:
        config = ManagerConfig(capacity_ahead_tokens=0, free_watermark=0.0)
        self.manager = CacheManager(1, lambda: 0.0, config)
        pools = [PoolSpec(0, blocks, host_blocks=host_blocks)]
        self.manager.register_executor(ExecutorSpec("e", 1, "m", b"f" * 32, BLOCK, pools))
        self.manager.register_scheduler("s", 1)
        self._syncs = 0

    def run(self, first: int, tokens: int, **options: object) -> tuple[Admission, float]:
        """Computes and releases a prompt of consecutive ids; its admission, and that one's process time."""
        request = AdmitRequest(f"q{self._syncs}", "s", 1, "e", array("I", range(first, first + tokens)), **options)
        begun = time.process_time()
        admission = self.manager.admit(request)
        seconds = time.process_time() - begun
        assert admission.admitted
        self.manager.confirm_transfers("e", 1, [copy.ticket for copy in admission.transfers], [])
        self._syncs += 1
        handles = [admission.sequence_handle]
        done = SyncRequest("s", 1, 1, self._syncs, self._syncs, handles, [tokens], [0], [], released_handles=handles)
        self.manager.sync(done)
        return admission, seconds


def rows(blocks: int) -> Iterator[Row]:
    """The rows of this module."""
    yield from long_prompts()
    cache = Cache(blocks)
    for first in range(blocks // CHAIN):
        cache.run(first * CHAIN * BLOCK, CHAIN * BLOCK, salt=f"s{first % SALTS}", session_id=f"t{first % SALTS}")
    manager = cache.manager
    missing = BlockFilter(pool_id="e/0", salt="missing")
    prompt = Prefix(tuple(range(1 << 30, (1 << 30) + LONG_PROMPT_TOKENS)))

    def listing(items: Iterable[object]) -> Callable[[], Awaitable[object]]:
        return lambda: paging.cut_in_slices(items, 1000, "x", lambda _: 0)

    def at_once(call: Callable[[], object]) -> Callable[[], Awaitable[object]]:
        async def run() -> object:
            return call()

        return run

    calls: dict[str, Callable[[], Awaitable[object]]] = {
        "CheckPool": lambda: steady(manager.check_pool_in_steps, manager.fingerprint),
        "DumpState": lambda: _dump(manager),
        "WatchEvents, snapshot": lambda: _snapshot(manager),
        "records for a resynchronisation with Redis": lambda: _resync(manager),
        "ListBlocks, filter without a match": listing(manager.filtered_blocks(missing)),
        "ListPrefixes, filter without a match": listing(manager.prefixes(missing)),
        "ListLeases, holder without a lease": listing(manager.search_leases("e/0", "none")),
        "ExplainPrefix, 128k tokens": at_once(lambda: manager.explain(prompt, 0)),
        "expire and pools, twice a second": at_once(lambda: (manager.expire(), manager.pools())),
        "RenewExecutor": at_once(lambda: manager.renew_executor("e", 1, 1)),
        f"ForgetBlocks of a salt, 1 of {SALTS}, validate only": at_once(
            lambda: manager.forget(ForgetTarget(salt="s1"), validate_only=True)
        ),
        f"ForgetBlocks of a session, 1 of {SALTS}, validate only": at_once(
            lambda: manager.forget(ForgetTarget(session_id="t1"), validate_only=True)
        ),
        f"PurgeBlocks of a salt, 1 of {SALTS}, validate only": at_once(
            lambda: manager.purge(BlockFilter(salt="s1"), validate_only=True, skip_used=True)
        ),
        f"ForgetBlocks of a salt, 1 of {SALTS}": at_once(
            lambda: manager.forget(ForgetTarget(salt="s2"), validate_only=False)
        ),
        "SetQuota": at_once(lambda: manager.set_quota(Quota(tenant_id="t", device_ceiling=10), validate_only=False)),
    }
    yield Row("blocks that are cached", manager.pools()[0].cached_blocks, "blocks")
    for name, call in calls.items():
        stall, seconds = asyncio.run(_longest_stall(call))
        yield Row(f"{name}: longest stall", stall * 1e3, "ms", 50)
        yield Row(f"{name}: in all", seconds * 1e3, "ms")


async def _snapshot(manager: CacheManager) -> None:
    with contextlib.closing(manager.views_in_slices()) as reader:
        async for _ in sliced(reader.steps()):
            reader.catch_up()
        async for _ in sliced(reader.events()):
            pass


async def _dump(manager: CacheManager) -> None:
    def lines() -> Iterator[str]:
        for part in list(manager.state_outline()):
            yield from (part,) if isinstance(part, str) else part

    found = await steady(lines, manager.fingerprint)
    while found:
        del found[-1000:]
        await asyncio.sleep(0)


async def _resync(manager: CacheManager) -> None:
    async for _ in sliced(manager.records("e")):
        pass


async def _longest_stall(call: Callable[[], Awaitable[object]]) -> tuple[float, float]:
    """The longest process time between two turns of the event loop while a call runs, and that of the whole call."""
    longest, ended, begun = 0.0, asyncio.Event(), time.process_time()

    async def watch() -> None:
        nonlocal longest
        while not ended.is_set():
            before = time.process_time()
            await asyncio.sleep(0)
            longest = max(longest, time.process_time() - before)

    watching = asyncio.create_task(watch())
    await asyncio.sleep(0)
    await call()
    ended.set()
    await watching
    return longest, time.process_time() - begun


def long_prompts() -> Iterator[Row]:
    """Admissions of a prompt that takes the whole device, without and with a full host tier."""
    count = LONG_PROMPT_TOKENS // BLOCK
    for host in (0, count):
        cache = Cache(count + 1, host)
        for first in (0, 1_000_000):
            cache.run(first, LONG_PROMPT_TOKENS)
        fresh, seconds = cache.run(2_000_000, LONG_PROMPT_TOKENS)
        beside = "beside a full host tier" if host else "without a host tier"
        yield Row(f"admit {LONG_PROMPT_TOKENS:,} new tokens {beside}", seconds * 1e3, "ms", 100)
        if host:
            yield Row("blocks that it offloads", len(fresh.transfers), "blocks")
            _, seconds = cache.run(1_000_000, LONG_PROMPT_TOKENS)
            yield Row(f"admit {LONG_PROMPT_TOKENS:,} tokens from the host tier", seconds * 1e3, "ms")
