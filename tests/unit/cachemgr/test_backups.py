"""Copies of device blocks one tier below: how they come about, and what they save."""

import dataclasses

from cachemgr.sequences.transfers import MAX_BACKUPS
from cachemgr.types import EventKind, HintAction, Hints, Prefix, RemovalCause, TierKind
from tests.support.in_process_manager import BLOCK, CONFIG, World, wish
from tests.unit.cachemgr.tiered import PROMPT, backed_up

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
    assert world.backups == 2
    # Their slots may be taken.
    assert (world.host.used_blocks, world.host.free_blocks, world.host.cached_blocks) == (0, 2, 0)
    assert world.tiers() == {"device": 3}


def test_a_block_whose_priority_rises_is_copied_later():
    world = World(8, host_blocks=8)
    world.cache(list(range(4)), retention=wish(10))
    world.back_up()
    assert world.backups == 0
    world.cache(list(range(5)), session_id="other", retention=wish(50))
    world.back_up()
    assert world.backups == 2
    world.check()


def test_what_stands_above_what_is_worth_it_is_copied_whatever_its_priority():
    world = World(3, host_blocks=3)
    world.cache(PROMPT[:8], retention=wish(90))
    # Its own wish has ended, and the first block is in use.
    world.run([*PROMPT[:4], 70], "first")
    fill_rest = world.cache([80, 81, 82])
    assert fill_rest.transfers
    assert world.tiers()["host"] == 1
    world.back_up()
    head = next(block for block in world.queries.records("e") if block.token_ids == (0, 1, 2, 3))
    assert head.backup is not None
    world.check()


def test_only_so_many_are_copied_at_a_time():
    world = World(3 * MAX_BACKUPS, host_blocks=3 * MAX_BACKUPS)
    world.cache(list(range(2 * MAX_BACKUPS * BLOCK)))
    world.renew()
    world.renew()
    assert len(world.queries.executor_transfers("e")) == MAX_BACKUPS
    world.run_executor_copies()
    world.renew()
    assert len(world.queries.executor_transfers("e")) == MAX_BACKUPS
    world.back_up()
    assert world.backups == 2 * MAX_BACKUPS
    world.check()


def test_write_through_can_be_switched_off():
    world = World(4, host_blocks=4, config=dataclasses.replace(CONFIG, write_through=False))
    world.cache(PROMPT)
    world.renew()
    assert world.queries.executor_transfers("e") == []
    # What comes back from the host keeps its slot all the same.
    world.fill()
    world.finish("fill100")
    world.run(PROMPT, "again")
    world.check()
    assert world.backups == 2


def test_a_failed_copy_is_no_backup_and_is_not_tried_again():
    world = World(4, host_blocks=4)
    world.cache(PROMPT)
    world.renew()
    world.run_executor_copies(fail=True)
    world.check()
    assert (world.backups, world.host.free_blocks) == (0, 4)
    world.renew()
    assert world.queries.executor_transfers("e") == []


def test_blocks_from_the_disk_get_theirs_in_the_host():
    world = World(2, host_blocks=1, disk_blocks=6)
    for first in (0, 10, 20, 30):
        world.cache(list(range(first, first + 4)))
    on_disk = next(block.token_ids[0] for block in world.queries.records("e") if block.tier is TierKind.DISK)
    world.run(list(range(on_disk, on_disk + 5)), "again")
    world.check()
    assert all(block.backup is None or block.backup.tier is TierKind.HOST for block in world.queries.records("e"))
    assert not any(
        block.token_ids[0] == on_disk and block.tier is TierKind.DISK for block in world.queries.records("e")
    )


# What they are good for


def test_an_eviction_of_what_lies_below_already_needs_no_copy():
    world = backed_up()
    before = world.queries.last_event
    assert world.fill().transfers == ()
    world.check()
    assert world.tiers()["host"] == 3
    moved = [event for event in world.queries.events_after(before) if event.kind is EventKind.UPDATED]
    assert {event.block.tier for event in moved} == {TierKind.HOST}
    assert len(moved) == 3
    world.finish("fill100")
    assert world.run(PROMPT, "again").cached_tokens == 11
    world.check()


def test_a_demotion_of_what_lies_below_already_needs_no_copy():
    world = backed_up()
    hints = Hints("0.1", "m", (HintAction("one", "Demote", "0.1", {"tier": "host"}),))
    ((answer,), _) = world.operators.hint(Prefix(tuple(PROMPT)), hints, None)
    assert answer.num_blocks == 3
    assert world.queries.executor_transfers("e") == []
    assert (world.tiers(), world.free) == ({"host": 3}, 4)
    world.check()


def test_what_is_not_worth_moving_any_more_goes_with_its_backup():
    world = World(4, host_blocks=4)
    world.cache(PROMPT, retention=wish(90, 5.0), session_id="s")
    world.back_up()
    assert world.backups == 3
    world.cache([*PROMPT, 70], retention=wish(10), session_id="s")
    world.fill()
    world.check()
    assert "host" not in world.tiers()
    assert world.host.free_blocks == 4


def test_device_blocks_with_backups_outlive_the_executor():
    world = backed_up()
    before = world.queries.last_event
    world.cache(list(range(50, 53)))
    assert world.start_executor() == (0, 3)
    world.check()
    told = [(event.kind, event.cause) for event in world.queries.events_after(before)]
    assert told.count((EventKind.REMOVED, RemovalCause.EXECUTOR_LOST)) == 1
    assert told.count((EventKind.UPDATED, RemovalCause.NONE)) == 3
    world.sync()
    assert world.run(PROMPT, "again").cached_tokens == 11
    world.check()


def test_what_the_device_has_lost_comes_back_from_its_backup():
    world = backed_up()
    # A step wrote to the second block's slot.
    world.device.written[0, 2] = 99
    assert world.restart_manager() == (1, 2)
    world.check()
    assert world.found(PROMPT) == 12
