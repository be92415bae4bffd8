"""Eviction of blocks, against a slow and plain reading of the rules."""

from collections import deque

import pytest
import torch

from executor.eviction.areas import Areas, without
from executor.eviction.base import KvShape, KvView, scored_rows
from executor.eviction.rkv import key_diversity
from kernels.scores import SequenceScores
from protos.kvcommon.eviction import AREAS, Anchor, Kind, Policy
from protos.kvcommon.v1 import kvcommon_pb2 as common
from tests.unit.executor.eviction.driving import CPU, Driven, World, policy

LENGTH, POOLED = 75, 7


def pooled(values: list[float]) -> list[float]:
    return [max(values[place : place + POOLED]) for place in range(len(values))]


class Slow:
    """One layer: tokens by their place in the sequence, those behind the start area with score and count."""

    def __init__(self, chosen: Policy, world: World, layer: int) -> None:
        self.policy, self.world, self.layer = chosen, world, layer
        self.tokens: list[int] = []
        self.scores: dict[int, float] = {}
        self.counts: dict[int, int] = {}
        self.rows = 0
        self.recent: deque[dict[int, float]] = deque(maxlen=chosen.mass_steps)

    def compute(self, first: int, last: int, rows: int) -> None:
        self.tokens += range(first, last)
        tracked = [token for token in self.tokens if token >= self.policy.start]
        if not rows and not self.counts:
            return
        weights = self.world.weights[self.layer, :, last - rows : last].double().sum((0, 1))
        values = [float(weights[token]) for token in tracked]
        self.recent.append(dict(zip(tracked, values, strict=True)))
        for token, value in zip(tracked, pooled(values), strict=True):
            self.scores[token] = self.scores.get(token, 0.0) + value
        self.count(tracked, rows)

    def count(self, tracked: list[int], rows: int) -> None:
        window, length = self.policy.score_window, len(tracked)
        new = [token for token in tracked if token not in self.counts]
        if self.rows < window:
            self.counts = {token: min(self.rows + rows, length - place) for place, token in enumerate(tracked)}
        else:
            for token in self.counts:
                self.counts[token] += len(new)
            self.counts |= {token: len(new) - place for place, token in enumerate(new)}
        self.rows += rows

    def blocks(self) -> list[list[int]]:
        """Tokens of the blocks that may go."""
        size = self.policy.block_size
        whole = [self.tokens[at : at + size] for at in range(0, len(self.tokens), size)]
        return whole[self.policy.start // size : len(self.tokens) // size - self.policy.recent // size]

    def worth(self, block: list[int]) -> float:
        if self.policy.kind is Kind.NORM_SUM:
            return sum(self.scores[token] / self.counts[token] for token in block)
        return sum(self.scores[token] for token in block)

    def evict(self, count: int) -> None:
        blocks = self.blocks()
        if self.policy.kind is Kind.ADAPTIVE_RKV:
            gone = self.alike(blocks, count)
        else:
            order = sorted(range(len(blocks)), key=lambda number: (self.worth(blocks[number]), number))
            budget = self.policy.crush.budget if self.policy.crush else 0
            gone = order[: count + budget]
            if budget:
                gone = self.crushed(blocks, sorted(gone), budget)
        lost = {token for number in gone for token in blocks[number]}
        self.tokens = [token for token in self.tokens if token not in lost]
        self.scores = {token: score for token, score in self.scores.items() if token not in lost}
        self.counts = {token: count for token, count in self.counts.items() if token not in lost}

    def crushed(self, blocks: list[list[int]], gone: list[int], budget: int) -> list[int]:
        assert self.policy.crush is not None
        every = sorted((token for block in blocks for token in block), key=lambda token: (self.scores[token], token))
        high = set(every[len(every) // 2 :])
        bits = [[int(token in high) for token in block] for block in blocks]
        anchor = [0, 1, 0, 1]
        if self.policy.crush.anchor is Anchor.MEAN:
            anchor = [int(2 * sum(column) > len(bits)) for column in zip(*bits, strict=True)]
        apart = {number: sum(a != b for a, b in zip(bits[number], anchor, strict=True)) for number in gone}
        order = sorted(gone, key=lambda number: (apart[number], number))
        spared = order[:: len(gone) // budget][:budget]
        return [number for number in gone if number not in spared]

    def alike(self, blocks: list[list[int]], count: int) -> list[int]:
        behind = [token for token in self.tokens if token >= self.policy.start]
        means = [sum(step.get(token, 0.0) for step in self.recent) / len(self.recent) for token in behind]
        scores = dict(zip(behind, pooled(means), strict=True))
        worth = [sum(scores[token] for token in block) for block in blocks]
        certain: list[int] = []
        for number in sorted(range(len(blocks)), key=lambda number: (-worth[number], -number)):
            if sum(worth[one] for one in certain) >= self.policy.mass * sum(worth):
                break
            if len(certain) < len(blocks) - count:
                certain.append(number)
        others = [number for number in range(len(blocks)) if number not in certain]
        similar = self.similar([token for block in blocks for token in block])
        size = self.policy.block_size
        columns = [one * size + at for one in others for at in range(size)]
        diverse = {
            number: -sum(similar[number * size + row][column] for row in range(size) for column in columns)
            for number in others
        }
        return sorted(others, key=lambda number: (diverse[number], number))[:count]

    def similar(self, tokens: list[int]) -> list[list[float]]:
        total = torch.zeros(len(tokens), len(tokens), dtype=torch.float64)
        for head in range(self.world.space.kv_heads):
            for row, token in enumerate(tokens):
                keys = self.world.keys[self.layer, head].double()
                cosines = torch.tensor([torch.cosine_similarity(keys[token], keys[other], dim=0) for other in tokens])
                cosines[row] = 0
                cosines[cosines < cosines.mean()] = 0
                total[row] += cosines
        return (total / self.world.space.kv_heads).tolist()


def check(chosen: Policy, prompt: int, chunk: int, seed: int) -> int:
    """Every eviction of both layers keeps what the slow reading keeps; answers how many there were."""
    world = World(LENGTH, seed=seed)
    driven, slow = Driven(chosen, world, prompt), [Slow(chosen, world, layer) for layer in range(2)]
    while driven.computed < LENGTH:
        slots = driven.positions.shape[-1]
        count = chosen.kept_after(slots, driven.computed, prompt)
        driven.evict()
        first = driven.computed
        driven.compute(min(chunk, prompt - first) if first < prompt else 1)
        for layer in slow:
            if count < slots:
                layer.evict((slots - count) // chosen.block_size)
            layer.compute(first, driven.computed, scored_rows(chosen, prompt, first, driven.computed - first))
            assert driven.positions[layer.layer, 0].tolist() == layer.tokens, f"at {first}"
            if isinstance(driven.evictor, Areas) and layer.counts:
                counts = driven.evictor.counts(driven.contents())[layer.layer, chosen.start :]
                assert counts.tolist() == [layer.counts[token] for token in layer.tokens if token >= chosen.start]
    return len(driven.kept)


@pytest.mark.parametrize("kind", [Kind.SUM, Kind.NORM_SUM])
@pytest.mark.parametrize("window", [0, 3, 8])
@pytest.mark.parametrize(("prompt", "chunk"), [(45, 45), (45, 5), (2, 2), (20, 7)])
def test_blocks_with_the_least_attention_go(kind: Kind, window: int, prompt: int, chunk: int) -> None:
    assert check(policy(kind, score_window_tokens=window), prompt, chunk, seed=window) > 5


@pytest.mark.parametrize("anchor", ["KV_CRUSH_ANCHOR_MEAN", "KV_CRUSH_ANCHOR_ALTERNATING"])
@pytest.mark.parametrize("budget", [1, 2])
def test_some_blocks_are_spared_for_their_difference(anchor: str, budget: int) -> None:
    crush = common.KvCrush(budget_blocks=budget, anchor=anchor)
    chosen = policy(Kind.SUM, kvcrush=crush, max_cache_tokens=20)
    assert check(chosen, 45, 45, seed=1) > 5


@pytest.mark.parametrize("mass", [0.2, 0.6, 1.0])
@pytest.mark.parametrize("steps", [1, 4])
def test_what_is_not_sure_to_stay_does_so_by_diversity(mass: float, steps: int) -> None:
    rkv = common.AdaptiveRkv(attention_mass=mass, window_steps=steps)
    assert check(policy(Kind.ADAPTIVE_RKV, adaptive_rkv=rkv), 45, 11, seed=steps) > 5


def test_random_anchors_are_drawn_from_the_seed() -> None:
    kept = []
    for seed in (1, 1, 2, 3, 4):
        chosen = policy(Kind.SUM, kvcrush=common.KvCrush(budget_blocks=1), max_cache_tokens=16, seed=seed)
        driven = Driven(chosen, World(LENGTH), 60)
        driven.run(60)
        kept.append(torch.cat(driven.kept, -1))
    assert torch.equal(kept[0], kept[1])
    assert any(not torch.equal(kept[0], other) for other in kept[2:])


@pytest.mark.parametrize("kind", AREAS)
def test_only_whole_blocks_between_the_areas_can_go(kind: Kind) -> None:
    driven = Driven(policy(kind), World(40), 40)
    driven.compute(40)
    with pytest.raises(ValueError, match="cannot evict 3 tokens in blocks of 4"):
        driven.evictor.keep(driven.contents(), 37)
    with pytest.raises(ValueError, match="cannot evict 36 tokens"):
        driven.evictor.keep(driven.contents(), 4)


def test_a_step_without_counted_rows_is_no_registration() -> None:
    made = Areas(policy(Kind.NORM_SUM, score_window_tokens=2), KvShape(1, 1, CPU))
    made.observe(None, 20)
    made.observe(SequenceScores(torch.zeros(1, 1, 24), None, 0), 4)
    made.observe(SequenceScores(torch.zeros(1, 1, 30), None, 2), 6)
    contents = KvView(torch.arange(30)[None, None], 30, lambda: torch.zeros(1))
    assert made.counts(contents)[0, -3:].tolist() == [2, 2, 1]


def test_a_partly_filled_block_stays_behind_those_that_do() -> None:
    assert without(torch.tensor([[1], [0]]), 7, 2).tolist() == [[0, 1, 4, 5, 6], [2, 3, 4, 5, 6]]


def test_diversity_takes_keys_of_any_length_alike() -> None:
    keys = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(3))
    lengths = torch.linspace(0.5, 3, 8)[None, :, None]
    assert torch.allclose(key_diversity(keys, 4), key_diversity(keys * lengths, 4), atol=1e-6)


def test_start_and_recent_area_are_not_evictable() -> None:
    made = Areas(policy(Kind.SUM, start_tokens=8, recent_tokens=12), KvShape(1, 1, CPU))
    assert made.evictable(47) == range(2, 8)
