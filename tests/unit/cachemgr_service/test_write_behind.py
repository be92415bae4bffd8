"""Pending changes: coalesced, bounded, and never older than what happened since."""

from cachemgr.blocks.block_record import BlockRecord
from cachemgr.persistence.write_queue import BlockQueue
from cachemgr.types import TierKind

DEVICE = TierKind.DEVICE


def block(slot: int, step: int = 0) -> BlockRecord:
    return BlockRecord(0, slot, bytes(32), None, 0, bytes(8), None, None, step)


def test_changes_of_one_place_become_one() -> None:
    queue = BlockQueue(10)
    for step in range(5):
        queue.put("e", 7, (0, DEVICE, 1), block(1, step))
    queue.put("e", 7, (0, DEVICE, 2), block(2))
    queue.put("e", 7, (0, DEVICE, 2), None)
    assert queue.pending == 2
    taken = queue.take()
    assert taken is not None
    assert taken[0] == "e"
    assert taken[1].blocks == {(0, DEVICE, 1): block(1, 4), (0, DEVICE, 2): None}
    assert queue.pending == 0
    assert queue.take() is None


def test_clearing_drops_what_was_pending() -> None:
    queue = BlockQueue(10)
    queue.put("e", 7, (0, DEVICE, 1), block(1))
    queue.clear("e", 8)
    queue.put("e", 8, (0, DEVICE, 2), block(2))
    taken = queue.take()
    assert taken is not None
    assert (taken[1].epoch, taken[1].cleared, list(taken[1].blocks)) == (8, True, [(0, DEVICE, 2)])


def test_beyond_the_bound_everything_is_written_again_later() -> None:
    queue = BlockQueue(3)
    for slot in range(1, 6):
        queue.put("e", 7, (0, DEVICE, slot), block(slot))
    assert queue.pending == 0
    taken = queue.take()
    assert taken is not None
    assert (taken[1].resync, taken[1].epoch, taken[1].blocks) == (True, 7, {})


def test_one_executors_overflow_leaves_another_alone() -> None:
    queue = BlockQueue(3)
    queue.put("a", 1, (0, DEVICE, 1), block(1))
    for slot in range(1, 5):
        queue.put("b", 1, (0, DEVICE, slot), block(slot))
    taken = dict([queue.take() or ("", None), queue.take() or ("", None)])
    assert not taken["a"].resync  # type: ignore[union-attr]
    assert taken["b"].resync  # type: ignore[union-attr]


def test_what_failed_comes_back_below_what_is_newer() -> None:
    queue = BlockQueue(10)
    queue.put("e", 7, (0, DEVICE, 1), block(1, 1))
    queue.put("e", 7, (0, DEVICE, 2), block(2, 1))
    taken = queue.take()
    assert taken is not None
    queue.put("e", 7, (0, DEVICE, 2), None)
    queue.give_back(*taken)
    assert queue.pending == 2
    again = queue.take()
    assert again is not None
    assert again[1].blocks == {(0, DEVICE, 1): block(1, 1), (0, DEVICE, 2): None}


def test_what_failed_is_void_after_a_newer_epoch() -> None:
    queue = BlockQueue(10)
    queue.put("e", 7, (0, DEVICE, 1), block(1))
    taken = queue.take()
    assert taken is not None
    queue.clear("e", 8)
    queue.give_back(*taken)
    again = queue.take()
    assert again is not None
    assert (again[1].epoch, again[1].blocks) == (8, {})


def test_what_failed_counts_against_the_bound() -> None:
    queue = BlockQueue(3)
    for slot in (1, 2):
        queue.put("e", 7, (0, DEVICE, slot), block(slot))
    taken = queue.take()
    assert taken is not None
    for slot in (3, 4):
        queue.put("e", 7, (0, DEVICE, slot), block(slot))
    queue.give_back(*taken)
    again = queue.take()
    assert again is not None
    assert again[1].resync
    assert queue.pending == 0
