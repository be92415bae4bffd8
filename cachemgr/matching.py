"""How much of a prompt is there already, over all groups of an executor."""

from dataclasses import dataclass, field

from cachemgr import siblings
from cachemgr.block import Block
from cachemgr.pool import Pool
from cachemgr.sequence import Sequence, first_needed


@dataclass(slots=True)
class Match:
    """`tokens` leading tokens are there. Per group: the whole blocks, None where the window needs none.

    With `num_copied` the last of the tokens are the beginning of `sources[group]`, to be copied. `writer` is the
    sequence that has yet to compute the end of the match.
    """

    tokens: int = 0
    blocks: list[list[Block | None]] = field(default_factory=list)
    sources: list[Block] = field(default_factory=list)
    num_copied: int = 0
    writer: Sequence | None = None


def find(sequence: Sequence, *, partial: bool) -> Match:
    """The longest match that leaves at least the last token to compute."""
    match = _Finder(sequence, pending=True).find(partial=partial)
    if match.writer is not None and not _one_wait_is_enough(match):
        match = _Finder(sequence, pending=False).find(partial=partial)
    return match


def nothing(sequence: Sequence) -> Match:
    """No match."""
    return Match(blocks=[[] for _ in sequence.tables])


class _Finder:
    def __init__(self, sequence: Sequence, *, pending: bool) -> None:
        self._sequence = sequence
        self._pending = pending
        self._size = sequence.block_size
        self._limit = len(sequence.tokens) - 1
        self._pools = [table.pool for table in sequence.tables]
        # Per group: the indexed or promised block at each place, up to the first that full attention misses.
        self._found: list[list[Block | None]] = []
        # Per windowed group and place: where the run of present blocks that ends there begins.
        self._runs: list[list[int] | None] = []
        self._top = self._limit // self._size

    def find(self, *, partial: bool) -> Match:
        for pool in self._pools:
            if pool.window is None:
                self._top = min(self._top, self._leading(pool))
        self._look_up()
        for place in range(self._top, -1, -1):
            start = place * self._size
            if partial:
                sources, copied = self._partial(place)
                if copied and self._is_covered(place, start + copied):
                    return self._match(place, start + copied, sources)
            if self._is_covered(place, start):
                return self._match(place, start, [])
        raise AssertionError("nothing is always covered")

    def _leading(self, pool: Pool) -> int:
        for place in range(self._top):
            if self._block(pool, place) is None:
                return place
        return self._top

    def _block(self, pool: Pool, place: int) -> Block | None:
        key = self._sequence.key(place)
        block = pool.index.get(key)
        if block is None and self._pending:
            block = pool.pending.get(key)
            if block is not None:
                assert block.writer is not None
                if block.writer.scheduler is not self._sequence.scheduler:
                    return None
        return block

    def _look_up(self) -> None:
        for pool in self._pools:
            found = [self._block(pool, place) for place in range(self._top)]
            self._found.append(found)
            if pool.window is None:
                self._runs.append(None)
                continue
            runs, begin = [0], 0
            for place, block in enumerate(found):
                if block is None:
                    begin = place + 1
                runs.append(begin)
            self._runs.append(runs)

    def _is_covered(self, place: int, tokens: int) -> bool:
        """Whether every windowed group has what the token behind `tokens` attends to before `place`."""
        for pool, runs in zip(self._pools, self._runs, strict=True):
            if runs is not None and runs[place] > first_needed(tokens, pool.window, self._size):
                return False
        return True

    def _partial(self, place: int) -> tuple[list[Block], int]:
        start = place * self._size
        wanted = self._sequence.packed(start, min(start + self._size, self._limit))
        parent_key = self._sequence.key(place - 1)
        sources, common = [], self._size - 1
        for pool in self._pools:
            parent = pool.node(parent_key)
            if parent is None:
                return [], 0
            source, tokens = siblings.closest(parent, wanted)
            if source is None:
                return [], 0
            sources.append(source)
            common = min(common, tokens)
        return sources, common

    def _match(self, place: int, tokens: int, sources: list[Block]) -> Match:
        match = Match(tokens, sources=sources, num_copied=tokens - place * self._size)
        last = -1
        for pool, found in zip(self._pools, self._found, strict=True):
            needed = min(place, first_needed(tokens, pool.window, self._size))
            blocks: list[Block | None] = [None for _ in range(needed)]
            blocks += found[needed:place]
            match.blocks.append(blocks)
            for index, block in enumerate(blocks):
                if block is not None and block.writer is not None and index > last:
                    last, match.writer = index, block.writer
        return match


def _one_wait_is_enough(match: Match) -> bool:
    """Whether the writer of the match's end itself waits for every other writer."""
    assert match.writer is not None
    for table, blocks in zip(match.writer.tables, match.blocks, strict=True):
        for index, block in enumerate(blocks):
            if block is None or block.writer is None or block.writer is match.writer:
                continue
            if index >= len(table.blocks) or table.blocks[index] is not block:
                return False
    return True
