"""Eviction of blocks, beside the facts that vectors/ states."""

import pytest
import torch

from executor.eviction.areas import Areas, without
from executor.eviction.base import KvShape, KvView
from executor.eviction.rkv import AdaptiveRkv, key_diversity
from kernels.scores import SequenceScores
from protos.kvcommon.eviction import AREAS, Kind
from protos.kvcommon.v1 import kvcommon_pb2 as common
from tests.unit.executor.eviction.driving import CPU, Driven, World, policy


def test_random_anchors_are_drawn_from_the_seed() -> None:
    kept = []
    for seed in (1, 1, 2, 3, 4):
        chosen = policy(Kind.SUM, kvcrush=common.KvCrush(budget_blocks=1), max_cache_tokens=16, seed=seed)
        driven = Driven(chosen, World(75), 60)
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


def test_diversity_is_how_little_a_key_is_like_those_that_are_more_alike_than_the_mean() -> None:
    keys, size = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(3)), 4
    expected = torch.zeros(2, 8)
    for head in keys:
        for row in range(8):
            alike = torch.cosine_similarity(head[row][None], head, dim=-1)
            alike[row] = 0
            expected[row // size] -= torch.where(alike < alike.mean(), 0, alike) / len(keys)
    torch.testing.assert_close(key_diversity(keys, size), expected)
    lengths = torch.linspace(0.5, 3, 8)[None, :, None]
    torch.testing.assert_close(key_diversity(keys * lengths, size), expected)


def test_scores_of_recent_steps_follow_their_tokens() -> None:
    chosen = policy(Kind.ADAPTIVE_RKV, block_size=1, start_tokens=1, recent_tokens=1)
    made, weights = AdaptiveRkv(chosen, KvShape(2, 1, CPU), pooled=0), torch.rand(2, 1, 5)
    made.observe(SequenceScores(weights, None, 5), 5)
    kept = made.keep(KvView(torch.arange(5).expand(2, 1, -1), 5, lambda: torch.randn(2, 1, 5, 8)), 3)
    made.reindex(kept)
    made.observe(SequenceScores(torch.ones(2, 1, 4), None, 1), 1)
    torch.testing.assert_close(made.scores(4)[:, 1:3], (weights.gather(-1, kept)[:, 0, 1:] + 1) / 2)


def test_start_and_recent_area_are_not_evictable() -> None:
    made = Areas(policy(Kind.SUM, start_tokens=8, recent_tokens=12), KvShape(1, 1, CPU))
    assert made.evictable(47) == range(2, 8)
