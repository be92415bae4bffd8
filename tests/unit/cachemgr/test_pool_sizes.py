"""Pools that share memory: their first sizes, and changes of them while sequences run."""

from dataclasses import replace

import pytest

from cachemgr.errors import PoolInUseError, SequenceTooLongError
from cachemgr.manager import CacheManager
from cachemgr.operators.operator_journal import Kind
from cachemgr.operators.state_dump import state_hash
from cachemgr.slices import Slices, at_once
from cachemgr.types import EventKind, ForgetTarget, LeftBlocks, Prefix, Quota, RemovalCause, Resized, TierKind
from protos.errors import InvalidField
from tests.support.in_process_manager import CONFIG, World, retain
from tests.support.random_operations import small_steps
from tests.support.scrape import scraped


def shared(share_blocks: tuple[int, int] = (6, 6), memory_bytes: int = 900) -> World:
    """A full and a windowed group, the first with blocks of twice the size."""
    return World(12, windows=(None, 5), block_bytes=(100, 50), share_blocks=share_blocks, memory_bytes=memory_bytes)


def totals(world: World) -> list[int]:
    return [pool.total_blocks for pool in world.queries.pools()]


def update(world: World, pool_id: str, total: int, etag: str = "", *, validate_only: bool = False):
    return at_once(world.operators.update_pool(pool_id, total, etag, validate_only=validate_only)).pool


def overwrite(world: World) -> None:
    """The executor overwrites the requested slots."""
    world.renew()
    world.run_executor_copies()


def forget_shares(world: World) -> None:
    """A new manager starts, which knows nothing of blocks that operators moved."""
    world.manager = CacheManager(world.manager.epoch + 1, lambda: world.now, world.config, world.journal)
    world.start_scheduler()
    world.manager.register_executor(world.spec(), list(world.journal.blocks.values()))


def test_memory_moves_to_another_pool_once_the_executor_has_overwritten_it() -> None:
    world = shared()
    with pytest.raises(InvalidField):
        update(world, "e/1", 8)
    assert update(world, "e/0", 4).total_blocks == 4
    with pytest.raises(PoolInUseError) as refused:
        update(world, "e/1", 10)
    assert refused.value.fields == {"pool.total_blocks": "must be at most 6 until the executor has freed 2 blocks"}
    overwrite(world)
    assert update(world, "e/1", 10).total_blocks == 10
    with pytest.raises(InvalidField) as wrong:
        update(world, "e/1", 11)
    assert list(wrong.value.fields) == ["pool.total_blocks"]
    assert "at most 10" in str(wrong.value.fields)
    assert totals(world) == [4, 10]
    world.check()
    assert world.run(list(range(15))).admitted


def test_a_pool_grows_only_by_overwritten_slots() -> None:
    world = shared()
    update(world, "e/0", 4)
    first = {transfer.target_slot for transfer in world.queries.executor_transfers("e")}
    assert len(first) == 2
    with pytest.raises(PoolInUseError):
        update(world, "e/0", 5)
    world.run_executor_copies(fail=True)
    # It is asked again.
    assert {transfer.target_slot for transfer in world.queries.executor_transfers("e")} == first
    overwrite(world)
    assert update(world, "e/0", 6).total_blocks == 6


def test_overwrites_of_withheld_slots_end_with_the_executors_epoch() -> None:
    world = shared()
    world.cache(list(range(19)))
    update(world, "e/0", 1)
    assert len(world.queries.executor_transfers("e")) == 5
    world.start_executor()
    assert world.queries.executor_transfers("e") == []
    assert totals(world) == [1, 6]


def test_a_restarted_manager_overwrites_slots_outside_the_shares() -> None:
    world = shared()
    update(world, "e/0", 2)
    overwrite(world)
    update(world, "e/1", 12)
    for prompt in range(6):
        world.cache([prompt] * 7)
    world.restart_manager()
    assert totals(world) == [2, 12]
    forget_shares(world)
    assert totals(world) == [6, 6]
    world.check()
    # Slots that were never written to hold nothing.
    written = {key for key in world.device.written if key[0] == 1}
    asked = {(transfer.group, transfer.target_slot) for transfer in world.queries.executor_transfers("e")}
    assert asked
    assert asked <= set(world.device.written)
    assert len(written) - len(asked) <= 6
    overwrite(world)
    assert world.queries.executor_transfers("e") == []


