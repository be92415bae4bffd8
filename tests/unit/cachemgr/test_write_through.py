"""Write-through: copies of device blocks in the next tier, and evictions that need no copy."""

import dataclasses

from cachemgr.sequences.transfers import MAX_WRITE_THROUGH_COPIES
from cachemgr.slices import at_once
from cachemgr.types import (
    EventKind,
    ForgetTarget,
    HintAction,
    HintOutcome,
    Hints,
    Prefix,
    Quota,
    RemovalCause,
    TierKind,
)
from tests.support.in_process_manager import BLOCK, CONFIG, World, retain
from tests.support.scrape import scraped

PROMPT = list(range(12))


def written_through(num_blocks: int = 4, host_blocks: int = 4, **options: object) -> World:
    """PROMPT is cached on the device, with a copy of each of its three blocks below."""
    world = World(num_blocks, host_blocks=host_blocks, **options)
    world.cache(PROMPT)
    world.open_write_through_copies()
    world.check()
    assert world.lower_copies == 3
    return world


# How they come about


def test_cached_blocks_are_copied_to_empty_host_slots_in_the_background_heads_first():
    world = World(4, host_blocks=2)
    world.cache(PROMPT)
    assert world.queries.executor_transfers("e") == []
    world.renew()
    copies = world.queries.executor_transfers("e")
    assert [(copy.source_slot, copy.source_tier, copy.target_tier) for copy in copies] == [
        (1, TierKind.DEVICE, TierKind.HOST),
        (2, TierKind.DEVICE, TierKind.HOST),
    ]
    assert world.host.used_blocks == 2
    world.check()
    world.run_executor_copies()
    world.check()
    assert world.lower_copies == 2
    # Their slots may be taken.
    assert (world.host.used_blocks, world.host.free_blocks, world.host.cached_blocks) == (0, 2, 0)
    assert world.tiers() == {"device": 3}


def test_a_block_that_moves_to_its_copy_is_announced_without_references():
    world = written_through()
    before = world.queries.last_event
    world.fill()
    moved = [event.block for event in world.queries.events_after(before) if event.kind is EventKind.UPDATED]
    assert [(view.tier, view.references) for view in moved] == [(TierKind.HOST, 0)] * 3


def test_a_block_whose_priority_rises_is_copied_later():
    world = World(8, host_blocks=8)
    world.cache(list(range(4)), retention=retain(10))
    world.open_write_through_copies()
    assert world.lower_copies == 0
    world.cache(list(range(5)), session_id="other", retention=retain(50))
    world.open_write_through_copies()
    assert world.lower_copies == 2


def test_a_parent_of_offloaded_blocks_is_backed_up_at_any_priority():
    world = World(3, host_blocks=3)
    world.cache(PROMPT[:8], retention=retain(90))
    # Its own lease has ended, and the first block is in use.
    world.run([*PROMPT[:4], 70], "first")
    fill_rest = world.cache([80, 81, 82])
    assert fill_rest.transfers
    assert world.tiers()["host"] == 1
    world.open_write_through_copies()
    head = next(block for block in world.queries.records("e") if block.token_ids == (0, 1, 2, 3))
    assert head.lower_copy is not None


def test_only_so_many_are_copied_at_a_time():
    world = World(3 * MAX_WRITE_THROUGH_COPIES, host_blocks=3 * MAX_WRITE_THROUGH_COPIES)
    world.cache(list(range(2 * MAX_WRITE_THROUGH_COPIES * BLOCK)))
    world.renew()
    world.renew()
    assert len(world.queries.executor_transfers("e")) == MAX_WRITE_THROUGH_COPIES
    world.run_executor_copies()
    world.renew()
    assert len(world.queries.executor_transfers("e")) == MAX_WRITE_THROUGH_COPIES
    world.open_write_through_copies()
    assert world.lower_copies == 2 * MAX_WRITE_THROUGH_COPIES


def test_write_through_can_be_switched_off():
    world = World(4, host_blocks=4, config=dataclasses.replace(CONFIG, write_through=False))
    world.cache(PROMPT)
    world.renew()
    assert world.queries.executor_transfers("e") == []
    # A block that is onloaded from the host keeps its slot there all the same.
    world.fill()
    world.finish("fill100")
    world.run(PROMPT, "again")
    world.check()
    assert world.lower_copies == 2


