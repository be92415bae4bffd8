"""Pools that share memory: the first shares, and changing them while everything runs."""

import pytest

from cachemgr.admin_api import Quota
from cachemgr.api import EventKind, RemovalCause
from cachemgr.dump import state_hash
from cachemgr.errors import InvalidField, PoolInUseError, SequenceTooLongError, StalePoolError, UnknownPoolError
from tests.unit.cachemgr.world import World


def shared(memory_bytes: int = 900) -> World:
    """A full and a windowed group, the first with blocks of twice the size."""
    return World(12, windows=(None, 5), block_bytes=(100, 50), memory_bytes=memory_bytes)


def totals(world: World) -> list[int]:
    return [pool.total_blocks for pool in world.manager.pools()]


def update(world: World, pool_id: str, total: int, etag: str = "", *, validate_only: bool = False):
    return world.manager.update_pool(pool_id, total, etag, validate_only=validate_only)


def test_groups_get_equally_many_blocks_which_is_in_proportion_to_what_a_sequence_needs():
    world = shared()
    assert totals(world) == [6, 6]
    world.check()


def test_a_pool_does_not_get_more_than_it_has_slots():
    assert totals(shared(10_000)) == [12, 12]


def test_what_one_pool_gives_up_another_can_have():
    world = shared()
    with pytest.raises(InvalidField):
        update(world, "e/1", 8)
    assert update(world, "e/0", 4).total_blocks == 4
    assert update(world, "e/1", 10).total_blocks == 10
    with pytest.raises(InvalidField) as refused:
        update(world, "e/1", 11)
    assert list(refused.value.fields) == ["pool.total_blocks"]
    assert "at most 10" in str(refused.value.fields)
    assert totals(world) == [4, 10]
    world.check()


def test_empty_blocks_go_before_cached_ones_and_those_in_the_order_of_loss():
    world = World(8)
    world.cache([1, 2, 3, 4])
    world.cache([5, 6, 7, 8])
    before = world.manager.last_event
    update(world, "e/0", 2)
    assert world.manager.events_after(before) == []
    update(world, "e/0", 1)
    (lost,) = world.manager.events_after(before)
    assert (lost.kind, lost.cause) == (EventKind.REMOVED, RemovalCause.POOL_SHRUNK)
    world.check()
    assert [block.token_ids[0] for block in world.manager.records("e")] == [5]
    update(world, "e/0", 8)
    world.check()
    assert world.free == 8
    assert world.run(list(range(32))).admitted


def test_blocks_in_use_do_not_go():
    world = World(8)
    world.run(list(range(12)), "a")
    before = state_hash(world.manager.state())
    used = world.manager.pools()[0].used_blocks
    with pytest.raises(PoolInUseError) as refused:
        update(world, "e/0", used - 1)
    assert list(refused.value.fields) == ["pool.total_blocks"]
    assert state_hash(world.manager.state()) == before
    assert update(world, "e/0", used).free_blocks == 0
    world.check()


def test_what_a_quota_protects_does_not_go():
    world = World(8)
    world.cache([1, 2, 3, 4], salt="a")
    world.manager.set_quota(Quota(salt="a", device_floor=1), validate_only=False)
    world.run([9] * 24, "b", no_store=True)
    used = world.manager.pools()[0].used_blocks
    with pytest.raises(PoolInUseError):
        update(world, "e/0", used)
    assert totals(world) == [8]
    update(world, "e/0", used + 1)
    assert world.cached_tokens([1, 2, 3, 4], salt="a") == 3


@pytest.mark.parametrize(
    ("pool_id", "total", "etag", "error", "field"),
    [
        ("e/7", 4, "", UnknownPoolError, "pool.pool_id"),
        ("e/0", 0, "", InvalidField, "pool.total_blocks"),
        ("e/0", 9, "", InvalidField, "pool.total_blocks"),
        ("e/0", 4, "7", StalePoolError, "pool.etag"),
    ],
)
def test_a_change_that_cannot_be_is_refused_and_changes_nothing(pool_id, total, etag, error, field):
    world = World(8)
    world.cache(list(range(9)))
    before = state_hash(world.manager.state())
    with pytest.raises(error) as refused:
        update(world, pool_id, total, etag)
    assert list(refused.value.fields) == [field]
    assert state_hash(world.manager.state()) == before


def test_the_etag_changes_with_every_change_and_not_by_a_dry_run():
    world = World(8)
    (pool,) = world.manager.pools()
    before = state_hash(world.manager.state())
    assert update(world, "e/0", 4, pool.etag, validate_only=True) == pool
    assert state_hash(world.manager.state()) == before
    changed = update(world, "e/0", 4, pool.etag)
    assert changed.etag != pool.etag
    with pytest.raises(StalePoolError):
        update(world, "e/0", 5, pool.etag)
    assert update(world, "e/0", 5, changed.etag).total_blocks == 5


def test_a_prompt_that_no_longer_fits_is_refused_and_one_that_does_runs():
    world = World(8)
    update(world, "e/0", 2)
    with pytest.raises(SequenceTooLongError):
        world.admit(list(range(9)))
    assert world.run(list(range(8))).admitted
    world.check()


def test_shares_hold_after_a_restart_of_the_manager_too():
    world = shared()
    world.cache(list(range(24)))
    world.restart_manager()
    assert totals(world) == [6, 6]
    world.check()
    assert world.run(list(range(23))).cached_tokens == 22
    world.check()


def test_more_cached_blocks_than_the_share_holds_are_lost_at_a_restart():
    world = World(12, block_bytes=(100,))
    world.cache(list(range(48)))
    world.memory_bytes = 400
    world.executor_epoch += 1
    records = list(world.manager.records("e"))
    world.manager = type(world.manager)(2, lambda: world.now, world.config, world.journal)
    world.start_scheduler()
    assert world.manager.register_executor(world.spec(), records) == (4, 0)
    world.check()
    assert world.run(list(range(15))).cached_tokens == 14