def test_shares_are_restored_in_any_order() -> None:
    world = shared()
    update(world, "e/0", 4)
    overwrite(world)
    update(world, "e/1", 10)
    shares = list(world.queries.entries(Kind.SHARE))
    for order in (shares, shares[::-1]):
        forget_shares(world)
        assert totals(world) == [6, 6]
        world.operators.restore([], [], order)
        assert totals(world) == [4, 10]
        world.check()


def test_restored_pins_fit_the_share_of_the_pool() -> None:
    config = replace(CONFIG, pin_budget=0.5)
    world = World(40, windows=(None, 5), block_bytes=(1, 1), share_blocks=(4, 4), memory_bytes=40, config=config)
    update(world, "e/0", 20)
    update(world, "e/1", 20)
    for prompt in range(3):
        world.cache([prompt] * 15)
        prefix = Prefix((prompt,) * 12, "e")
        world.operators.pin_prefix(prefix, "ops", 60.0, validate_only=False)
    pins = list(world.queries.entries(Kind.PIN, "e"))
    assert sum(group == 0 for pin in pins for group, _ in pin.blocks) > 4
    world.manager = CacheManager(2, lambda: world.now, world.config, world.journal)
    world.start_scheduler()
    world.manager.register_executor(world.spec(), list(world.journal.blocks.values()), pins)
    assert totals(world) == [4, 4]


def test_a_pool_shrinks_by_empty_blocks_before_cached_ones_in_eviction_order():
    world = World(8)
    world.cache([1, 2, 3, 4])
    world.cache([5, 6, 7, 8])
    before = world.queries.last_event
    update(world, "e/0", 2)
    assert world.queries.events_after(before) == []
    update(world, "e/0", 1)
    (lost,) = world.queries.events_after(before)
    assert (lost.kind, lost.cause) == (EventKind.REMOVED, RemovalCause.POOL_SHRUNK)
    world.check()
    assert [block.token_ids[0] for block in world.queries.records("e")] == [5]
    update(world, "e/0", 8)
    world.check()
    assert world.free == 8
    assert world.run(list(range(32))).admitted


TOKENS = list(range(32))


def shrink(world: World, total: int) -> None:
    """The copies that this asks for run, and the slots that they free are withheld."""
    update(world, "e/0", total)
    world.check()
    world.renew()
    world.run_executor_copies()
    world.run_in_slices()
    world.manager.expire()
    world.check()
    (pool,) = world.queries.pools()
    assert pool.total_blocks == total
    assert pool.used_blocks + pool.cached_blocks + pool.free_blocks <= total + pool.cached_blocks


def test_a_block_with_a_copy_below_lies_there_when_its_pool_shrinks():
    world = World(2, host_blocks=4)
    world.cache(TOKENS[:8])
    world.open_write_through_copies()
    shrink(world, 1)
    assert world.found([*TOKENS[:8], 99]) == 8
    assert world.tiers_of([*TOKENS[:8], 99]) == ["device", "host"]


def test_a_block_without_a_copy_is_offloaded_when_its_pool_shrinks():
    world = World(2, host_blocks=4, config=replace(CONFIG, write_through=False))
    world.cache(TOKENS[:8], retention=retain(80))
    seen = world.queries.last_event
    shrink(world, 1)
    assert world.found([*TOKENS[:8], 99]) == 8
    assert not [event for event in world.queries.events_after(seen) if event.kind is EventKind.REMOVED]