def test_a_failed_copy_is_no_backup_and_is_not_tried_again():
    world = World(4, host_blocks=4)
    world.cache(PROMPT)
    world.renew()
    world.run_executor_copies(fail=True)
    world.check()
    assert (world.lower_copies, world.host.free_blocks) == (0, 4)
    world.renew()
    assert world.queries.executor_transfers("e") == []


# What they are good for


def test_an_eviction_of_a_block_with_a_backup_needs_no_copy():
    world = written_through()
    before = world.queries.last_event
    assert world.fill().transfers == ()
    world.check()
    assert world.tiers()["host"] == 3
    moved = [event for event in world.queries.events_after(before) if event.kind is EventKind.UPDATED]
    assert {event.block.tier for event in moved} == {TierKind.HOST}
    assert len(moved) == 3
    world.finish("fill100")
    assert world.run(PROMPT, "again").cached_tokens == 11


def test_a_demotion_of_a_block_with_a_backup_needs_no_copy():
    world = written_through()
    hints = Hints("0.1", "m", (HintAction("one", "Demote", "0.1", {"tier": "host"}),))
    ((answer,), _) = world.operators.hint(Prefix(tuple(PROMPT)), hints, None)
    assert answer.num_blocks == 3
    assert world.queries.executor_transfers("e") == []
    assert (world.tiers(), world.free) == ({"host": 3}, 4)


def test_a_demotion_that_is_rejected_keeps_the_backup():
    world = World(4, host_blocks=4)
    world.cache(PROMPT, salt="a")
    world.open_write_through_copies()
    at_once(world.operators.set_quota(Quota(salt="a", host_ceiling=0), validate_only=False))
    hints = Hints("0.1", "m", (HintAction("one", "Demote", "0.1", {"tier": "host"}),))
    ((answer,), _) = world.operators.hint(Prefix(tuple(PROMPT), salt="a"), hints, None)
    assert (answer.outcome, world.tiers(), world.lower_copies) == (HintOutcome.REJECTED, {"device": 3}, 3)
    world.check()


def test_a_block_below_the_offload_floor_is_evicted_with_its_backup():
    world = World(4, host_blocks=4)
    world.cache(PROMPT, retention=retain(90, 5.0), session_id="s")
    world.open_write_through_copies()
    assert world.lower_copies == 3
    world.cache([*PROMPT, 70], retention=retain(10), session_id="s")
    world.fill()
    world.check()
    assert "host" not in world.tiers()
    assert world.host.free_blocks == 4


def test_device_blocks_with_backups_outlive_the_executor():
    world = written_through()
    before = world.queries.last_event
    world.cache(list(range(50, 53)))
    assert world.start_executor() == (0, 3)
    world.check()
    told = [(event.kind, event.cause) for event in world.queries.events_after(before)]
    assert told.count((EventKind.REMOVED, RemovalCause.EXECUTOR_LOST)) == 1
    assert told.count((EventKind.UPDATED, RemovalCause.NONE)) == 3
    world.sync()
    assert world.run(PROMPT, "again").cached_tokens == 11


def test_a_block_lost_on_the_device_is_restored_from_its_backup():
    world = written_through()
    # A step wrote to the second block's slot.
    world.device.written[0, 2] = 99
    assert world.restart_manager() == (1, 2)
    world.check()
    assert world.found(PROMPT) == 12


# How they go


def test_events_say_that_a_block_is_in_its_backup_when_its_own_bytes_are_lost():
    world, prompt = World(8, host_blocks=6), PROMPT[:4]
    world.cache(prompt)
    hints = Hints("0.1", "m", (HintAction("one", "Demote", "0.1", {"tier": "host"}),))
    world.operators.hint(Prefix(tuple(prompt)), hints, None)
    world.run_executor_copies()
    # A copy to the device uses the block's slot while another sequence computes the same block there.
    world.admit([*prompt, 50], "reader")
    world.run(prompt, "writer", no_read=True)
    world.finish("writer")
    world.release("reader")
    (block,) = world.queries.records("e")
    assert block.tier is TierKind.DEVICE
    # It moves down again, to another slot.
    world.operators.hint(Prefix(tuple(prompt)), hints, None)
    (block,) = world.queries.records("e")
    assert (block.tier, block.slot) == (TierKind.HOST, 2)
    world.watcher.check(world.manager)
    world.start_executor()
    (block,) = world.queries.records("e")
    assert (block.tier, block.slot) == (TierKind.HOST, 1)
    world.watcher.check(world.manager)


