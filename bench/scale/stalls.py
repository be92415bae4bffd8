"""How long single calls block the cache manager's event loop."""

import asyncio
import contextlib
import time
from array import array
from collections.abc import Awaitable, Callable, Iterable, Iterator
from functools import partial
from typing import Any

from google.protobuf.field_mask_pb2 import FieldMask
from google.protobuf.message import Message

from bench.scale.row import Row
from cachemgr.manager import CacheManager
from cachemgr.rpc import convert, paging
from cachemgr.rpc.admin_service import CacheAdminService
from cachemgr.rpc.event_feed import EventFeed
from cachemgr.rpc.mutations import ManagerClock, Mutations, ServiceContext
from cachemgr.sequences.registration import MAX_SLOTS
from cachemgr.sequences.release import MOST_CARRIED_OVER
from cachemgr.slices import sliced, steady
from cachemgr.types import (
    Admission,
    AdmitRequest,
    BlockFilter,
    ExecutorSpec,
    ManagerConfig,
    PoolSpec,
    Prefix,
    Quota,
    Retention,
    RetentionRange,
    SyncRequest,
)
from protos.kvcache.v1 import kvcache_pb2 as pb

BLOCK = 16
LONG_PROMPT_TOKENS = 131_072
# Blocks of a prompt, and salts that all prompts are divided among.
CHAIN, SALTS = 50, 100


class Cache:
    """A manager with one executor and one scheduler, and prompts that run one after the other."""

    def __init__(self, blocks: int, host_blocks: int = 0) -> None:
        config = ManagerConfig(capacity_ahead_tokens=0, free_watermark=0.0)
        self.now = 0.0
        self.clock = ManagerClock(lambda: self.now)
        self.manager = CacheManager(1, self.clock, config)
        context = ServiceContext(Mutations(self.manager, self.clock), EventFeed(self.manager.queries))
        self.admin: Any = CacheAdminService(context)
        pools = [PoolSpec(0, blocks, host_blocks=host_blocks)]
        self.manager.register_executor(ExecutorSpec("e", 1, "m", b"f" * 32, BLOCK, pools))
        self.manager.register_scheduler("s", 1)
        self._syncs = 0

    def run(self, first: int, tokens: int, **options: object) -> tuple[Admission, float]:
        """Computes and releases a prompt of consecutive ids; returns its admission and the admission's process time."""
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

    def long(method: str, request: Message) -> Callable[[], Awaitable[object]]:
        return lambda: getattr(cache.admin, method)(request, None)

    quota = pb.Quota(salt="s4", device_floor_blocks=10)
    rule = pb.RetentionRule(name="r", action=pb.RuleAction(retention_priority=40))
    tokens = range(CHAIN * BLOCK)
    of_prefix = pb.RetentionRule(name="p", match=pb.RuleMatch(prefix_token_ids=tokens), action=rule.action)
    calls: dict[str, Callable[[], Awaitable[object]]] = {
        "CheckPool": lambda: _check(manager),
        "DumpState": lambda: _dump(manager),
        "WatchEvents, snapshot": lambda: _snapshot(manager),
        "records for a resynchronisation with Redis": lambda: _resync(manager),
        "ListBlocks, filter without a match": listing(manager.queries.filtered_blocks(missing)),
        "ListPrefixes, filter without a match": listing(manager.queries.prefixes(missing)),
        "ListLeases, holder without a lease": listing(manager.queries.leases("e/0", "none")),
        "ExplainPrefix, 128k tokens": at_once(lambda: manager.queries.explain(prompt, 0)),
        "expire and pools, twice a second": at_once(lambda: (manager.expire(), manager.queries.pools())),
        "RenewExecutor": at_once(lambda: manager.renew_executor("e", 1, 1)),
        f"ForgetBlocks of a salt, 1 of {SALTS}, validate only": long(
            "ForgetBlocks", pb.ForgetBlocksRequest(salt="s1", validate_only=True)
        ),
        f"ForgetBlocks of a session, 1 of {SALTS}, validate only": long(
            "ForgetBlocks", pb.ForgetBlocksRequest(session_id="t1", validate_only=True)
        ),
        f"PurgeBlocks of a salt, 1 of {SALTS}, validate only": long(
            "PurgeBlocks", pb.PurgeBlocksRequest(filter=pb.BlockFilter(salt="s1"), validate_only=True, skip_used=True)
        ),
        f"ForgetBlocks of a salt, 1 of {SALTS}": long("ForgetBlocks", pb.ForgetBlocksRequest(salt="s2")),
        f"ForgetBlocks of a session, 1 of {SALTS}": long("ForgetBlocks", pb.ForgetBlocksRequest(session_id="t3")),
        f"SetQuota of a new account with 1 of {SALTS} blocks": long("SetQuota", pb.SetQuotaRequest(quota=quota)),
        "SetQuota of a known account": long("SetQuota", pb.SetQuotaRequest(quota=quota)),
        f"DeleteQuota of an account with 1 of {SALTS} blocks": long("DeleteQuota", pb.DeleteQuotaRequest(salt="s4")),
        "CreateRetentionRule for all": long("CreateRetentionRule", pb.CreateRetentionRuleRequest(rule=rule)),
        "CreateRetentionRule for a prefix": long("CreateRetentionRule", pb.CreateRetentionRuleRequest(rule=of_prefix)),
        "UpdateRetentionRule": long(
            "UpdateRetentionRule", pb.UpdateRetentionRuleRequest(rule=rule, update_mask=FieldMask(paths=["action"]))
        ),
        "DeleteRetentionRule": long("DeleteRetentionRule", pb.DeleteRetentionRuleRequest(name="r")),
        "PurgeBlocks of all": long("PurgeBlocks", pb.PurgeBlocksRequest(skip_used=True)),
    }
    yield Row("blocks that are cached", manager.queries.pools()[0].cached_blocks, "blocks")
    for name, call in calls.items():
        stall, seconds = asyncio.run(_longest_stall(call))
        yield Row(f"{name}: longest stall", stall * 1e3, "ms", 50)
        yield Row(f"{name}: in all", seconds * 1e3, "ms")
    yield from losses(blocks)
    yield from ends_of_leases(blocks)
    yield from sizes(blocks)
    yield from schedulers(blocks)
    yield from stored_quotas(blocks)
    yield from restarts(blocks)
    yield from registrations(blocks)


