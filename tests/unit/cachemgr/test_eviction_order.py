"""The eviction order of blocks."""

from collections.abc import Iterator
from heapq import merge

from hypothesis import given
from hypothesis import strategies as st

from cachemgr.blocks.block import Block
from cachemgr.blocks.eviction_order import EvictionQueue
from tests.support.work import work_of


def in_order(order: EvictionQueue) -> Iterator[Block]:
    """All blocks in eviction order."""
    for _, _, ring in order.walk():
        blocks = list(ring)
        late = sorted((block for block, is_linked in blocks if not is_linked), key=lambda one: (one.recency, one.index))
        yield from merge((block for block, is_linked in blocks if is_linked), late, key=lambda one: one.recency)


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from(["use", "take", 5, 35, 100])), max_size=200))
def test_blocks_stay_in_order_of_use_through_every_change_of_priority(operations):
    order, blocks, listed = EvictionQueue(), [Block(slot) for slot in range(10)], set()
    for use, (slot, operation) in enumerate(operations):
        block = blocks[slot]
        if block in listed:
            order.remove(block)
            listed.discard(block)
        if operation == "use":
            block.recency = use + 1
            order.append(block)
        elif operation != "take":
            block.priority = operation
            order.insert(block)
        listed.update([block] if operation != "take" else [])
        expected = sorted(listed, key=lambda one: (one.priority, one.recency, one.index))
        found = list(in_order(order))
        assert sorted(found, key=lambda one: (one.priority, one.recency, one.index)) == expected
        first = order.first()
        assert (first is None) == (not expected)
        assert first is None or (first.priority, first.recency) == (expected[0].priority, expected[0].recency)
    for block in listed:
        order.remove(block)
    assert all(not bit for _, bit, _ in order.walk())


@given(st.integers(0, 5), st.integers(0, 5))
def test_a_block_that_has_changed_over_to_another_order_has_left_the_first(older, newer):
    here, there, blocks = EvictionQueue(), EvictionQueue(), [Block(slot) for slot in range(6)]
    for order in (here, there):
        # Both have blocks that were used before and after.
        for recency in (0, 100):
            end = Block(0)
            end.recency = recency
            order.append(end)
    for use, block in enumerate(blocks, 1):
        block.recency = use
        here.insert(block)
    for slot in {older, newer}:
        here.remove(blocks[slot])
        there.insert(blocks[slot])
    listed = [[block.recency for block in in_order(order)] for order in (here, there)]
    moved = sorted({older + 1, newer + 1})
    assert listed == [[0, *sorted({1, 2, 3, 4, 5, 6} - set(moved)), 100], [0, *moved, 100]]


def between_others(count: int) -> tuple[EvictionQueue, list[Block]]:
    """An order with N = `count` blocks that were released between two others, the oldest first."""
    order, blocks = EvictionQueue(), [Block(slot) for slot in range(count + 2)]
    for recency, block in enumerate(blocks):
        block.recency = recency
    order.append(blocks[0])
    order.append(blocks[-1])
    for block in blocks[1:-1]:
        order.insert(block)
    return order, blocks[1:-1]


def test_the_work_of_an_insertion_is_independent_of_removed_blocks():
    def most_work(count: int) -> int:
        order, blocks = between_others(count)

        def change_position(block: Block) -> None:
            order.remove(block)
            block.recency += count
            order.insert(block)

        last = Block(count + 2)
        last.recency = 10 * count
        order.append(last)
        return max(work_of(lambda: change_position(block)) for _ in range(3) for block in blocks)  # noqa: B023

    assert most_work(400) < 2 * most_work(100)


def test_the_first_block_is_found_after_very_many_removals():
    order, blocks = between_others(400)
    first = order.first()
    assert first is not None
    order.remove(first)
    for block in blocks[:300]:
        order.remove(block)
    assert order.first() is blocks[300]
    for block in blocks[300:]:
        order.remove(block)
    assert order.first() is not None
    assert order.size == 1
