"""Pending changes: coalesced, bounded, and never older than later events."""

from functools import partial

from cachemgr.blocks.block_record import BlockRecord
from cachemgr.persistence.pending_changes import Changes, PendingBlocks
from cachemgr.types import Slot, TierKind

DEVICE = TierKind.DEVICE


def block(slot: int, step: int = 0) -> BlockRecord:
    return BlockRecord(0, slot, bytes(32), None, 0, bytes(8), None, None, step)


def put(queue: PendingBlocks, *slots: int, executor_id: str = "e", epoch: int = 7, step: int = 0) -> None:
    """A change of a block in each of the slots."""
    for slot in slots:
        queue.put(executor_id, epoch, (0, DEVICE, slot), partial(block, slot, step))


def take(queue: PendingBlocks) -> tuple[str, Changes]:
    taken = queue.take()
    assert taken is not None
    return taken


def current(changes: Changes) -> dict[Slot, BlockRecord | None]:
    """The blocks that would be written now."""
    return {slot: block and block() for slot, block in changes.blocks.items()}


def test_changes_of_one_slot_become_one() -> None:
    queue = PendingBlocks(10)
    for step in range(5):
        put(queue, 1, step=step)
    put(queue, 2)
    queue.put("e", 7, (0, DEVICE, 2), None)
    assert queue.pending == 2
    executor_id, changes = take(queue)
    assert executor_id == "e"
    assert current(changes) == {(0, DEVICE, 1): block(1, 4), (0, DEVICE, 2): None}
    assert queue.pending == 0
    assert queue.take() is None


def test_clearing_drops_what_was_pending() -> None:
    queue = PendingBlocks(10)
    put(queue, 1)
    queue.clear("e", 8)
    put(queue, 2, epoch=8)
    _, changes = take(queue)
    assert (changes.epoch, changes.cleared, list(changes.blocks)) == (8, True, [(0, DEVICE, 2)])


def test_beyond_the_bound_everything_is_written_again_later() -> None:
    queue = PendingBlocks(3)
    put(queue, 1, 2, 3, 4, 5)
    assert queue.pending == 0
    _, changes = take(queue)
    assert (changes.resync, changes.epoch, changes.blocks) == (True, 7, {})


def test_one_executors_overflow_leaves_another_alone() -> None:
    queue = PendingBlocks(3)
    put(queue, 1, executor_id="a")
    put(queue, 1, 2, 3, 4, executor_id="b")
    assert {name: changes.resync for name, changes in (take(queue), take(queue))} == {"a": False, "b": True}


def test_failed_changes_are_queued_again_below_newer_ones() -> None:
    queue = PendingBlocks(10)
    put(queue, 1, 2)
    failed = take(queue)
    queue.put("e", 7, (0, DEVICE, 2), None)
    queue.requeue(*failed)
    assert queue.pending == 2
    assert current(take(queue)[1]) == {(0, DEVICE, 1): block(1), (0, DEVICE, 2): None}


def test_what_failed_is_void_after_a_newer_epoch() -> None:
    queue = PendingBlocks(10)
    put(queue, 1)
    failed = take(queue)
    queue.clear("e", 8)
    queue.requeue(*failed)
    _, changes = take(queue)
    assert (changes.epoch, changes.blocks) == (8, {})


def test_what_failed_counts_against_the_bound() -> None:
    queue = PendingBlocks(3)
    put(queue, 1, 2)
    failed = take(queue)
    put(queue, 3, 4)
    queue.requeue(*failed)
    assert take(queue)[1].resync
    assert queue.pending == 0
