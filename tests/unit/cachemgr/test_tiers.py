"""Offloads to lower tiers and onloads from them: open, failed and cancelled copies, and the lowest tier of a match."""

import pytest

from cachemgr.errors import BlocksInUseError
from cachemgr.slices import at_once
from cachemgr.types import BlockFilter, EventKind, RemovalCause, Retention, RetentionRange, TierKind
from tests.support.in_process_manager import BLOCK, World, retain


def fill(world: World, first: int, name: str = "", **options: object):
    """A sequence that takes the whole device."""
    return world.run(list(range(first, first + world.num_blocks * BLOCK)), name, **options)


def test_blocks_in_flight_are_not_matched():
    world = World(4, host_blocks=4)
    world.cache(list(range(9)))
    world.admit([*range(100, 116)], "b")
    assert world.found(list(range(9))) == 0
    world.step()
    world.confirm()
    assert world.found(list(range(9))) == 9


def test_a_host_block_is_evicted_only_for_a_block_later_in_eviction_order():
    world = World(2, host_blocks=1)
    world.cache(list(range(4)), retention=retain(40))
    world.cache(list(range(50, 54)), retention=retain(50))
    # The block at 40 is evicted first; its copy is called off for the block at 50.
    assert len(fill(world, 100, "b", retention=retain(45)).transfers) == 1
    world.finish("b")
    assert world.found([0, 1, 2, 3]) == 0
    assert world.found([50, 51, 52, 53]) == 4
    # 45 does not displace 50.
    assert fill(world, 200, "c", retention=retain(60)).transfers == ()
    world.finish("c")
    # 60 does.
    assert len(fill(world, 300, "d").transfers) == 1
    assert world.found([50, 51, 52, 53]) == 0


def test_a_parent_of_offloaded_blocks_is_offloaded_at_any_priority():
    world = World(3, host_blocks=3)
    low = Retention((RetentionRange(0, 4, 5), RetentionRange(4, None, 90)))
    world.cache(list(range(9)), retention=low)
    fill(world, 100, "b")
    # The head has priority 5 and would be dropped, but a descendant has 90.
    assert world.tiers_of([*range(8)])[0] == "host"
    assert world.found(list(range(8))) == 8


def test_a_failed_copy_down_loses_the_block_and_all_behind_it():
    world = World(3, host_blocks=3)
    world.cache(list(range(9)))
    world.admit([*range(100, 112)], "b")
    world.step(fail_copies=True)
    before = world.queries.last_event
    world.confirm()
    removed = [event for event in world.queries.events_after(before) if event.kind is EventKind.REMOVED]
    assert {event.cause for event in removed} <= {RemovalCause.COPY_FAILED, RemovalCause.PARENT_EVICTED}
    assert world.found(list(range(8))) == 0
    world.check()
    device = world.queries.block_pools("e/0")[0].device
    assert device.counters.failed_copies == 3


def test_onloaded_blocks_stay_when_the_sequence_is_released_before_the_rest():
    world = World(4, host_blocks=8)
    world.cache(list(range(13)))
    fill(world, 100, "b")
    world.finish("b")
    admission = world.admit(list(range(13)), "c")
    world.step()
    up = [copy.ticket for copy in admission.transfers if copy.target_tier is TierKind.DEVICE]
    late = world.done.pop(up[2])
    world.confirm()
    world.leave(world.live["c"])
    world.sync()
    world.check()
    assert world.tiers_of([*range(13)]) == ["device", "device", "host"]
    world.done[up[2]] = late
    world.confirm()


def test_a_slot_with_an_open_offload_is_not_allocated():
    world = World(2, host_blocks=2)
    world.cache(list(range(8)))
    world.admit([*range(100, 108)], "b")
    world.release("b")
    assert world.queries.pools()[0].free_blocks == 0


def test_a_purge_of_a_block_in_flight_is_refused():
    world = World(2, host_blocks=4)
    world.cache(list(range(8)))
    world.admit([*range(100, 108)], "b")
    with pytest.raises(BlocksInUseError):
        at_once(world.operators.purge(BlockFilter(), validate_only=False))
    assert sum(world.tiers().values()) == 2


