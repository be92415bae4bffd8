"""A manager that starts again restores only blocks that the device still holds."""

import dataclasses

import pytest

from cachemgr.blocks.block_record import LeaseRecord
from cachemgr.manager import CacheManager
from cachemgr.slices import at_once
from cachemgr.types import ForgetTarget, Prefix, TierKind
from protos.kvcommon.tokens import pack
from tests.support.in_process_manager import CONFIG, World, retain

PROMPT = list(range(10))


def cached(**options):
    world = World(8, **options)
    world.cache(PROMPT, salt="x", adapter_id=3)
    return world


def restart(world, stored=None, spec=None):
    """A new manager process with the contents of the store; returns the blocks that it restored."""
    stored = list(world.journal.blocks.values()) if stored is None else stored
    world.journal.blocks = {block.tier_slot: block for block in stored}
    world.manager = CacheManager(2, lambda: world.now, CONFIG, world.journal)
    world.start_scheduler()
    assert not world.manager.queries.knows_executor("e")
    return world.manager.register_executor(spec or world.spec(), stored).device_blocks


def test_the_store_learns_of_a_lease_from_a_shorter_block():
    world = World(8)
    world.cache([1, 2], retention=retain(60))
    world.admit([1, 2, 3, 4, 5], "a")
    # While it is copied from, the shorter block stays beside the longer one.
    world.admit([1, 2, 6, 7, 8], "b")
    world.step(20, names={"a"})
    world.confirm()
    world.sync()
    stored = sorted(world.journal.blocks.values(), key=lambda block: len(block.tokens))
    assert [len(block.token_ids) for block in stored] == [2, 4]
    assert restart(world, stored) == 1
    (block,) = world.queries.records("e")
    assert [lease.priority for lease in block.leases] == [60]


def test_a_block_taken_over_by_a_sequence_that_computes_nothing_is_restored():
    world = cached(config=dataclasses.replace(CONFIG, copy_on_partial_reuse=False))
    before = {block.tier_slot for block in world.queries.records("e")}
    assert world.admit([*PROMPT, 7], "b", salt="x", adapter_id=3).cached_tokens == 10
    world.release("b")
    assert restart(world) == 3
    assert {block.tier_slot for block in world.queries.records("e")} == before


def test_a_block_that_was_written_after_its_commit_is_dropped_with_its_children():
    world = cached()
    (block,) = [block for block in world.journal.blocks.values() if block.depth == 1]
    world.device.written[0, block.slot] = block.stored_step + 1
    assert restart(world) == 1


def test_blocks_read_for_another_epoch_are_not_restored():
    world = cached()
    records = list(world.journal.blocks.values())
    world.begin_recovery()
    world.manager.restore_blocks("e", world.executor_epoch + 1, records)
    assert list(world.queries.records("e")) == []


def drop_parent(blocks):
    return [block for block in blocks if block.depth != 1]


def change(at, **values):
    def changed(blocks):
        return [block._replace(**values) if block.depth == at else block for block in blocks]

    return changed


@pytest.mark.parametrize(
    ("damage", "kept"),
    [
        (drop_parent, 1),
        (change(1, tokens=pack([4, 5, 6, 8]).tobytes()), 1),
        (change(1, tokens=b""), 1),
        (change(0, salt=None), 0),
        (change(0, slot=9), 0),
        (change(0, slot=0), 0),
        (change(0, group=1), 0),
        (change(0, leases=(LeaseRecord("request/a", 101, None, None),)), 0),
        (change(2, slot=1), 2),
        (change(2, depth=5), 2),
        (change(1, parent_key=None), 1),
        (change(0, depth=1), 0),
    ],
)
def test_an_entry_that_does_not_hold_is_dropped(damage, kept, worlds):
    world = cached()
    blocks = damage(sorted(world.journal.blocks.values(), key=lambda block: block.depth))
    world.manager = CacheManager(2, lambda: world.now, CONFIG)
    world.start_scheduler()
    assert world.manager.register_executor(world.spec(), blocks).device_blocks == kept
    assert world.queries.check_pool() == []
    # Its store hears of nothing.
    worlds.clear()


def test_dropped_blocks_leave_the_store_and_restored_ones_are_not_written_again(worlds):
    world = cached()
    blocks = sorted(world.journal.blocks.values(), key=lambda block: block.depth)
    removed = []
    world.journal.removed = lambda executor_id, *place: removed.append(place)
    world.journal.stored = None
    restart(world, drop_parent(blocks))
    assert removed == [(0, TierKind.DEVICE, blocks[2].slot)]
    worlds.clear()


def test_no_copy_overwrites_slots_of_sequences_that_still_run_in_a_late_executor():
    world = World(8, host_blocks=4)
    world.run(PROMPT, "live")
    world.silence_executor()
    at_once(world.operators.forget(ForgetTarget(prefix=Prefix((0, 1, 2, 3))), validate_only=False))
    # The scheduler does not know yet that its sequence is void: a step may read these slots, and write after them.
    world.renew()
    assert world.queries.executor_transfers("e") == []
    world.run_executor_copies()
    world.step()
    world.sync()
    assert not world.live
    world.sync()
    assert len(world.queries.executor_transfers("e")) == 2
    world.run_executor_copies()
    world.check()
    assert world.free == 8
