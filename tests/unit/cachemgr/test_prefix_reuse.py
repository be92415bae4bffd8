"""Prefix hits that end within a block, and settings of partial reuse."""

from cachemgr.types import ManagerConfig, Retention, RetentionRange
from tests.support.in_process_manager import World, retain


def admit(world, tokens, name):
    found = world.cached_tokens(tokens, name=name)
    world.check()
    return found


def test_a_longer_block_replaces_the_shorter_ones_that_it_covers():
    world = World()
    world.cache([1, 2])
    world.cache([1, 2, 3])
    assert [block.token_ids for block in world.journal.blocks.values()] == [(1, 2, 3)]
    world.cache([1, 2, 4])
    world.cache([1, 2, 3, 5, 6])
    assert sorted(block.token_ids for block in world.journal.blocks.values()) == [(1, 2, 3, 5), (1, 2, 4), (6,)]


def test_without_copies_an_idle_leaf_is_taken_over_and_any_other_is_left():
    world = World(12, config=ManagerConfig(capacity_ahead_tokens=0, free_watermark=0, copy_on_partial_reuse=False))
    world.cache(list(range(9)))
    world.cache([*range(4), 80, 81])
    assert admit(world, [*range(4), 80, 90], "takes the leaf") == 5
    assert admit(world, [*range(4), 80, 81, 82], "finds it evicted") == 4
    # The block after the first four tokens is used by no sequence, and has a child.
    assert admit(world, [*range(6), 90], "leaves the inner block") == 4


def test_partly_filled_blocks_that_nothing_could_find_are_not_stored():
    off = ManagerConfig(capacity_ahead_tokens=0, free_watermark=0, partial_reuse=False, copy_on_partial_reuse=False)
    world = World(4, config=off)
    world.cache(list(range(10)))
    assert world.queries.pools()[0].cached_blocks == 2
    # Another's end takes an empty slot, and all that was cached stays.
    world.cache([90, 91])
    world.cache([95, 96])
    assert admit(world, list(range(9)), "finds all full blocks") == 8


def test_a_group_without_its_window_shortens_the_match():
    world = World(8, windows=(None, 4))
    world.cache(list(range(16)))
    world.manager._state.executors["e"].pools[1].discard(
        next(block for block in world.manager._state.executors["e"].pools[1].tree.by_key.values() if block.depth == 3),
        cause=2,
    )
    # Without the last block of the window only what ends before it is a match: block 3 is computed again.
    assert world.admit([*range(16), 0], "b").cached_tokens == 12


def test_a_covered_shorter_block_in_use_leaves_the_index_with_its_last_reference():
    world = World(10)
    world.cache([1, 2, 0], session_id="s", retention=retain(80))
    # Both copy its beginning; the first to end stores a block that covers it.
    world.admit([1, 2, 0, 4, 5], "a")
    world.admit([1, 2, 0, 5, 6], "b")
    world.step(names={"a"})
    world.confirm()
    world.finish("a")
    world.check()
    world.step(names={"b"})
    world.confirm()
    world.check()
    records = {block.token_ids: block for block in world.queries.records("e")}
    assert (1, 2, 0) not in records
    assert any(block.leases for tokens, block in records.items() if tokens[:3] == (1, 2, 0))


def test_tokens_generated_by_an_earlier_attempt_have_the_decode_priority():
    world = World()
    retention = Retention((RetentionRange(0, None, 90),), 5)
    world.cache(list(range(12)), num_prompt_tokens=4, retention=retention)
    assert [block.leases[0].priority for block in world.queries.records("e")] == [90, 5, 5]