def losses(blocks: int) -> Iterator[Row]:
    """The executor is lost; its blocks are freed by the calls of `expire` that follow."""
    cache = Cache(blocks)
    for first in range(blocks // CHAIN):
        cache.run(first * CHAIN * BLOCK, CHAIN * BLOCK)
    cache.now = 1000.0
    cache.clock.advance()
    yield Row(f"loss of an executor with {blocks:,} blocks", _timed(cache.manager.expire), "ms", 50)
    freeing = []
    while cache.manager.lost_blocks:
        freeing.append(_timed(cache.manager.expire))
    yield Row("expire, which frees lost blocks: longest", max(freeing), "ms", 50)
    yield Row("expire, which frees lost blocks: in all", sum(freeing), "ms")


def ends_of_leases(blocks: int) -> Iterator[Row]:
    """Every block has a lease, and all leases end at the same moment."""
    cache = Cache(blocks)
    for first in range(blocks // CHAIN):
        retention = Retention((RetentionRange(0, None, 80, 5.0),))
        cache.run(first * CHAIN * BLOCK, CHAIN * BLOCK, session_id=f"t{first}", retention=retention)
    cache.now = 6.0
    cache.clock.advance()
    ending = [_timed(cache.manager.expire)]
    while cache.manager.is_behind:
        ending.append(_timed(cache.manager.expire))
    yield Row(f"expire, that ends {blocks:,} leases: longest", max(ending), "ms", 50)
    yield Row(f"expire, that ends {blocks:,} leases: in all", sum(ending), "ms")


def sizes(blocks: int) -> Iterator[Row]:
    """A pool whose blocks are all cached gives up all but one slot, and gets them again."""
    cache = Cache(blocks)
    for first in range(blocks // CHAIN):
        cache.run(first * CHAIN * BLOCK, CHAIN * BLOCK)
    for total in (1, blocks):
        request = pb.UpdatePoolRequest(
            pool=pb.Pool(pool_id="e/0", total_blocks=total), update_mask=FieldMask(paths=["total_blocks"])
        )
        call = partial(cache.admin.UpdatePool, request)
        stall, seconds = asyncio.run(_longest_stall(call))
        yield Row(f"UpdatePool of {blocks:,} slots to {total:,}: longest stall", stall * 1e3, "ms", 50)
        yield Row(f"UpdatePool of {blocks:,} slots to {total:,}: in all", seconds * 1e3, "ms")


def schedulers(blocks: int) -> Iterator[Row]:
    """A scheduler that had all blocks starts again."""
    cache = Cache(blocks)
    for first in range(0, blocks // CHAIN * CHAIN * BLOCK, CHAIN * BLOCK):
        tokens = array("I", range(first, first + CHAIN * BLOCK))
        assert cache.manager.admit(AdmitRequest(f"q{first}", "s", 1, "e", tokens)).admitted
    yield from _and_behind(cache, "RegisterScheduler again", lambda: cache.manager.register_scheduler("s", 2))


def stored_quotas(blocks: int) -> Iterator[Row]:
    """Quotas are restored from the store when blocks of their salts are there already."""
    cache = Cache(blocks)
    for first in range(blocks // CHAIN):
        cache.run(first * CHAIN * BLOCK, CHAIN * BLOCK, salt=f"s{first % 10}")
    quotas = [Quota(salt=f"s{number}", device_floor=10) for number in range(10)]
    call = partial(cache.manager.operators.restore, [], quotas, [])
    yield from _and_behind(cache, "RestoreOperators of 10 quotas", call)


def _and_behind(cache: Cache, name: str, call: Callable[[], object]) -> Iterator[Row]:
    """Measures a call, and later calls of `expire` that continue its work."""
    took = [_timed(call)]
    while cache.manager.is_behind:
        took.append(_timed(cache.manager.expire))
    yield Row(f"{name}, and expire behind it: longest", max(took), "ms", 50)
    yield Row(f"{name}, and expire behind it: in all", sum(took), "ms")


def restarts(blocks: int) -> Iterator[Row]:
    """An executor starts again; half of its blocks were on the device, the other half is still in the host tier."""
    for size in (MOST_CARRIED_OVER, blocks):
        half = size // 2
        cache = Cache(half - 2, half)
        for first in range(size // CHAIN):
            cache.run(first * CHAIN * BLOCK, CHAIN * BLOCK)
        manager = cache.manager
        host = manager._state.pool("e/0").tiers[1]
        pools, told = [PoolSpec(0, half - 2, host_blocks=half)], [list(host.generations)[1:]]
        again = ExecutorSpec("e", 2, "m", b"f" * 32, BLOCK, pools, host_generations=told)
        is_large = manager.is_too_large_to_carry_over(again)
        if is_large:
            yield Row(f"the end of an epoch with {size:,} blocks", _timed(partial(manager.end_epoch, "e", 1)), "ms", 50)
        call = partial(manager.register_executor, again, later=is_large)
        yield Row(f"RegisterExecutor again, with {size:,} blocks of before", _timed(call), "ms", 50)
        while manager.lost_blocks:
            manager.expire()


def registrations(blocks: int) -> Iterator[Row]:
    """An executor registers with very many slots, and reports the contents of each."""
    for slots in (blocks, MAX_SLOTS):
        manager = CacheManager(1, lambda: 0.0)
        manager.register_scheduler("s", 1)
        target = 50 if slots == blocks else None
        fresh = ExecutorSpec("e", 1, "m", b"f" * 32, BLOCK, [PoolSpec(0, slots)])
        yield Row(f"RegisterExecutor, {slots:,} slots", _timed(lambda: manager.register_executor(fresh)), "ms", target)  # noqa: B023
        half = slots // 2
        told = pb.RegisterExecutorRequest(
            executor_id="f", executor_epoch=1, model="m", model_fingerprint=b"f" * 32, block_size=BLOCK
        )
        pool = told.pools.add(group=0, num_blocks=half, host_blocks=half)
        pool.last_write_steps.extend([1] * half)
        pool.host_generations.extend([1] * half)
        data = told.SerializeToString()
        yield Row(
            f"RegisterExecutor, {slots:,} slots with reported contents",
            _timed(lambda: manager.register_executor(_read(data), later=True)),  # noqa: B023
            "ms",
            target,
        )
        yield Row("the end of its recovery", _timed(lambda: manager.end_recovery("f", 1)), "ms", target)  # noqa: B023


def _read(data: bytes) -> ExecutorSpec:
    return convert.executor_spec(pb.RegisterExecutorRequest.FromString(data))


def _timed(call: Callable[[], object]) -> float:
    begun = time.process_time()
    call()
    return (time.process_time() - begun) * 1e3


async def _snapshot(manager: CacheManager) -> None:
    with contextlib.closing(manager.queries.snapshot()) as reader:
        async for _ in sliced(reader.slots()):
            reader.catch_up()
        async for _ in sliced(reader.events()):
            pass


async def _check(manager: CacheManager) -> object:
    return [await steady(part, manager.queries.fingerprint) for part in manager.queries.check_pool_in_parts()]


async def _dump(manager: CacheManager) -> None:
    def lines() -> Iterator[str]:
        for part in list(manager.queries.state_outline()):
            yield from (part,) if isinstance(part, str) else part

    found = await steady(lines, manager.queries.fingerprint)
    while found:
        del found[-1000:]
        await asyncio.sleep(0)


async def _resync(manager: CacheManager) -> None:
    async for _ in sliced(manager.queries.records("e")):
        pass


async def _longest_stall(call: Callable[[], Awaitable[object]]) -> tuple[float, float]:
    """The longest process time between two turns of the event loop during a call, and the process time of the call."""
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
