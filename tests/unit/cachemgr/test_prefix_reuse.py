"""What is found again, and how much of it."""

import pytest

from cachemgr.errors import InvalidField
from cachemgr.types import ManagerConfig, Retention, RetentionRange
from tests.support.in_process_manager import World, wish

N = list(range(9))


def world_after_12():
    """Eight blocks of four; nine tokens and two generated ones were cached."""
    world = World(8)
    assert world.run(N, "a", generate=1).cached_tokens == 0
    assert world.free == 5
    # The second generated token has no K and V.
    world.finish("a")
    assert world.free == 8
    return world


def admit(world, tokens, name):
    found = world.cached_tokens(tokens, name=name)
    world.check()
    return found


def test_blocks_enter_the_index_as_soon_as_they_are_full_and_computed():
    world = World()
    world.admit(list(range(10)), "a")
    world.step(5)
    world.sync()
    assert len(world.journal.blocks) == 1
    world.step(5)
    world.sync()
    assert len(world.journal.blocks) == 2
    world.finish("a")
    assert sorted(len(block.token_ids) for block in world.journal.blocks.values()) == [2, 4, 4]


def test_nothing_that_is_not_computed_is_ever_stored():
    world = World()
    world.admit(list(range(10)), "a")
    world.step(5)
    world.sync()
    world.finish("a")
    world.check()
    assert {block.token_ids for block in world.journal.blocks.values()} == {(0, 1, 2, 3), (4,)}


def test_a_second_run_finds_the_first_and_stores_no_duplicate():
    world = world_after_12()
    stored = dict(world.journal.blocks)
    assert admit(world, N, "b") == 8
    assert world.free == 5
    world.step()
    world.finish("b")
    assert world.free == 8
    assert len(world.journal.blocks) == len(stored)
    world.check()


def test_the_partly_filled_last_block_is_found_by_copying_it():
    world = world_after_12()
    admission = world.admit([*N, 0], "b")
    assert admission.cached_tokens == 9
    (copy,) = admission.transfers
    assert copy.num_tokens == 1
    assert copy.target_slot == admission.block_tables[0].slots[2]
    world.step()
    world.check()


def test_the_longest_sibling_wins():
    world = World(12)
    world.cache([*range(4), 10, 11, 12, 13])
    world.cache([*range(4), 10, 11, 20, 21])
    world.cache([*range(4), 10, 30, 31, 32])
    assert admit(world, [*range(4), 10, 11, 20, 99], "x") == 7
    assert admit(world, [*range(4), 10, 30, 99], "y") == 6


def test_siblings_below_the_root_are_found_too():
    world = World()
    world.cache([5, 6, 7, 8])
    assert admit(world, [5, 6, 9], "x") == 2


def test_a_longer_entry_is_kept_while_a_shorter_prompt_reuses_it():
    world = World()
    world.cache(list(range(9)))
    assert admit(world, list(range(8)), "b") == 7
    world.step()
    world.confirm()
    world.finish("b")
    assert admit(world, list(range(9)), "c") == 8


def test_a_longer_block_replaces_the_shorter_ones_that_it_covers():
    world = World()
    world.cache([1, 2])
    world.cache([1, 2, 3])
    assert [block.token_ids for block in world.journal.blocks.values()] == [(1, 2, 3)]
    world.cache([1, 2, 4])
    world.cache([1, 2, 3, 5, 6])
    assert sorted(block.token_ids for block in world.journal.blocks.values()) == [(1, 2, 3, 5), (1, 2, 4), (6,)]
    world.check()


def test_a_shorter_block_that_a_sibling_covers_is_not_stored():
    world = World()
    world.cache([1, 2, 3, 5])
    world.cache([1, 2], no_read=True)
    assert [block.token_ids for block in world.journal.blocks.values()] == [(1, 2, 3, 5)]


def test_without_a_block_to_copy_into_a_partly_matching_one_is_taken_over():
    world = World(3)
    world.cache(list(range(12)))
    admission = world.run([*range(10), 90, 91], "b")
    assert (admission.cached_tokens, admission.transfers) == (10, ())
    world.check()
    world.finish("b")
    assert admit(world, list(range(12)), "c") == 10


def test_without_copies_an_idle_leaf_is_taken_over_and_any_other_is_left():
    world = World(12, config=ManagerConfig(capacity_ahead_tokens=0, free_watermark=0, copy_on_partial_reuse=False))
    world.cache(list(range(9)))
    world.cache([*range(4), 80, 81])
    assert admit(world, [*range(4), 80, 90], "takes the leaf") == 5
    assert admit(world, [*range(4), 80, 81, 82], "finds it gone") == 4
    # The block behind the first four tokens is used by nobody, and another stands on it.
    assert admit(world, [*range(6), 90], "leaves the inner block") == 4
    world.check()


