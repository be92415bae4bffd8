"""A sequence under a policy, without a model: attention is made up token by token, and slots may be shuffled."""

from typing import Any

import torch
from torch import Tensor

from executor.batch import SequenceState
from executor.cache.pool import KvPools, LayerGroup, LayerShape
from executor.eviction.base import Evictor, KvShape, KvView, scored_rows
from executor.eviction.engine import EVICTORS, TokenEviction
from executor.step import NewSequence
from kernels.scores import SequenceScores
from protos.kvcommon.eviction import Kind, Layout, Policy, parse
from protos.kvcommon.v1 import kvcommon_pb2 as common

CPU = torch.device("cpu")
# Small areas, so that a few dozen tokens go through several evictions.
_AREAS = {"start_tokens": 4, "recent_tokens": 8, "max_cache_tokens": 24}
_TOKENS = {"start_tokens": 2, "recent_tokens": 3, "max_cache_tokens": 16, "period_tokens": 3}
SMALL: dict[Kind, dict[str, Any]] = {
    Kind.SLIDING_WINDOW: {"period_tokens": 1, "start_tokens": 2, "recent_tokens": 10},
    Kind.SUM: _AREAS,
    Kind.NORM_SUM: _AREAS,
    Kind.ADAPTIVE_RKV: {
        **_AREAS,
        "recent_tokens": 4,
        "adaptive_rkv": common.AdaptiveRkv(attention_mass=0.5, window_steps=3),
    },
    Kind.SNAPKV: {"start_tokens": 1, "score_window_tokens": 4, "max_cache_tokens": 12},
    Kind.H2O: {"max_cache_tokens": 12, "period_tokens": 3},
    Kind.TOVA: _TOKENS,
    Kind.ROCO: _TOKENS,
    Kind.H2O_TOVA: _TOKENS,
    Kind.AVERAGE: {"max_cache_tokens": 14, "period_tokens": 4},
    Kind.KEYDIFF: _TOKENS,
    Kind.KNORM: _TOKENS,
    Kind.LAST: {"max_cache_tokens": 6},
    Kind.RANDOM: _TOKENS,
    Kind.ADAPTIVE_WINDOW: {"start_tokens": 2, "recent_tokens": 8, "max_cache_tokens": 18, "period_tokens": 4},
}
KINDS = [kind for kind in Kind if kind is not Kind.NONE]
# Policies that are tested with compacted positions.
ROTATED = [Kind.SLIDING_WINDOW, Kind.H2O]
# Tokens of the prompt, all tokens, and tokens per block of the sequence that `evictions` runs.
PROMPT, TOKENS, BLOCK = 24, 60, 4


def policy(kind: Kind, block_size: int = 4, **fields: Any) -> Policy:
    """What is not given is small."""
    parsed = parse(
        common.EvictionPolicy(kind=kind.value, **{**SMALL[kind], **fields}), Layout(block_size, (None,), True)
    )
    assert parsed is not None
    return parsed


