"""The prefix tree of a pool: blocks by key, and the children of each block.

The children of a node are sorted by their extra bytes, then by their packed tokens. In this order, the child with the
longest common prefix with given tokens is next to the position where these tokens would be inserted. Children that
begin with all these tokens follow directly after this position. Tokens with other extra bytes have no common prefix.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from operator import attrgetter

from cachemgr.blocks.block import Block, Node
from protos.kvcommon.tokens import TOKEN_BYTES

_ORDER = attrgetter("scope.extra", "tokens")
# How many children are examined on each side of a position, if the nearest children cannot be used.
_MOST_LOOKED_AT = 32


class PrefixTree:
    """The indexed blocks of a pool by key, and as a tree.

    A tombstone is a node without a block but with children. Roots are tombstones. Other tombstones replace blocks that
    have left the tree: their children stay if the pool has an attention window, or if they are in lower tiers.
    """

    __slots__ = ("by_key", "tombstones")

    def __init__(self) -> None:
        self.by_key: dict[bytes, Block] = {}
        # Only tombstones that have children.
        self.tombstones: dict[bytes, Node] = {}

    def node(self, key: bytes) -> Node | None:
        """The block with this key, or its tombstone; None if there is neither."""
        return self.by_key.get(key) or self.tombstones.get(key)

    def as_parent(self, key: bytes) -> Node:
        """The node with this key, or a new tombstone; the caller must add a child."""
        node = self.node(key)
        if node is None:
            node = self.tombstones[key] = Node(key)
        return node

    def link(self, block: Block, parent: Node) -> None:
        """Enters a block whose key, tokens and scope are set. The block takes over the children of its tombstone."""
        if not isinstance(parent, Block):
            # After the caller got the tombstone, the removal of its last child may have removed the tombstone.
            self.tombstones[parent.key] = parent
        block.parent = parent
        add_child(parent, block)
        tombstone = self.tombstones.pop(block.key, None)
        if tombstone is not None:
            adopt_children(block, tombstone)
        self.by_key[block.key] = block

    def replace(self, old: Block, block: Block) -> None:
        """Replaces a block by a new block with the same key and tokens."""
        parent = old.parent
        assert parent is not None
        remove_child(parent, old)
        old.parent, block.parent = None, parent
        add_child(parent, block)
        adopt_children(block, old)
        self.by_key[block.key] = block

    def unlink(self, block: Block, parent: Node) -> None:
        """Removes a block; a tombstone becomes the parent of its children."""
        remove_child(parent, block)
        if parent.children is None and not isinstance(parent, Block):
            del self.tombstones[parent.key]
        key = block.key
        del self.by_key[key]
        if block.children is not None:
            tombstone = self.tombstones[key] = Node(key)
            adopt_children(tombstone, block)
        block.parent = None

    def descendants(self, node: Node) -> Iterator[Block]:
        """All blocks below a node, children before parents."""
        found, at = list(children_of(node)), 0
        while at < len(found):
            found.extend(children_of(found[at]))
            at += 1
        return reversed(found)


def adopt_children(node: Node, old: Node) -> None:
    """Passes the children of `old` on to `node`, which has none."""
    node.children, old.children = old.children, None
    for child in children_of(node):
        child.parent = node


def children_of(node: Node) -> tuple[Block, ...]:
    children = node.children
    if children is None:
        return ()
    return (children,) if isinstance(children, Block) else tuple(children)


def add_child(node: Node, block: Block) -> None:
    children = node.children
    if children is None:
        node.children = block
        return
    if isinstance(children, Block):
        children = node.children = [children]
    children.insert(bisect_left(children, _ORDER(block), key=_ORDER), block)


def remove_child(node: Node, block: Block) -> None:
    children = node.children
    if children is block:
        node.children = None
        return
    assert isinstance(children, list)
    index = bisect_left(children, _ORDER(block), key=_ORDER)
    while children[index] is not block:
        index += 1
    del children[index]
    if len(children) == 1:
        node.children = children[0]


def closest_child(
    node: Node, tokens: bytes, extra: bytes = b"", is_usable: Callable[[Block], bool] | None = None
) -> tuple[Block | None, int]:
    """The usable child with the longest common prefix, and the prefix length in tokens; (None, 0) if there is none.

    The common prefix shrinks with the distance from the position of the tokens. So the search runs outward from there.
    On each side, the search ends once no child further away can have a longer common prefix. Few children are examined,
    because very many children of a root may be in use: a shorter match costs less than examining all of them.
    """
    children = node.children
    if children is None or not tokens:
        return None, 0
    near = children if isinstance(children, list) else [children]
    index = bisect_left(near, (extra, tokens), key=_ORDER)
    best, longest = None, 0
    before = range(index - 1, max(-1, index - 1 - _MOST_LOOKED_AT), -1)
    after = range(index, min(len(near), index + _MOST_LOOKED_AT))
    for side in (before, after):
        for at in side:
            block = near[at]
            common = _common_tokens(block.tokens, tokens) if _ORDER(block)[0] == extra else 0
            if common <= longest:
                break
            if is_usable is None or is_usable(block):
                best, longest = block, common
                break
    return best, longest


def covering_child(node: Node, tokens: bytes, extra: bytes = b"") -> Block | None:
    """Returns a child that begins with these tokens; None if there is none."""
    children = node.children if isinstance(node.children, list) else children_of(node)
    index = bisect_left(children, (extra, tokens), key=_ORDER)
    for block in children[index : index + 1]:
        if _ORDER(block)[0] == extra and block.tokens.startswith(tokens):
            return block
    return None


def longer_sibling(node: Node, block: Block) -> Block | None:
    """Returns a sibling that begins with all tokens of this block; None if there is none."""
    children = node.children
    if not isinstance(children, list):
        return None
    # Siblings that begin with these tokens come directly after them.
    index = bisect_right(children, _ORDER(block), key=_ORDER)
    if index < len(children):
        other = children[index]
        if other.tokens.startswith(block.tokens) and _ORDER(other)[0] == _ORDER(block)[0]:
            return other
    return None


def covered_children(node: Node, tokens: bytes, extra: bytes = b"") -> list[Block]:
    """Children whose tokens are a proper prefix of these, longest first."""
    children = [node.children] if isinstance(node.children, Block) else node.children or []
    found: list[Block] = []
    beginning = tokens
    index = bisect_left(children, (extra, beginning), key=_ORDER)
    while index > 0 and _ORDER(children[index - 1])[0] == extra:
        # A child that is a prefix of `beginning` is the previous child, or a prefix of what the previous child and
        # `beginning` have in common.
        block = children[index - 1]
        common = _common_tokens(block.tokens, beginning) * TOKEN_BYTES
        beginning = tokens[:common]
        if not common:
            break
        if common == len(block.tokens):
            found.append(block)
            index = bisect_left(children, (extra, beginning), key=_ORDER)
        else:
            index = bisect_right(children, (extra, beginning), key=_ORDER)
    return found


def _common_tokens(one: bytes, other: bytes) -> int:
    shorter = min(len(one), len(other))
    if one[:shorter] == other[:shorter]:
        return shorter // TOKEN_BYTES
    # The XOR of both has its lowest set bit in the first byte that differs.
    differing = int.from_bytes(one[:shorter], "little") ^ int.from_bytes(other[:shorter], "little")
    return ((differing & -differing).bit_length() - 1) // (8 * TOKEN_BYTES)
