"""A block, and the node of the prefix tree that it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from cachemgr.retention.priority import DEFAULT_PRIORITY

if TYPE_CHECKING:
    from cachemgr.blocks.cache_scope import Account, CacheScope
    from cachemgr.retention.leases import Lease


class Writer(Protocol):
    """The sequence that fills a block."""

    @property
    def handle(self) -> int: ...
    @property
    def sequence_id(self) -> str: ...
    @property
    def scope(self) -> CacheScope: ...


class Node:
    """A node of the prefix tree: a block, the root of a chain, or the tombstone of a removed block.

    `children` is None, the only child, or a list sorted by tokens, as the functions of `radix_tree` keep it.
    """

    __slots__ = ("children", "key")

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.children: Block | list[Block] | None = None


class Block(Node):
    """A slot with its content. Indexed when it has a parent; then key, tokens, depth and scope are set.

    `writer` is the sequence that fills it, until the block is committed.
    """

    __slots__ = (
        "children_in_tier",
        "depth",
        "hits",
        "index",
        "lease",
        "lru_next",
        "lru_prev",
        "parent",
        "priority",
        "recency",
        "refs",
        "scope",
        "stored_step",
        "tokens",
        "writer",
    )

    def __init__(self, index: int, writer: Writer | None = None) -> None:
        # Not by way of super: a block is made for every one that is taken.
        self.key = b""
        self.children = None
        self.index = index
        self.refs = 0
        self.writer = writer
        self.parent: Node | None = None
        self.tokens = b""
        self.depth = 0
        self.scope: CacheScope | None = None
        # The largest among its leases, and the first of these.
        self.priority = DEFAULT_PRIORITY
        self.lease: Lease | None = None
        self.stored_step = 0
        # Children in its own tier, with full attention.
        self.children_in_tier = 0
        self.recency = 0
        # Prefix hits since it entered the prefix tree.
        self.hits = 0
        self.lru_prev: Block | None = None
        self.lru_next: Block | None = None

    def detach(self) -> None:
        """Drops its references to other blocks, which only a full garbage collection would free."""
        self.parent = self.children = self.lru_prev = self.lru_next = None


def account_of(block: Block) -> Account | None:
    """The account that a block counts against."""
    scope = block.scope
    return None if scope is None else scope.account
