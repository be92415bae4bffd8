"""Carries out eviction policies: evicts before a sequence computes more tokens, and passes its scores on afterwards."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from executor.batch import ScoredSequence, SequenceState
from executor.cache.pool import KvPools
from executor.eviction.areas import Areas
from executor.eviction.base import Evictor, KvShape, KvView, scored_rows
from executor.eviction.policies import (
    H2O,
    AdaptiveWindow,
    AverageAttention,
    H2OTova,
    KeyDiff,
    Knorm,
    Last,
    RandomTokens,
    RoCo,
    SlidingWindow,
    SnapKV,
    Tova,
)
from executor.eviction.rkv import AdaptiveRkv
from executor.step import Evicted
from executor.transfer import sent, to_device, to_host
from kernels.compact_kv.launch import compact_kv
from kernels.rotate_keys.launch import rotate_keys
from kernels.scores import SequenceScores
from protos.kvcommon.eviction import Kind

EVICTORS: dict[Kind, type[Evictor]] = {
    Kind.SLIDING_WINDOW: SlidingWindow,
    Kind.SUM: Areas,
    Kind.NORM_SUM: Areas,
    Kind.ADAPTIVE_RKV: AdaptiveRkv,
    Kind.SNAPKV: SnapKV,
    Kind.H2O: H2O,
    Kind.TOVA: Tova,
    Kind.ROCO: RoCo,
    Kind.AVERAGE: AverageAttention,
    Kind.KEYDIFF: KeyDiff,
    Kind.KNORM: Knorm,
    Kind.LAST: Last,
    Kind.RANDOM: RandomTokens,
    Kind.ADAPTIVE_WINDOW: AdaptiveWindow,
    Kind.H2O_TOVA: H2OTova,
}


@dataclass(eq=False)
class EvictionState:
    """A sequence's policy and the tokens kept at its last eviction, followed by all tokens from `since` on.

    positions: [1 or L, 1 or Hkv, T] int64, each slot's token by its position in the sequence. angles: likewise, the
    position that its key is rotated to when positions are compacted. prompt: tokens of the request's prompt.
    """

    evictor: Evictor
    prompt: int
    positions: Tensor
    angles: Tensor
    since: int = 0


@dataclass(frozen=True)
class Eviction:
    """Tokens that a sequence evicted before a step.

    mass: [] float64 on the host, the share of the scores that stayed, NaN if all were 0; None without scores. The mass
    can be read once the device has computed the step.
    """

    sequence: int
    tokens: int
    mass: Tensor | None

    def result(self) -> Evicted:
        """Reads the mass."""
        mass = math.nan if self.mass is None else float(self.mass)
        return Evicted(self.sequence, self.tokens, None if math.isnan(mass) else mass)


class TokenEviction:
    """The token eviction of one executor. Nothing here waits for the device.

    Only models with one layer group evict: policies are checked for that.
    """

    def __init__(
        self,
        pools: KvPools,
        frequencies: Tensor | None,
        device: torch.device,
        begin: Callable[[], None] = lambda: None,
    ) -> None:
        """frequencies: [D / 2] float32, radians per position; None if keys cannot be rotated again.

        begin: called before the device gets the work of an eviction.
        """
        self._pools = pools
        self._begin = begin
        self._frequencies = frequencies
        self._device = device
        self._states: dict[int, EvictionState] = {}

    def clear(self) -> None:
        self._states.clear()

    def remove(self, handle: int) -> None:
        self._states.pop(handle, None)

    def add(self, sequence: SequenceState) -> None:
        """Takes a sequence that joins; does nothing without a policy."""
        if sequence.policy is None:
            return
        layers, _, _, heads, _ = self._pools.pools[0].k.shape
        evictor = EVICTORS[sequence.policy.kind](sequence.policy, KvShape(layers, heads, self._device))
        nothing = torch.zeros(1, 1, 0, dtype=torch.int64, device="cpu" if evictor.on_host else self._device)
        self._states[sequence.handle] = EvictionState(evictor, sequence.num_prompt, nothing, nothing)

    def scored(self, sequences: Sequence[SequenceState], counts: Sequence[int]) -> list[ScoredSequence]:
        """Returns which scores policies want of a step that computes counts[i] tokens of sequences[i]."""
        if not self._states:
            return []
        scored = []
        for index, (sequence, count) in enumerate(zip(sequences, counts, strict=True)):
            state = self._states.get(sequence.handle)
            if state is not None:
                rows = scored_rows(state.evictor.policy, state.prompt, sequence.computed, count)
                if rows:
                    accumulator = state.evictor.accumulator(sequence.kept + count)
                    scored.append(ScoredSequence(index, rows, state.evictor.uses_squares, accumulator))
        return scored

    def observe(
        self, sequences: Sequence[SequenceState], counts: Sequence[int], scores: Sequence[SequenceScores]
    ) -> None:
        """Passes the scores of a step on to the policies. Called after each step, with all its sequences."""
        if not self._states:
            return
        seen = {entry.sequence: entry for entry in scores}
        with one_thread(self._device):
            for index, (sequence, count) in enumerate(zip(sequences, counts, strict=True)):
                state = self._states.get(sequence.handle)
                if state is not None:
                    state.evictor.observe(seen.get(index), count)

    def wanted_window(self, sequence: SequenceState) -> Tensor:
        """[] int64: tokens that an adaptive window is to have by the attention so far, which is then halved."""
        state = self._states[sequence.handle]
        assert isinstance(state.evictor, AdaptiveWindow)
        view = KvView(self.positions(sequence), sequence.computed, lambda: self._keys(sequence))
        with one_thread(self._device):
            return state.evictor.wanted(view, evicts=sequence.evicts)

    def set_window(self, sequence: SequenceState, tokens: int) -> None:
        """Gives the adaptive window a new length from now on."""
        assert sequence.policy is not None
        sequence.policy = self._states[sequence.handle].evictor.policy = sequence.policy.with_window(tokens)

    def evict(self, sequence: SequenceState, table: tuple[int, ...] | None, step: int) -> Eviction | None:
        """Evicts the tokens that a sequence's policy names, if any, before the sequence computes more tokens.

        table: only for its first eviction: the blocks that the kept tokens move to, or () if they stay. Returns None if
        no token was evicted.
        """
        state = self._states.get(sequence.handle)
        if state is None or (table is None and not sequence.evicts):
            return None
        sequence.evicts = True
        policy, evicted = state.evictor.policy, None
        count = policy.kept_after(sequence.kept, sequence.computed, state.prompt)
        if count < sequence.kept or table:
            self._begin()
            with one_thread(self._device):
                evicted = self._evict(sequence, state, count, table, step)
        if policy.most_kept is not None and (table == () or policy.bounds is not None):
            # The scheduler releases the blocks after these.
            sequence.tables[0] = sequence.tables[0][: -(-policy.most_kept // policy.block_size)]
        return evicted

    def _evict(
        self, sequence: SequenceState, state: EvictionState, count: int, table: tuple[int, ...] | None, step: int
    ) -> Eviction | None:
        policy = state.evictor.policy
        evicted = sequence.kept - count
        positions = self._positions(sequence)
        view = KvView(self._everywhere(positions), sequence.computed, lambda: self._keys(sequence))
        index = state.evictor.keep(view, count)
        mass = state.evictor.kept_mass(index)
        mass = None if mass is None else to_host(mass)
        if not table and evicted == 1 and _may_reuse(state.evictor, index):
            # The next token is stored in the evicted token's slot, so nothing moves.
            sequence.reuse_position = _missing(index)
            positions[..., sequence.reuse_position] = sequence.computed
            state.positions, state.since = positions, sequence.computed + 1
            sequence.kept = count
            return Eviction(sequence.handle, evicted, mass)
        if not table and not state.evictor.ordered:
            index = in_place(index, sequence.kept)
        self._move(sequence, index, table, step, ordered=state.evictor.ordered)
        state.evictor.reindex(self._everywhere(index))
        state.positions, state.since = _take(positions, index), sequence.computed
        if policy.compacted:
            self._rotate(sequence, state, index)
        sequence.kept = count
        # A sequence may move even before it has to evict.
        return Eviction(sequence.handle, evicted, mass) if evicted else None

    def positions(self, sequence: SequenceState) -> Tensor:
        """[L, Hkv, T] int64: the tokens in a sequence's slots, by their position in the sequence."""
        return self._everywhere(self._positions(sequence))

    def _positions(self, sequence: SequenceState) -> Tensor:
        state = self._states[sequence.handle]
        return _longer(state.positions, sequence.kept, state.since - state.positions.shape[-1])

    def _everywhere(self, values: Tensor) -> Tensor:
        """[L, Hkv, n] of values [1 or L, 1 or Hkv, n]."""
        layers, _, _, heads, _ = self._pools.pools[0].k.shape
        return values.expand(layers, heads, -1)

    def _flat(self, table: np.ndarray, slots: Tensor) -> Tensor:
        """Indices into the pool, in tokens and on the device, of positions `slots` along a table of blocks."""
        size = self._pools.block_size
        blocks = to_device(table.astype(np.int64), slots.device)
        return sent(blocks[slots // size] * size + slots % size, self._device)

    def _keys(self, sequence: SequenceState) -> Tensor:
        """[L, Hkv, T, D] of all slots in use; float32 where the pool holds 8 bits."""
        pool, size = self._pools.pools[0], self._pools.block_size
        blocks = to_device(sequence.tables[0][: -(-sequence.kept // size)].astype(np.int64), self._device)
        keys = pool.k[:, blocks].flatten(1, 2)[:, : sequence.kept].transpose(1, 2)
        return keys if pool.scales is None else keys.float() * pool.scales.k[:, :, None]

    def _move(
        self, sequence: SequenceState, index: Tensor, table: tuple[int, ...] | None, step: int, *, ordered: bool
    ) -> None:
        """Moves what slot index[.., i] holds to slot i, of the new table if there is one.

        ordered: whether the slots keep their order. If not, slots move only where there is a gap.
        """
        pool, before = self._pools.pools[0], sequence.tables[0]
        if table:
            sequence.tables[0] = np.asarray(table, dtype=np.int32)
            targets = torch.arange(index.shape[-1], device=index.device).expand_as(index)
        else:
            count = index.shape[-1]
            most = count if ordered else min(count, sequence.kept - count)
            index, targets = moved(index, most, counts=index.device.type == "cpu")
        if index.shape[-1]:
            sources, places = self._flat(before, index), self._flat(sequence.tables[0], targets)
            # In place, slots from after the new length fill gaps before that length.
            overlap = ordered if not table else not set(table).isdisjoint(before.tolist())
            compact_kv(pool.k, pool.v, sources, places, overlap=overlap)
            # Some of these blocks may be as they were: only the device knows.
            blocks = -(-sequence.kept // self._pools.block_size)
            self._pools.mark_written(0, sequence.tables[0][:blocks].tolist(), step)

    def _rotate(self, sequence: SequenceState, state: EvictionState, index: Tensor) -> None:
        """Rotates keys to the positions of their tokens among the kept tokens."""
        assert self._frequencies is not None
        after, deltas = rotation_deltas(_take(_longer(state.angles, sequence.kept, 0), index))
        slots = torch.arange(index.shape[-1], device=index.device).expand_as(index)
        flat = self._flat(sequence.tables[0], slots)
        rotate_keys(self._pools.pools[0].k, flat, sent(deltas, self._device), self._frequencies)
        state.angles = after


@contextlib.contextmanager
def one_thread(device: torch.device) -> Iterator[None]:
    """Limits torch to one thread on a CPU: waking others takes longer than the work, and the decoder uses the cores."""
    threads = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _longer(known: Tensor, slots: int, offset: int) -> Tensor:
    """[.., slots]: `known`, then the number of each further slot plus `offset`."""
    more = torch.arange(known.shape[-1], slots, device=known.device) + offset
    return torch.cat([known, more.expand(*known.shape[:-1], -1)], dim=-1)


def _take(values: Tensor, index: Tensor) -> Tensor:
    """Returns values[.., index]; either may be the same in all layers or heads."""
    shape = [max(a, b) for a, b in zip(values.shape[:-1], index.shape[:-1], strict=True)]
    return values.expand(*shape, -1).gather(-1, index.expand(*shape, -1))


def in_place(index: Tensor, slots: int) -> Tensor:
    """Returns the same slots in a different order: those below the new length stay, and the others fill the gaps.

    index: [.., n] ascending, of `slots` slots.
    """
    count = index.shape[-1]
    stays = torch.zeros(*index.shape[:-1], slots, dtype=torch.bool, device=index.device).scatter_(-1, index, True)
    # The i-th slot that stays after the new length fills the i-th gap: as many as there are gaps.
    gaps, after = ~stays[..., :count], stays[..., count:]
    sources = index.new_zeros(*index.shape[:-1], slots - count + 1)
    places = torch.where(after, after.cumsum(-1) - 1, slots - count)
    sources.scatter_(-1, places, torch.arange(count, slots, device=index.device).expand_as(places))
    rank = (gaps.cumsum(-1) - 1).clamp(min=0)
    return torch.where(gaps, sources.gather(-1, rank), torch.arange(count, device=index.device))


def moved(index: Tensor, most: int, *, counts: bool) -> tuple[Tensor, Tensor]:
    """Returns sources and targets of the slots that an order moves, [.., m], padded with slots that stay.

    most: at least as many as move in any layer and head. counts: whether to count the slots that move, which waits for
    a device; m is then the largest count, else `most`.
    """
    moves = index != torch.arange(index.shape[-1], device=index.device)
    if counts:
        most = min(most, int(moves.sum(dim=-1).max()))
    targets = moves.to(torch.int8).topk(most, dim=-1).indices
    return index.gather(-1, targets), targets


def _may_reuse(evictor: Evictor, index: Tensor) -> bool:
    """Returns whether the next token may take the evicted token's slot, so that nothing moves.

    The slot must be known, and the same in all layers and heads; the policy must need no order or compacted positions.
    """
    joint = index.shape[0] == index.shape[1] == 1
    return joint and evictor.on_host and not evictor.ordered and not evictor.policy.compacted


def _missing(index: Tensor) -> int:
    """Returns the only slot that is not kept. index: [1, 1, n] int64 on the host, ascending."""
    return int((index[0, 0] == torch.arange(index.shape[-1], device=index.device)).sum())


def rotation_deltas(angles: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the gapless positions that the kept keys are rotated to, and how far back they turn; both like `angles`.

    angles: [.., n] int64, the positions that the keys are rotated to now, in any order, all different.
    """
    after = angles.argsort(-1).argsort(-1)
    return after, angles - after