def test_blocks_below_a_block_that_must_go_stay_findable():
    """One device slot costs no more than itself, however many blocks of lower tiers follow it."""
    world = World(8, host_blocks=16)
    world.cache(TOKENS)
    world.open_write_through_copies()
    shrink(world, 2)
    assert world.found([*TOKENS, 99]) == len(TOKENS)
    shrink(world, 1)
    assert world.found([*TOKENS, 99]) == len(TOKENS)
    assert world.tiers_of([*TOKENS, 99]) == ["device", *["host"] * 7]


def test_a_block_that_may_not_be_offloaded_is_lost_when_its_pool_shrinks():
    config = replace(CONFIG, offload_min_priority=50, write_through=False)
    world = World(2, host_blocks=4, config=config)
    world.cache(TOKENS[:8])
    before = world.queries.last_event
    shrink(world, 1)
    (lost,) = [event for event in world.queries.events_after(before) if event.kind is EventKind.REMOVED]
    assert lost.cause is RemovalCause.POOL_SHRUNK
    assert world.found([*TOKENS[:8], 99]) == 4


def test_pins_beyond_the_budget_of_a_smaller_pool_become_leases_the_oldest_first():
    world = World(20, config=replace(CONFIG, pin_budget=0.5))
    for number in range(2):
        prompt = [number] * 20
        world.cache(prompt)
        world.operators.pin_prefix(Prefix(tuple(prompt), "e"), f"owner-{number}", 60.0, validate_only=False)
    old, young = (hold.name for hold in world.queries.holds())
    assert at_once(world.operators.update_pool("e/0", 12, "", validate_only=True)).degraded == (old,)
    assert len(list(world.queries.holds())) == 2
    assert at_once(world.operators.update_pool("e/0", 12, "", validate_only=False)).degraded == (old,)
    assert [hold.name for hold in world.queries.holds()] == [young]
    leases = {lease.holder for _, _, lease in filter(None, world.queries.leases("e/0", f"pin/{old}"))}
    assert leases == {f"pin/{old}"}
    world.check()
    # A restart changes nothing then.
    pins, shares = list(world.queries.entries(Kind.PIN, "e")), list(world.queries.entries(Kind.SHARE))
    world.manager = CacheManager(2, lambda: world.now, world.config, world.journal)
    world.operators.restore([], [], shares)
    world.start_scheduler()
    world.manager.register_executor(world.spec(), list(world.journal.blocks.values()), pins)
    assert [hold.name for hold in world.queries.holds()] == [young]


def leaving(world: World, total: int) -> LeftBlocks:
    """The blocks that a smaller pool loses, which its dry run has said."""
    said = at_once(world.operators.update_pool("e/0", total, "", validate_only=True))
    done = at_once(world.operators.update_pool("e/0", total, "", validate_only=False))
    assert said.left == done.left
    world.check()
    return done.left


def test_dropped_blocks_of_a_smaller_pool_are_told_and_count_as_evicted():
    world = World(8)
    world.cache(list(range(20)))
    assert leaving(world, 5) == LeftBlocks(0, {})
    assert leaving(world, 2) == LeftBlocks(0, {TierKind.DEVICE: 3})
    (pool,) = world.queries.pools()
    assert (pool.cached_blocks, pool.evicted_blocks) == (2, 3)
    assert scraped(world.manager, "pool_evicted_blocks_total", pool="e/0") == 3
    assert leaving(world, 8) == LeftBlocks(0, {})


def test_offloaded_blocks_of_a_smaller_pool_are_told():
    world = World(4, host_blocks=2, config=replace(CONFIG, write_through=False))
    world.cache(TOKENS[:16])
    assert leaving(world, 3) == LeftBlocks(1, {})
    world.renew()
    world.run_executor_copies()
    assert leaving(world, 2) == LeftBlocks(1, {})


