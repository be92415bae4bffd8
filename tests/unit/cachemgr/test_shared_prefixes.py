"""Shared prefixes are computed once: readers wait for the writer of their blocks."""

from dataclasses import replace

import pytest

from cachemgr.slices import at_once
from cachemgr.types import BlockFilter, Prefix
from tests.support.in_process_manager import BLOCK, World

PROMPT = list(range(9))


def two(world, **options):
    """A writer and a sequence that shares its two full blocks."""
    writer = world.admit(PROMPT, "writer", **options)
    return writer, world.admit([*PROMPT, 50], "reader", **options)


def test_a_second_sequence_shares_blocks_before_they_are_computed():
    world = World()
    writer, reader = two(world)
    assert (writer.cached_tokens, reader.cached_tokens) == (0, 8)
    assert reader.wait_for_handle == writer.sequence_handle
    assert reader.block_tables[0].slots[:2] == writer.block_tables[0].slots[:2]
    assert reader.transfers == ()


def test_a_writer_that_ends_early_voids_its_readers():
    world = World()
    _, reader = two(world)
    world.step(most=5, names={"writer"})
    world.sync()
    answer = world.release("writer")
    world.check()
    assert answer.void_handles == [reader.sequence_handle]
    # The scheduler has released it.
    assert world.sync().void_handles == []
    assert world.free == 8
    again = world.admit([*PROMPT, 50], "reader-2")
    assert (again.cached_tokens, again.wait_for_handle) == (5, 0)


def test_other_schedulers_and_salts_share_no_promises():
    world = World()
    world.admit(PROMPT, "writer", salt="a")
    assert world.admit([*PROMPT, 50], "reader").cached_tokens == 0
    world.manager.register_scheduler("other", 1)
    request = replace(world.request(PROMPT, "x", salt="a"), scheduler_id="other", scheduler_epoch=1)
    assert world.manager.admit(request).cached_tokens == 0


def test_a_truncated_writer_voids_its_readers():
    world = World()
    _, reader = two(world)
    assert world.manager.truncate(world.caller, "writer", 6).found
    assert world.manager.sync(world.next_sync()).void_handles == [reader.sequence_handle]


def test_a_failed_copy_of_the_writer_voids_both():
    world = World()
    world.cache([*range(6)])
    writer, reader = two(world)
    assert (writer.cached_tokens, len(writer.transfers)) == (6, 1)
    world.step(most=20, fail_copies=True)
    world.sync()
    # Computed after a copy that is not confirmed: no block of it can be found.
    assert len(world.journal.blocks) == 2
    world.confirm()
    assert world.sync().void_handles == [writer.sequence_handle, reader.sequence_handle]
    world.sync()
    world.check()
    assert world.free == 8


@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize("no_store", [True, False])
def test_shared_blocks_stay_evictable_though_their_writer_computed_an_equal_block(no_store, begins):
    world = World(16)
    prompt = list(range(12))
    world.admit([*prompt, 50], "writer", no_read=True)
    world.admit([*prompt, 51], "follower", no_store=no_store)
    world.admit([*prompt[:4], 60], "first", no_read=True)
    world.compute(world.live["first"], 5)
    world.sync({"first"})
    world.compute(world.live["writer"], 13)
    world.sync({"writer"})
    if begins:
        world.compute(world.live["follower"], 13)
        world.sync({"follower"})
    for name in ("writer", "first"):
        world.leave(world.live[name])
        world.sync(set())
        world.check()
    assert world.admit(list(range(100, 100 + world.free * BLOCK))).admitted


def test_no_block_is_committed_behind_one_that_another_group_has_yet_to_compute():
    world = World(12, windows=(None, 5))
    world.cache([0, 0, 0, 0])
    world.cache([0, 9, 9, 9])
    lost = BlockFilter(pool_id="e/1", prefix=Prefix((0, 0, 0, 0)))
    assert at_once(world.operators.purge(lost, validate_only=False)).purged_blocks == 1
    assert world.admit([0] * 6, "first").cached_tokens == 1
    # Its first block is cached with full attention, and the first sequence's to fill in the window.
    admission = world.admit([0, 0, 0, 0, 1, 1, 1, 1, 1], "second")
    assert (admission.cached_tokens, admission.wait_for_handle) == (4, world.live["first"].handle)
    # The first sequence's copy fails: all blocks computed after it are wrong, in all groups.
    world.step(20, fail_copies=1)
    world.sync()
    world.check()
    assert {block.depth for block in world.queries.records("e")} == {0}
    world.confirm()
    assert not world.sync().extended_handles
    world.check()
    assert not world.live


def test_a_prefix_of_two_writers_that_do_not_wait_for_each_other_is_computed_again():
    world = World(16)
    world.admit(PROMPT[:5], "first")
    world.admit(PROMPT, "second", no_read=True)
    third = world.admit([*PROMPT, 50], "third")
    assert (third.cached_tokens, third.wait_for_handle) == (0, 0)


def test_a_writer_does_not_remember_a_released_reader():
    world = World()
    two(world)
    world.release("reader")
    assert not world.manager._state.sequences["writer"].dependents
