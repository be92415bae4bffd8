"""The sorted children of a node against a plain list."""

from hypothesis import given
from hypothesis import strategies as st

from cachemgr.blocks.block import Block, CacheScope, Node
from cachemgr.blocks.prefix_tree import (
    add_child,
    children_of,
    closest_child,
    covered_children,
    covering_child,
    remove_child,
)
from protos.kvcommon.tokens import pack, packed_bytes

DOMAIN = CacheScope(b"model")
TOKENS = st.lists(st.sampled_from([0, 1, 256, 257]), min_size=1, max_size=5)


def build(lists):
    node, blocks = Node(b""), []
    for slot, tokens in enumerate(lists):
        block = Block(slot)
        block.scope = DOMAIN
        block.tokens = packed_bytes(pack(tokens))
        add_child(node, block)
        blocks.append(block)
    return node, blocks


def common(one, other):
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    return count


@given(st.lists(TOKENS, max_size=20, unique_by=tuple), TOKENS, st.sets(st.integers(0, 19)))
def test_the_closest_of_those_that_may_be_used_has_the_longest_common_prefix(lists, wanted, usable):
    node, _ = build(lists)
    best = max((common(tokens, wanted) for slot, tokens in enumerate(lists) if slot in usable), default=0)
    block, length = closest_child(node, packed_bytes(pack(wanted)), b"", lambda block: block.index in usable)
    assert length == best
    assert (block is None) == (best == 0)
    if block is not None:
        assert block.index in usable
        assert common(lists[block.index], wanted) == best


def test_of_very_many_siblings_few_are_looked_at():
    looked_at = []
    node, _ = build([1, number, 2] for number in range(0, 20_000, 2))
    wanted = packed_bytes(pack([1, 10_001, 2]))
    assert closest_child(node, wanted, b"", looked_at.append) == (None, 0)
    assert len(looked_at) <= 64
    looked_at.clear()
    assert closest_child(node, packed_bytes(pack([2, 1])), b"", looked_at.append) == (None, 0)
    assert not looked_at


@given(st.lists(TOKENS, max_size=8, unique_by=tuple), TOKENS)
def test_covering_and_covered_children_are_found(lists, wanted):
    node, _ = build(lists)
    packed = packed_bytes(pack(wanted))
    longer = covering_child(node, packed)
    assert (longer is not None) == any(tokens[: len(wanted)] == wanted for tokens in lists)
    assert longer is None or lists[longer.index][: len(wanted)] == wanted
    expected = sorted((t for t in lists if len(t) < len(wanted) and wanted[: len(t)] == t), key=len, reverse=True)
    assert [lists[block.index] for block in covered_children(node, packed)] == expected


@given(st.lists(TOKENS, min_size=1, max_size=8, unique_by=tuple), st.randoms())
def test_children_leave_in_any_order(lists, random):
    node, blocks = build(lists)
    random.shuffle(blocks)
    while blocks:
        remove_child(node, blocks.pop())
        assert set(children_of(node)) == set(blocks)
    assert node.children is None
