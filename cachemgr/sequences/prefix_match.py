"""Matching a prompt against the cached blocks of all groups of an executor."""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from cachemgr.blocks.block import Block, Node
from cachemgr.blocks.block_pool import BlockPool
from cachemgr.blocks.extra_keys import extra_bytes, prefix_keys
from cachemgr.blocks.prefix_tree import children_of, closest_child, covering_child
from cachemgr.sequences.sequence import Sequence, first_needed
from cachemgr.types import Prefix, TierKind
from protos.kvcommon.block_keys import child_key, root_key
from protos.kvcommon.tokens import TOKEN_BYTES, pack, packed_bytes, unpack

if TYPE_CHECKING:
    from cachemgr.blocks.block import Block
    from cachemgr.blocks.block_pool import BlockPool
    from cachemgr.sequences.clients import Executor
    from cachemgr.types import ExecutorSpec


_START = attrgetter("start")
# How many children of a block are looked at to find its continuation.
_MOST_FOLLOWING = 32


class Partial(enum.Enum):
    """How to use a block when only its beginning matches."""

    NONE = "nothing"
    # Copy the block only if it holds exactly the rest of the reusable prompt, so that its key is known.
    EXACT = "exact key"
    # Copy the block's beginning.
    COPY = "copy"
    # Give the block itself to the sequence, if the block has no reference and no child.
    TAKE_OVER = "take over"


@dataclass(slots=True)
class Match:
    """`tokens` leading tokens are cached. `blocks` has each group's whole blocks, None if the window needs none.

    The last `num_copied` tokens are the beginning of `sources[group]`, which is copied, or taken over if `in_place`.
    `writer` is the sequence that has yet to compute the end of the match.
    """

    tokens: int = 0
    blocks: list[list[Block | None]] = field(default_factory=list)
    sources: list[Block] = field(default_factory=list)
    num_copied: int = 0
    in_place: bool = False
    writer: Sequence | None = None


def find_continuation(sequence: Sequence, most: int) -> tuple[int, ...]:
    """Returns at most `most` tokens that follow a sequence's tokens in cached blocks of its scope.

    Among several continuations, the block with most hits counts; only a few of very many blocks are looked at.
    """
    pool = next((table.pool for table in sequence.tables if table.pool.window is None), sequence.tables[0].pool)
    size, length = sequence.block_size, len(sequence.tokens)
    full = length // size
    node = pool.tree.node(sequence.key(full - 1)) if most else None
    rest, found = sequence.packed(full * size, length), bytearray()
    if node is not None and rest:
        node = block = covering_child(node, rest)
        found += b"" if block is None else block.tokens[len(rest) :]
    while node is not None and len(found) < most * TOKEN_BYTES:
        near = node.children if isinstance(node.children, list) else children_of(node)
        following = [block for block in islice(near, _MOST_FOLLOWING) if block.scope is None or not block.scope.extra]
        node = block = max(following, key=attrgetter("hits"), default=None)
        found += b"" if block is None else block.tokens
    return unpack(bytes(found[: most * TOKEN_BYTES]))


def no_match(sequence: Sequence) -> Match:
    return Match(blocks=[[] for _ in sequence.tables])


class _Walk(NamedTuple):
    """What the groups have of a prompt. found: each group's blocks up to the first block that full attention misses.

    runs: for each group with a window, by index: the start of the run of blocks that ends there.
    """

    top: int
    found: list[list[Block | None]]
    runs: list[list[int] | None]