class World:
    """Attention and keys of a sequence of n tokens: every query's weights over all tokens before it.

    weights: [L, Hq, n, n], rows sum to 1; keys: [L, Hkv, n, D].
    """

    def __init__(self, length: int, layers: int = 2, kv_heads: int = 2, group: int = 3, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.length, self.space, self.group = length, KvShape(layers, kv_heads, CPU), group
        logits = 3 * torch.randn(layers, kv_heads * group, length, length, generator=generator)
        mask = torch.ones(length, length).triu(1).bool()
        # Multiples of a power of two: their sums are exact in any order.
        self.weights = (logits.masked_fill(mask, -torch.inf).softmax(-1) * 65536).round() / 65536
        self.keys = torch.randn(layers, kv_heads, length, 8, generator=generator)

    def attention(self, first: int, last: int, positions: Tensor) -> SequenceScores:
        """Of the queries from first to last - 1, over the tokens at positions [L, Hkv, T]."""
        rows = self.weights[:, :, first:last].unflatten(1, (-1, self.group))
        sums, squares = rows.sum((2, 3)), rows.square().sum((2, 3))
        return SequenceScores(sums.gather(-1, positions), squares.gather(-1, positions), last - first)


class Driven:
    """A sequence of such a world under a policy. positions: [L, Hkv, T], the positions in its slots now.

    shuffle: puts what stays of an eviction into slots in random order, the same wherever the choice is.
    """

    def __init__(self, chosen: Policy, world: World, prompt: int, *, shuffle: bool = False) -> None:
        self.policy, self.world, self.prompt = chosen, world, prompt
        self.evictor: Evictor = EVICTORS[chosen.kind](chosen, world.space)
        self.positions = torch.empty(world.space.layers, world.space.kv_heads, 0, dtype=torch.int64)
        self.computed = 0
        # What each eviction kept, token numbers in ascending order, [L, Hkv, n].
        self.kept: list[Tensor] = []
        self._shuffle = torch.Generator().manual_seed(7) if shuffle else None

    def contents(self) -> KvView:
        """What the slots hold."""
        size = self.world.keys.shape[-1]
        index = self.positions[..., None].expand(*self.positions.shape, size)
        return KvView(self.positions, self.computed, lambda: self.world.keys.gather(2, index))

    def evict(self) -> Tensor | None:
        """What `keep` answers, if anything is to go."""
        slots = self.positions.shape[-1]
        count = self.policy.kept_after(slots, self.computed, self.prompt)
        if count == slots:
            return None
        kept = self.evictor.keep(self.contents(), count)
        index = kept
        if self._shuffle is not None and not self.evictor.ordered:
            index = index.gather(-1, torch.rand(index.shape, generator=self._shuffle).argsort(-1))
        index = index.expand(*self.positions.shape[:-1], -1)
        self.evictor.reindex(index)
        self.positions = self.positions.gather(-1, index)
        self.kept.append(self.positions.sort(-1).values)
        return kept

    def compute(self, count: int) -> None:
        """The next `count` tokens."""
        first, last = self.computed, self.computed + count
        more = torch.arange(first, last).expand(*self.positions.shape[:-1], -1)
        self.positions = torch.cat([self.positions, more], -1)
        rows = scored_rows(self.policy, self.prompt, first, count)
        self.evictor.observe(self.world.attention(last - rows, last, self.positions) if rows else None, count)
        self.computed = last

    def run(self, chunk: int) -> None:
        """To the end of the world: the prompt in chunks, then token by token."""
        while self.computed < self.world.length:
            self.evict()
            slots = self.positions.shape[-1]
            wanted = min(chunk, self.prompt - self.computed) if self.computed < self.prompt else 1
            room = self.policy.room(slots, self.computed, self.prompt)
            self.compute(wanted if room is None else min(wanted, room))


def evictions(
    chosen: Policy, device: torch.device, engine: type[TokenEviction] = TokenEviction, *, first_block: int = 20
) -> int:
    """Runs a sequence with random scores in pools of 2 layers, 2 heads and head size 8; returns how often it evicts.

    first_block: the first eviction moves the tokens from blocks 1 to 15 to the blocks from this one on.
    """
    shape = LayerShape(None, 2, 8)
    pools = KvPools([LayerGroup(shape, (0, 1))], 40, BLOCK, torch.float32, device)
    eviction = engine(pools, torch.empty(4, device=device), device)
    table = tuple(range(1, 1 + TOKENS // BLOCK))
    sequence = SequenceState.of(NewSequence(1, (5,) * PROMPT, PROMPT, 0, (table,), policy=chosen), 0)
    eviction.add(sequence)
    count, begun, new = 0, False, PROMPT
    for step in range(1, TOKENS - PROMPT + 2):
        wants = chosen.kept_after(sequence.kept, sequence.computed, PROMPT) < sequence.kept
        # The first eviction moves the tokens to other blocks, all later ones stay in these.
        fresh = tuple(range(first_block, first_block + TOKENS // BLOCK)) if wants and not begun else None
        begun = begun or wants
        count += eviction.evict(sequence, fresh, step) is not None
        eviction.scored([sequence], [new])
        sequence.computed += new
        sequence.kept += new
        weights, squares = (torch.rand(2, 2, sequence.kept, device=device) for _ in range(2))
        scores = SequenceScores(weights, squares, new)
        eviction.observe([sequence], [new], [scores] if chosen.uses_scores else [])
        if chosen.kind is Kind.ADAPTIVE_WINDOW:
            eviction.wanted_window(sequence)
        new = 1
    return count