def test_blocks_behind_a_prefix_stay_evictable_while_it_is_onloaded_twice():
    world = World(12, host_blocks=12)
    world.cache(list(range(13)))
    fill(world, 100, "b")
    world.finish("b")
    # Both copy the prefix for themselves, and the second shares the blocks that the first computes after it.
    world.admit([*range(12), *range(20, 28), 50], "first")
    second = world.admit([*range(12), *range(20, 28), 60, 61], "second")
    assert (second.cached_tokens, len(second.transfers) > 0, second.wait_for_handle > 0) == (20, True, True)
    world.compute(world.live["first"], 21)
    world.sync({"first"})
    world.finish("first")
    world.check()
    assert world.admit(list(range(200, 200 + world.free * BLOCK))).admitted
    world.compute(world.live["second"], 22)
    world.sync({"second"})
    world.check()
    world.finish("second")


def test_onloaded_blocks_are_on_the_device_after_a_restart_of_the_manager():
    world = World(4, host_blocks=8)
    world.cache(list(range(13)))
    fill(world, 100, "b")
    world.finish("b")
    world.run(list(range(13)), "c")
    world.finish("c")
    world.restart_manager()
    world.check()
    assert world.tiers_of([*range(13)])[:3] == ["device"] * 3


def test_a_copy_in_flight_is_not_matched_though_another_copy_of_the_block_has_ended():
    world = World(12, host_blocks=12)
    world.cache(list(range(13)))
    fill(world, 100, "b")
    world.finish("b")
    world.admit([*range(12), 50], "first")
    second = world.admit([*range(12), 60], "second")
    world.step()
    copy = next(copy for copy in reversed(second.transfers) if copy.target_tier is TierKind.DEVICE)
    late = world.done.pop(copy.ticket)
    world.confirm()
    world.sync({"first"})
    world.finish("first")
    world.leave(world.live["second"])
    world.sync()
    world.check()
    third = world.admit([*range(12), 70], "third")
    assert (third.cached_tokens, third.wait_for_handle) == (12, 0)
    assert copy.target_slot not in third.block_tables[0].slots
    world.done[copy.ticket] = late
    world.confirm()


# The lowest tier of a match


def three_tiers() -> World:
    """The head of twelve tokens is on the device, the second block in the host, the third on the disk."""
    world = World(4, host_blocks=1, disk_blocks=4)
    world.cache(list(range(12)))
    world.run([0, 1, 2, 3, 99], "head")
    world.cache(list(range(50, 54)))
    world.cache(list(range(60, 64)))
    world.finish("head")
    assert world.tiers_of([*range(12)]) == ["device", "host", "disk"]
    return world


@pytest.mark.parametrize(("lowest", "tokens"), [(TierKind.DEVICE, 4), (TierKind.HOST, 8), (TierKind.DISK, 11)])
def test_a_match_ends_at_the_first_block_below_the_lowest_tier(lowest, tokens):
    world = three_tiers()
    request = world.request(list(range(12)), lowest_tier=lowest)
    assert world.queries.preview(request, 0).cached_tokens == tokens
    admission = world.run(list(range(12)), "a", lowest_tier=lowest)
    assert admission.cached_tokens == tokens
    assert {copy.source_tier for copy in admission.transfers if copy.target_tier is TierKind.DEVICE} <= {
        tier for tier in TierKind if tier <= lowest
    }
    world.check()
    # Its computed blocks replace the equal ones of lower tiers.
    world.finish("a")
    world.check()
    assert world.run(list(range(12)), "b", lowest_tier=TierKind.DEVICE).cached_tokens == 11


# Copy tickets


def copying(num_blocks=8):
    """A sequence "b" with an open copy of two tokens."""
    world = World(num_blocks)
    world.cache([*range(4), 10, 11, 12])
    admission = world.admit([*range(4), 10, 11, 20, 21, 22], "b")
    (copy,) = admission.transfers
    assert (admission.cached_tokens, copy.num_tokens) == (6, 2)
    return world, copy


def test_the_source_of_an_open_copy_is_not_evicted():
    world, _ = copying(num_blocks=4)
    # One cached block is the source; two are used; one is the target.
    assert world.free == 0
    assert not world.admit([50]).admitted
    world.step()
    world.confirm()
    assert world.free == 1


def test_a_confirmation_is_counted_once():
    world, copy = copying()
    world.step()
    confirm = world.manager.confirm_transfers
    assert confirm("e", 1, [copy.ticket], []) == 0
    assert confirm("e", 1, [copy.ticket], []) == 1
    assert confirm("e", 1, [copy.ticket + 1], [copy.ticket + 2]) == 2


def test_the_parent_of_an_open_copys_source_is_not_evicted():
    world, _ = copying(num_blocks=4)
    world.step()
    world.release("b")
    assert world.free == 1
    assert not world.admit([50, 51, 52, 53, 54]).admitted
    assert world.admit([50]).admitted
    world.check()
    world.confirm()