class PrefixMatcher:
    """Finds the longest match of a sequence in `lowest` and higher tiers. One walk serves every kind of partial use.

    A match leaves at least the last token to compute, and all tokens whose scores count.
    """

    def __init__(self, sequence: Sequence, lowest: TierKind = TierKind.DISK) -> None:
        self._sequence = sequence
        self._lowest = lowest
        self._size = sequence.block_size
        self._limit = len(sequence.tokens) - 1
        if sequence.eviction is not None:
            eviction = sequence.eviction
            self._limit = min(self._limit, eviction.policy.reusable(len(sequence.tokens), eviction.prompt))
        self._pools = [table.pool for table in sequence.tables]
        # By whether pending blocks, which another sequence has yet to compute, count.
        self._walks: dict[bool, _Walk] = {}

    def longest(self, partial: Partial) -> Match:
        """The longest match, with this use of a block when only its beginning matches."""
        match = self._find(partial, pending=True)
        if match.writer is not None and not _single_writer_covers(match):
            match = self._find(partial, pending=False)
        match.in_place = partial is Partial.TAKE_OVER and match.num_copied > 0
        return match

    def _find(self, partial: Partial, *, pending: bool) -> Match:
        if pending not in self._walks:
            self._walks[pending] = self._walk(pending=pending)
        walk = self._walks[pending]
        for block_index in range(walk.top, -1, -1):
            start = block_index * self._size
            if partial is not Partial.NONE:
                sources, copied = (
                    self._exact(block_index) if partial is Partial.EXACT else self._partial(block_index, partial)
                )
                if copied and self._is_covered(walk, block_index, start + copied):
                    return self._match(walk, block_index, start + copied, sources)
            if self._is_covered(walk, block_index, start):
                return self._match(walk, block_index, start, [])
        raise AssertionError("an empty match is always covered")

    def _walk(self, *, pending: bool) -> _Walk:
        """Looks every key up once in each group, up to the first block that a group with full attention misses."""
        top = self._limit // self._size
        found: list[list[Block | None]] = [[] for _ in self._pools]
        for pool, blocks in zip(self._pools, found, strict=True):
            if pool.window is None:
                for block_index in range(top):
                    block = self._block(pool, block_index, pending=pending)
                    if block is None:
                        break
                    blocks.append(block)
                top = len(blocks)
        runs: list[list[int] | None] = []
        for pool, blocks in zip(self._pools, found, strict=True):
            if pool.window is None:
                del blocks[top:]
                runs.append(None)
                continue
            ends, begin = [0], 0
            for block_index in range(top):
                block = self._block(pool, block_index, pending=pending)
                blocks.append(block)
                if block is None:
                    begin = block_index + 1
                ends.append(begin)
            runs.append(ends)
        return _Walk(top, found, runs)

    def _block(self, pool: BlockPool, block_index: int, *, pending: bool) -> Block | None:
        key = self._sequence.key(block_index)
        block = pool.tree.by_key.get(key)
        if block is not None:
            return block if self._is_usable(pool, block) else None
        if pending:
            block = pool.pending.get(key)
            if block is not None:
                assert isinstance(block.writer, Sequence)
                if block.writer.scheduler is not self._sequence.scheduler:
                    return None
        return block

    def _is_usable(self, pool: BlockPool, block: Block) -> bool:
        """Whether the bytes of a block are in place, in a tier that may be used."""
        if pool.is_on_device(block):
            return True
        return block not in pool.offloader.offloading and pool.tier_of(block).kind <= self._lowest

    def _is_covered(self, walk: _Walk, block_index: int, tokens: int) -> bool:
        """Whether every group with a window has all blocks that the next token attends to."""
        for pool, runs in zip(self._pools, walk.runs, strict=True):
            if runs is not None and runs[block_index] > first_needed(tokens, pool.window, self._size):
                return False
        return True

    def _partial(self, block_index: int, partial: Partial) -> tuple[list[Block], int]:
        """The blocks with the longest common beginning that every group has, and its length in tokens."""
        start = block_index * self._size
        end = min(start + self._size, self._limit)
        parent_key = self._sequence.key(block_index - 1)
        parents = [pool.tree.node(parent_key) for pool in self._pools]
        best: tuple[list[Block], int] = [], 0
        for stop, extra in self._beginnings(start, end):
            wanted = self._sequence.packed(start, stop)
            found = [
                (None, 0) if node is None else self._closest(pool, node, wanted, extra, partial)
                for pool, node in zip(self._pools, parents, strict=True)
            ]
            sources = [source for source, _ in found if source is not None]
            common = min(self._size - 1, *(tokens for _, tokens in found))
            if len(sources) == len(parents) and common > best[1]:
                best = sources, common
        return best

    def _beginnings(self, start: int, end: int) -> Iterable[tuple[int, bytes]]:
        """Yields possible ends of a common beginning, each with the cached block's extra bytes; plain text has one end.

        A block that ends before an image has no key of the image. The image of a cached block may end earlier or later
        than the sequence's image, which matters only after the end of the shorter image.
        """
        own_keys = self._sequence.extra_keys
        # Of the keys that begin before the block, only the last may reach into the block.
        first = max(0, bisect_left(own_keys, start, key=_START) - 1)
        keys = own_keys[first : bisect_left(own_keys, start + self._size, key=_START)]
        yield end, extra_bytes(keys, start, start + self._size)
        for index, key in enumerate(keys):
            if start < key.start < end:
                yield key.start, extra_bytes(keys[:index], start, start + self._size)
            until = keys[index + 1].start if index + 1 < len(keys) else start + self._size
            own = min(key.start + key.length, end)
            for other in range(max(key.start, start) + 1, until + 1):
                cut = (*keys[:index], key._replace(length=other - key.start))
                yield min(other, own), extra_bytes(cut, start, start + self._size)

    def _exact(self, block_index: int) -> tuple[list[Block], int]:
        """Each group's block that holds exactly the rest of the reusable prompt, and its length in tokens."""
        start, end = block_index * self._size, self._limit
        if not 0 < end - start < self._size:
            return [], 0
        tokens, extra = self._sequence.packed(start, end), self._sequence.extra_of(start, end)
        key = child_key(self._sequence.key(block_index - 1), tokens, extra)
        sources: list[Block] = []
        for pool in self._pools:
            block = pool.tree.by_key.get(key)
            if block is None or not self._is_usable(pool, block):
                return [], 0
            sources.append(block)
        return sources, end - start

    def _closest(
        self, pool: BlockPool, node: Node, wanted: bytes, extra: bytes, partial: Partial
    ) -> tuple[Block | None, int]:
        if partial is Partial.COPY and not pool.offloader.offloading and self._lowest is TierKind.DISK:
            return closest_child(node, wanted, extra)

        def is_usable(block: Block) -> bool:
            if partial is Partial.COPY and self._is_usable(pool, block):
                return True
            return not block.refs and block.children is None and pool.is_on_device(block)

        return closest_child(node, wanted, extra, is_usable)

    def _match(self, walk: _Walk, block_index: int, tokens: int, sources: list[Block]) -> Match:
        match = Match(tokens, sources=sources, num_copied=tokens - block_index * self._size)
        last = -1
        for pool, found in zip(self._pools, walk.found, strict=True):
            needed = min(block_index, first_needed(tokens, pool.window, self._size))
            blocks: list[Block | None] = [None for _ in range(needed)]
            blocks += found[needed:block_index]
            match.blocks.append(blocks)
            for index, block in enumerate(blocks):
                if block is not None and isinstance(block.writer, Sequence) and index > last:
                    last, match.writer = index, block.writer
        return match