def test_partial_reuse_can_be_switched_off():
    world = World(config=ManagerConfig(capacity_ahead_tokens=0, free_watermark=0, partial_reuse=False))
    world.cache(list(range(9)))
    assert admit(world, list(range(8)), "b") == 4
    world.check()


def test_without_partial_reuse_a_partly_filled_block_is_found_by_its_exact_key():
    world = World(12, config=ManagerConfig(capacity_ahead_tokens=0, free_watermark=0, partial_reuse=False))
    world.cache(list(range(10)))
    assert admit(world, list(range(11)), "ends where the block does") == 10
    assert admit(world, list(range(12)), "ends behind it") == 8
    assert admit(world, list(range(10)), "ends before it") == 8


def test_partly_filled_blocks_that_nothing_could_find_are_not_stored():
    off = ManagerConfig(capacity_ahead_tokens=0, free_watermark=0, partial_reuse=False, copy_on_partial_reuse=False)
    world = World(4, config=off)
    world.cache(list(range(10)))
    assert world.manager.queries.pools()[0].cached_blocks == 2
    # Another's end takes an empty slot, and all that was cached stays.
    world.cache([90, 91])
    world.cache([95, 96])
    assert admit(world, list(range(9)), "finds all full blocks") == 8
    world.check()


def test_two_equal_prompts_that_compute_the_same_store_it_once():
    world = World(12)
    world.admit(list(range(9)), "a")
    world.admit(list(range(9)), "b", no_read=True)
    world.step(4)
    world.step(4)
    world.step(4)
    world.sync()
    world.check()
    assert len(world.journal.blocks) == 2
    world.finish("a")
    world.check()
    # What the second one's blocks stand on is kept by the second, though it uses blocks of its own.
    assert world.free == 12 - 3 - 2
    world.finish("b")
    assert world.free == 12


def test_windows_limit_what_must_be_there():
    world = World(16, windows=(8,))
    world.run(list(range(11)), "a")
    world.step()
    world.sync()
    assert admit(world, list(range(4)), "b") == 3


def test_the_match_is_the_longest_that_every_group_has():
    world = World(6, windows=(None, 4))
    world.cache(list(range(16)))
    # The windowed group loses its least recently used blocks: those that left the window first.
    assert admit(world, [*range(16), 0], "b") == 16
    world.finish("b")
    assert admit(world, [*range(9), 90], "c") == 9


def test_a_group_without_its_window_shortens_the_match():
    world = World(8, windows=(None, 4))
    world.cache(list(range(16)))
    world.manager._state.executors["e"].pools[1].discard(
        next(block for block in world.manager._state.executors["e"].pools[1].index.values() if block.depth == 3),
        cause=2,
    )
    # Without the last block of the window only what ends before it is a match: block 3 is computed again.
    assert world.admit([*range(16), 0], "b").cached_tokens == 12
    world.check()


def test_entries_that_a_window_does_not_need_are_zero():
    world = World(8, windows=(None, 4))
    world.cache(list(range(16)))
    admission = world.admit([*range(16), 0], "b")
    full, windowed = admission.block_tables
    assert all(full.slots)
    assert [slot > 0 for slot in windowed.slots] == [False, False, False, True, True]


def test_blocks_that_leave_the_window_are_given_back_and_stay_findable():
    world = World(16, windows=(3,))
    lengths = {}
    world.admit([1, 2], "a")
    for _ in range(8):
        world.step()
        world.sync()
        lengths[len(world.live["a"].tokens)] = world.free
    # Lengths count the newest token, which has no K and V yet; there is room for one token more.
    assert (lengths[3], lengths[4], lengths[6], lengths[7], lengths[8]) == (15, 14, 14, 15, 14)
    world.finish("a")
    assert world.free == 16
    world.check()


def test_a_shorter_block_that_was_in_use_when_a_longer_one_came_goes_with_its_last_user():
    world = World(10)
    world.cache([1, 2, 0], session_id="s", retention=wish(80))
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
    records = {block.token_ids: block for block in world.manager.queries.records("e")}
    assert (1, 2, 0) not in records
    assert any(block.leases for tokens, block in records.items() if tokens[:3] == (1, 2, 0))


def test_what_an_earlier_attempt_generated_takes_the_wish_for_the_output():
    world = World()
    retention = Retention((RetentionRange(0, None, 90),), 5)
    world.cache(list(range(12)), num_prompt_tokens=4, retention=retention)
    assert [block.leases[0].priority for block in world.manager.queries.records("e")] == [90, 5, 5]
    for wrong in (0, 13):
        with pytest.raises(InvalidField) as refused:
            world.admit(list(range(12)), num_prompt_tokens=wrong)
        assert list(refused.value.fields) == ["num_prompt_tokens"]