def test_blocks_that_lower_tiers_have_no_room_for_are_told():
    world = World(4, host_blocks=1)
    world.cache(TOKENS[:16])
    world.open_write_through_copies()
    assert [tier.copy_blocks for tier in world.queries.pools()[0].lower_tiers] == [1]
    said = at_once(world.operators.update_pool("e/0", 1, "", validate_only=True)).left
    done = at_once(world.operators.update_pool("e/0", 1, "", validate_only=False)).left
    assert said == LeftBlocks(1, {TierKind.DEVICE: 2})
    # The block that was offloaded is of no use without its parent.
    assert done == LeftBlocks(1, {TierKind.DEVICE: 2, TierKind.HOST: 1})


def test_blocks_that_may_not_be_offloaded_are_told():
    world = World(4, host_blocks=4, config=replace(CONFIG, offload_min_priority=50, write_through=False))
    world.cache(TOKENS[:8])
    world.cache([*range(100, 108)], retention=retain(80))
    assert leaving(world, 1) == LeftBlocks(1, {TierKind.DEVICE: 2})


def test_a_pool_does_not_shrink_below_its_blocks_in_use():
    world = World(8)
    world.run(list(range(12)), "a")
    before = state_hash(world.queries.state())
    used = world.queries.pools()[0].used_blocks
    with pytest.raises(PoolInUseError) as refused:
        update(world, "e/0", used - 1)
    assert list(refused.value.fields) == ["pool.total_blocks"]
    assert state_hash(world.queries.state()) == before
    assert update(world, "e/0", used).free_blocks == 0


def test_a_shrinking_pool_keeps_blocks_below_a_floor():
    world = World(8)
    world.cache([1, 2, 3, 4], salt="a")
    at_once(world.operators.set_quota(Quota(salt="a", device_floor=1), validate_only=False))
    world.run([9] * 24, "b", no_store=True)
    used = world.queries.pools()[0].used_blocks
    with pytest.raises(PoolInUseError):
        update(world, "e/0", used)
    assert totals(world) == [8]
    update(world, "e/0", used + 1)
    assert world.cached_tokens([1, 2, 3, 4], salt="a") == 3


def begin_shrinking(world: World, total: int) -> Slices[Resized]:
    """Takes a step of the call, of one block."""
    call = world.operators.update_pool("e/0", total, "", validate_only=False)
    go_on(world, call)
    return call


def go_on(world: World, call: Slices[Resized]) -> None:
    with small_steps():
        next(call)
    world.check()


def test_a_shrinking_pool_allocates_no_more_than_its_new_size():
    world = World(8)
    world.cache(list(range(24)))
    call = begin_shrinking(world, 3)
    assert world.queries.pools()[0].cached_blocks == 6
    assert totals(world) == [3]
    assert world.free == 3
    with pytest.raises(SequenceTooLongError):
        world.admit([9] * 13)
    go_on(world, call)
    assert world.admit([9] * 12, "b", no_store=True).admitted
    assert world.free == 0
    world.compute(world.live["b"], 11)
    assert at_once(call).pool.total_blocks == 3
    world.check()
    assert world.queries.pools()[0].cached_blocks == 0
    world.finish("b")
    assert world.free == 3


def test_forgotten_blocks_of_a_shrinking_pool_are_withheld_once_overwritten():
    world = World(8)
    world.cache(list(range(24)), salt="a")
    call = begin_shrinking(world, 2)
    at_once(world.operators.forget(ForgetTarget(salt="a"), validate_only=False))
    world.check()
    at_once(call)
    device = world.manager._state.pool("e/0").device
    assert (device.total, device.free, device.used, device.to_withhold) == (2, 0, 6, 4)
    assert not world.manager.is_behind
    overwrite(world)
    assert world.manager.is_behind
    world.manager.expire()
    assert not world.manager.is_behind
    assert (device.total, device.free, device.to_withhold) == (2, 2, 0)


def test_memory_of_owed_slots_is_not_granted_to_another_pool():
    world = shared()
    world.cache(list(range(20)))
    call = begin_shrinking(world, 1)
    overwrite(world)
    world.check()
    with pytest.raises(PoolInUseError, match="yet to free 3 blocks"):
        update(world, "e/1", 12)
    at_once(call)
    overwrite(world)
    update(world, "e/1", 12)