def _single_writer_covers(match: Match) -> bool:
    """Whether the writer of the end of the match itself waits for every other writer."""
    assert match.writer is not None
    for table, blocks in zip(match.writer.tables, match.blocks, strict=True):
        for index, block in enumerate(blocks):
            if block is None or block.writer is None or block.writer is match.writer:
                continue
            if index >= len(table.blocks) or table.blocks[index] is not block:
                return False
    return True


def keys_of(spec: ExecutorSpec, prefix: Prefix, weight_version: str | None = None) -> list[bytes]:
    """Keys of a prompt's full blocks in an executor. weight_version: None for the executor's present version."""
    root = _root_of(spec, prefix, weight_version)
    return prefix_keys(root, packed_bytes(pack(prefix.token_ids)), spec.block_size, prefix.extra_keys)


def _root_of(spec: ExecutorSpec, prefix: Prefix, weight_version: str | None) -> bytes:
    version = spec.weight_version if weight_version is None else weight_version
    return root_key(spec.model_fingerprint, prefix.salt, prefix.adapter_id, version)


def cached_chain(pool: BlockPool, keys: list[bytes]) -> list[Block]:
    """The cached full blocks of these keys; with full attention, only up to the first missing block."""
    found = []
    for key in keys:
        block = pool.tree.by_key.get(key)
        if block is not None:
            found.append(block)
        elif pool.window is None:
            break
    return found


def cached_blocks_of(executor: Executor, pool: BlockPool, prefix: Prefix) -> list[Block]:
    """Cached full blocks of a prompt, for all weights, including blocks without their ancestors."""
    found = (
        pool.tree.by_key.get(key)
        for version in executor.scopes.weight_versions
        for key in keys_of(executor.spec, prefix, version)
    )
    return [block for block in found if block is not None]


def partial_blocks(executor: Executor, pool: BlockPool, prefix: Prefix, weight_version: str) -> list[Block]:
    """Blocks after a prompt's full blocks that begin with the prompt's last tokens, or hold their beginning."""
    keys = keys_of(executor.spec, prefix, weight_version)
    rest = packed_bytes(pack(prefix.token_ids[len(keys) * executor.block_size :]))
    node = pool.tree.node(keys[-1] if keys else _root_of(executor.spec, prefix, weight_version))
    if node is None or not rest:
        return []
    return [block for block in children_of(node) if block.tokens.startswith(rest) or rest.startswith(block.tokens)]