def test_backups_yield_their_slots_to_offloads_tails_first():
    world = written_through(num_blocks=7, host_blocks=3)
    world.cache(list(range(50, 62)))
    # Of all that is cached this was used last.
    world.run([*PROMPT, 70], "again")
    world.finish("again")
    (copy,) = world.run([100], "more").transfers
    assert copy.target_tier is TierKind.HOST
    world.check()
    with_backup = [block.token_ids[0] for block in world.queries.records("e") if block.lower_copy is not None]
    assert with_backup == [0, 4]


def test_a_backup_of_a_forgotten_block_is_overwritten():
    world = written_through()
    at_once(world.operators.forget(ForgetTarget(prefix=Prefix(tuple(PROMPT))), validate_only=False))
    world.check()
    targets = {(copy.target_tier, copy.target_slot) for copy in world.queries.executor_transfers("e")}
    assert len(targets) == 6
    assert all(not copy.source_slot for copy in world.queries.executor_transfers("e"))
    world.run_executor_copies()
    world.check()
    assert not world.device.count(None, 0)
    assert world.host.free_blocks == 4


def test_a_backup_in_flight_of_a_forgotten_block_is_overwritten_behind_the_copy():
    world = World(4, host_blocks=4)
    world.cache(PROMPT)
    world.renew()
    world.run_executor_copies(3)
    at_once(world.operators.forget(ForgetTarget(prefix=Prefix(tuple(PROMPT))), validate_only=False))
    world.check()
    world.run_executor_copies()
    world.check()
    world.run_executor_copies()
    world.check()
    assert not world.device.count(None, 0)
    assert world.host.free_blocks == 4


def test_a_source_that_is_forgotten_while_it_is_copied_from_is_overwritten():
    world = World(12, host_blocks=12)
    world.cache(PROMPT)
    world.fill()
    world.finish("fill100")
    for name in ("a", "b"):
        world.admit([*PROMPT, 70], name)
    world.step(20)
    world.confirm(3)
    world.sync()
    at_once(world.operators.forget(ForgetTarget(prefix=Prefix(tuple(PROMPT))), validate_only=False))
    world.check()
    world.confirm()
    for name in ("a", "b"):
        world.leave(world.live[name])
    world.sync()
    world.run_executor_copies()
    world.check()
    assert not world.device.count(None, 0)


def test_an_eviction_does_not_wait_for_a_backup_in_flight_and_drops_it():
    world = World(4, host_blocks=4)
    world.cache(PROMPT)
    world.renew()
    admission = world.admit(list(range(100, 116)), "b")
    assert admission.admitted
    world.check()
    world.step(20)
    # Only now the copies run: they read the newer contents.
    world.run_executor_copies()
    world.check()
    world.sync()
    world.check()
    world.finish("b")
    world.check()
    assert world.run(PROMPT, "again").cached_tokens in (0, 4)


# How they are seen


def test_metrics_have_the_tiers_of_present_pools_only():
    world = written_through()
    host_tier, manager = {"pool": "e/0", "tier": "host"}, world.manager
    assert scraped(manager, "tier_written_through_blocks_total", **host_tier) == 3
    assert scraped(manager, "pool_written_through_blocks", pool="e/0") == 3
    assert scraped(manager, "tier_blocks", **host_tier) == 4
    world.start_executor()
    assert scraped(manager, "tier_restored_blocks_total", **host_tier) == 3
    assert scraped(manager, "pool_written_through_blocks", pool="e/0") == 0
    assert scraped(manager, "tier_cached_blocks", **host_tier) == 3
    world.now += 1000
    manager.expire()
    assert scraped(manager, "pool_written_through_blocks", pool="e/0") is None
    assert scraped(manager, "tier_restored_blocks_total", **host_tier) is None
