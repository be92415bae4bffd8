"""Carries out what policies say: evicts before a sequence computes more, and shows policies its attention then."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from executor.cache.pool import KvPools
from executor.core.state import Running
from executor.eviction.policy import Attention, Contents, Evictor, Space, counted_rows
from executor.eviction.registry import evictor
from executor.eviction.rotation import turns
from executor.models.attention_counts import Counted
from executor.step import Evicted
from kernels.compact_kv.launch import compact_kv
from kernels.rotate_keys.launch import rotate_keys


@dataclass(eq=False)
class Kept:
    """A policy's state, and which tokens a sequence kept when it last evicted; behind them are those from `since` on.

    positions: [1 or L, 1 or Hkv, T] int64, each slot's token by its place in the whole sequence. angles: likewise, what
    its key is rotated to when positions are compacted. prompt: tokens of the request's prompt.
    """

    evictor: Evictor
    prompt: int
    positions: Tensor
    angles: Tensor
    since: int = 0


class TokenEviction:
    """Of one executor. What evicts has one layer group: policies are checked for that."""

    def __init__(self, pools: KvPools, frequencies: Tensor | None, device: torch.device) -> None:
        """frequencies: [D / 2], radians per position; None when keys cannot be rotated."""
        self._pools = pools
        self._frequencies = frequencies
        self._device = device
        self._kept: dict[int, Kept] = {}

    def clear(self) -> None:
        """Forgets all sequences."""
        self._kept.clear()

    def remove(self, handle: int) -> None:
        """Forgets a sequence."""
        self._kept.pop(handle, None)

    def add(self, sequence: Running) -> None:
        """A sequence that joins; nothing to do without a policy."""
        if sequence.policy is None:
            return
        layers, _, _, heads, _ = self._pools.pools[0].k.shape
        nothing = torch.zeros(1, 1, 0, dtype=torch.int64, device=self._device)
        state = evictor(sequence.policy, Space(layers, heads, self._device))
        self._kept[sequence.handle] = Kept(state, sequence.num_prompt, nothing, nothing)

    def counted(self, sequences: Sequence[Running], counts: Sequence[int]) -> list[Counted]:
        """Whose attention policies want to see of a step that computes counts[i] tokens of sequences[i]."""
        if not self._kept:
            return []
        counted = []
        for index, (sequence, count) in enumerate(zip(sequences, counts, strict=True)):
            kept = self._kept.get(sequence.handle)
            if kept is not None:
                rows = counted_rows(kept.evictor.policy, kept.prompt, sequence.computed, count)
                if rows:
                    totals = kept.evictor.totals(sequence.kept + count)
                    counted.append(Counted(index, rows, kept.evictor.uses_squares, totals))
        return counted

    def observe(
        self,
        sequences: Sequence[Running],
        counts: Sequence[int],
        counted: Sequence[Counted],
        attention: Sequence[Attention],
    ) -> None:
        """After that step: what was counted, in the order in which it was asked for."""
        if not self._kept:
            return
        seen = {entry.sequence: one for entry, one in zip(counted, attention, strict=True)}
        with one_thread(self._device):
            for index, (sequence, count) in enumerate(zip(sequences, counts, strict=True)):
                kept = self._kept.get(sequence.handle)
                if kept is not None:
                    kept.evictor.observe(seen.get(index), count)

    def evict(self, sequence: Running, table: tuple[int, ...] | None, step: int) -> Evicted | None:
        """Before a sequence computes more: evicts what its policy says, if it says anything now.

        table: only the first time: the blocks that all that stays moves to, or () when it stays where it is.
        """
        kept = self._kept.get(sequence.handle)
        if kept is None or (table is None and not sequence.evicts):
            return None
        sequence.evicts = True
        policy = kept.evictor.policy
        count = policy.kept_after(sequence.kept, sequence.computed, kept.prompt)
        if count == sequence.kept and not table:
            return None
        with one_thread(self._device):
            return self._evict(sequence, kept, count, table, step)

    def _evict(self, sequence: Running, kept: Kept, count: int, table: tuple[int, ...] | None, step: int) -> Evicted:
        policy = kept.evictor.policy
        evicted = sequence.kept - count
        positions = self._positions(sequence)
        contents = Contents(self._everywhere(positions), sequence.computed, lambda: self._keys(sequence))
        index = kept.evictor.keep(contents, count)
        mass = kept.evictor.mass(index)
        if not table and evicted == 1 and _fills_gap(kept.evictor, index):
            # The next token takes the place of the one that goes: nothing moves.
            sequence.hole = _gap(index)
            positions[..., sequence.hole] = sequence.computed
            kept.positions, kept.since = positions, sequence.computed + 1
            sequence.kept = count
            return Evicted(sequence.handle, evicted, mass)
        if not table and not kept.evictor.ordered:
            index = _in_place(index, sequence.kept)
        self._move(sequence, index, table, step)
        if table == () and policy.most_kept is not None:
            # What lies behind is given back.
            sequence.tables[0] = sequence.tables[0][: -(-policy.most_kept // policy.block_size)]
        kept.evictor.follow(self._everywhere(index))
        kept.positions, kept.since = _take(positions, index), sequence.computed
        if policy.compacted:
            self._rotate(sequence, kept, index)
        sequence.kept = count
        return Evicted(sequence.handle, evicted, mass)

    def positions(self, sequence: Running) -> Tensor:
        """[L, Hkv, T] int64: which tokens a sequence's slots hold, by their place in the whole sequence."""
        return self._everywhere(self._positions(sequence))

    def _positions(self, sequence: Running) -> Tensor:
        kept = self._kept[sequence.handle]
        return _longer(kept.positions, sequence.kept, kept.since - kept.positions.shape[-1])

    def _everywhere(self, values: Tensor) -> Tensor:
        """[L, Hkv, n] of what may be alike in all layers or heads."""
        layers, _, _, heads, _ = self._pools.pools[0].k.shape
        return values.expand(layers, heads, -1)

    def _flat(self, table: np.ndarray, slots: Tensor) -> Tensor:
        """Places in the pool of slots of a table."""
        size = self._pools.block_size
        blocks = torch.from_numpy(np.asarray(table, dtype=np.int64)).to(self._device)
        return blocks[slots // size] * size + slots % size

    def _keys(self, sequence: Running) -> Tensor:
        """[L, Hkv, T, D] of all slots in use."""
        pool, size = self._pools.pools[0], self._pools.block_size
        blocks = torch.from_numpy(sequence.tables[0][: -(-sequence.kept // size)].astype(np.int64)).to(self._device)
        return pool.k[:, blocks].flatten(1, 2)[:, : sequence.kept].transpose(1, 2)

    def _move(self, sequence: Running, index: Tensor, table: tuple[int, ...] | None, step: int) -> None:
        """Slot i gets what slot index[.., i] holds; in another table, if there is one."""
        pool, before = self._pools.pools[0], sequence.tables[0]
        if table:
            sequence.tables[0] = np.asarray(table, dtype=np.int32)
            targets = torch.arange(index.shape[-1], device=self._device).expand_as(index)
        else:
            index, targets = _moved(index)
        if index.shape[-1]:
            compact_kv(pool.k, pool.v, self._flat(before, index), self._flat(sequence.tables[0], targets))
            written = np.unique(self._flat(sequence.tables[0], targets).cpu().numpy() // self._pools.block_size)
            self._pools.mark_written(0, written, step)

    def _rotate(self, sequence: Running, kept: Kept, index: Tensor) -> None:
        """Turns keys to the place that their tokens have among those kept."""
        assert self._frequencies is not None
        after, deltas = turns(_take(_longer(kept.angles, sequence.kept, 0), index))
        slots = torch.arange(index.shape[-1], device=self._device).expand_as(index)
        flat = self._flat(sequence.tables[0], slots)
        rotate_keys(self._pools.pools[0].k, flat, deltas, self._frequencies)
        kept.angles = after


@contextlib.contextmanager
def one_thread(device: torch.device) -> Iterator[None]:
    """On a CPU, waking torch's other threads takes longer than what is computed here, and the decoder has the cores."""
    threads = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _longer(known: Tensor, slots: int, offset: int) -> Tensor:
    """[.., slots]: `known`, and behind it each slot's number plus `offset`."""
    more = torch.arange(known.shape[-1], slots, device=known.device) + offset
    return torch.cat([known, more.expand(*known.shape[:-1], -1)], dim=-1)


def _take(values: Tensor, index: Tensor) -> Tensor:
    """values[.., index], where either may be alike in all layers or heads."""
    shape = [max(a, b) for a, b in zip(values.shape[:-1], index.shape[:-1], strict=True)]
    return values.expand(*shape, -1).gather(-1, index.expand(*shape, -1))


def _in_place(index: Tensor, slots: int) -> Tensor:
    """The same slots in another order: those below the new length stay, and the others fill the gaps.

    index: [.., n] ascending, of `slots` slots.
    """
    count = index.shape[-1]
    stays = torch.zeros(*index.shape[:-1], slots, dtype=torch.bool, device=index.device).scatter_(-1, index, True)
    result = torch.arange(count, device=index.device).expand_as(index).clone()
    # As many slots from behind in each layer and head as there are gaps, both row by row.
    result[~stays[..., :count]] = stays[..., count:].nonzero()[:, -1] + count
    return result


def _moved(index: Tensor) -> tuple[Tensor, Tensor]:
    """Of an order in place, sources and targets of the slots that move, [.., m]; some stay where fewer move."""
    moves = index != torch.arange(index.shape[-1], device=index.device)
    most = int(moves.sum(dim=-1).max())
    targets = moves.to(torch.int8).topk(most, dim=-1).indices
    return index.gather(-1, targets), targets


def _fills_gap(state: Evictor, index: Tensor) -> bool:
    """Whether a gap may stay until the next token fills it: the same one everywhere, and nobody looks at the order."""
    policy = state.policy
    joint = index.shape[0] == index.shape[1] == 1
    return joint and not state.ordered and not policy.uses_scores and not policy.compacted


def _gap(index: Tensor) -> int:
    """The one slot that is not among those kept, [1, 1, n] ascending."""
    return int((index[0, 0] == torch.arange(index.shape[-1], device=index.device)).sum())
