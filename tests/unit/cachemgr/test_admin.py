"""Listings and purges of operators, and the faults that a check of the pools reports."""

import pytest

from cachemgr.blocks.block import Block
from cachemgr.errors import BlocksInUseError, UnknownPoolError
from cachemgr.slices import at_once
from cachemgr.types import BlockFilter, Purged
from tests.support.in_process_manager import World, retain
from tests.support.random_operations import small_steps


def test_a_purge_removes_unused_blocks_and_a_dry_run_counts_them():
    world = World(12)
    world.cache(list(range(9)))
    world.run([*range(4), 50], "a")
    world.finish("a")
    world.run([*range(4), 60], "b")
    said = at_once(world.operators.purge(BlockFilter(), validate_only=True))
    with pytest.raises(BlocksInUseError):
        at_once(world.operators.purge(BlockFilter(), validate_only=False))
    assert at_once(world.operators.purge(BlockFilter(), validate_only=True)) == said == Purged(3, 1)
    assert at_once(world.operators.purge(BlockFilter(), validate_only=False, skip_used=True)) == said
    world.check()
    assert at_once(world.operators.purge(BlockFilter(), validate_only=False, skip_used=True)) == Purged(0, 1)
    assert world.cached_tokens(list(range(9))) == 4


@pytest.mark.parametrize(("windows", "removed"), [((None,), 3), ((None, 12), 6)])
def test_a_purge_by_priority_removes_children_of_purged_blocks(windows, removed):
    world = World(12, windows=windows)
    world.cache(list(range(4)), retention=retain(10))
    world.cache(list(range(9)))
    for validate_only in (True, False):
        call = world.operators.purge(BlockFilter(max_priority=10), validate_only=validate_only)
        assert at_once(call) == Purged(removed, 0)
    assert list(world.queries.records("e")) == []


def test_a_purge_in_steps_spares_blocks_with_new_children():
    world = World(12)
    world.cache(list(range(8)))
    with small_steps():
        call = world.operators.purge(BlockFilter(), validate_only=False, skip_used=True)
        while world.queries.pools()[0].cached_blocks == 2:
            next(call)
        # The tail is evicted already; another prompt continues the head.
        world.cache([0, 1, 2, 3, 9, 9, 9, 9])
        at_once(call)
    assert world.found([0, 1, 2, 3, 9, 9, 9, 9]) == 8


def test_listings_show_every_entry():
    world = World(8)
    world.cache(list(range(6)))
    world.run([*range(4), 50], "a", salt=None)
    blocks = [view for _, view in filter(None, world.queries.blocks("e/0"))]
    assert [(view.slot, view.num_tokens, view.references, view.depth) for view in blocks] == [
        (1, 4, 1, 0),
        (2, 2, 0, 1),
        (3, 0, 1, 0),
    ]
    assert [view.slot for _, view in filter(None, world.queries.blocks("e/0", after_index=1))] == [2, 3]
    (sequence,) = world.queries.sequences()
    assert (sequence.sequence_id, len(sequence.tokens), sequence.computed, sequence.cached_tokens) == (
        "a",
        6,
        5,
        4,
    )
    assert (sequence.capacity, sequence.blocks_held) == (8, 2)
    assert list(world.queries.sequences(sequence.handle)) == []
    pool = world.queries.pool("e/0")
    assert (pool.total_blocks, pool.free_blocks, pool.used_blocks, pool.cached_blocks) == (8, 6, 2, 1)
    for method in (world.queries.pool, world.queries.check_pool, world.queries.blocks):
        with pytest.raises(UnknownPoolError):
            method("nothing")


def inner(world):
    return world.manager._state.executors["e"].pools[0]


def lose_a_reference(pool, world):
    pool.tree.by_key[next(iter(pool.tree.by_key))].refs -= 1


def forget_a_slot(pool, world):
    pool.device.empty.pop()


def double_a_slot(pool, world):
    pool.device.empty.append(1)


def miscount(pool, world):
    pool.device.used += 1


def leave_the_order(pool, world):
    pool.device.accounts.order.remove(pool.device.accounts.order.first())


def change_tokens(pool, world):
    next(iter(pool.tree.by_key.values())).tokens = b"\0" * 16


def lose_a_parent(pool, world):
    del pool.tree.by_key[next(key for key, block in pool.tree.by_key.items() if not block.depth)]


def write_twice(pool, world):
    one, other = world.manager._state.sequences.values()
    other.tables[0].blocks[-1] = one.tables[0].blocks[-1]


def write_to_the_index(pool, world):
    sequence = next(iter(world.manager._state.sequences.values()))
    sequence.computed = 0


def promise_nothing(pool, world):
    pool.pending[b"x"] = Block(3)


def disown_a_hold(pool, world):
    next(iter(world.manager._state.executors["e"].holds)).owners.clear()


@pytest.mark.parametrize(
    "damage",
    [
        lose_a_reference,
        forget_a_slot,
        double_a_slot,
        miscount,
        leave_the_order,
        change_tokens,
        lose_a_parent,
        write_twice,
        write_to_the_index,
        promise_nothing,
        disown_a_hold,
    ],
    ids=lambda damage: damage.__name__,
)
def test_a_check_finds_every_contradiction(damage, worlds):
    world = World(16)
    world.cache(list(range(30, 36)))
    world.run(list(range(9)), "held")
    world.manager.hold(world.caller, "held", "me", 60.0)
    world.finish("held")
    world.run(list(range(9)), "a")
    world.run(list(range(50, 56)), "b")
    world.check()
    damage(inner(world), world)
    assert world.queries.check_pool("e/0")
    worlds.clear()


def test_a_contradiction_names_the_slot_within_its_tier(worlds):
    world = World(4, host_blocks=8)
    world.cache(list(range(9)))
    world.cache(list(range(50, 66)), no_store=True)
    world.run_executor_copies()
    [block] = [one for one in inner(world).blocks[5:] if one is not None and one.depth == 1]
    block.key = bytes(32)
    found = {(said.slot, said.message) for said in world.queries.check_pool("e/0")}
    assert (block.index - 4, "in the host tier: is in the index under another key") in found
    worlds.clear()
