"""What policies that choose single tokens keep, against slow and plain readings of their papers."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from executor.eviction.base import KvShape, KvView
from executor.eviction.engine import EVICTORS
from executor.eviction.scoring import generator, lowest
from kernels.scores import SequenceScores
from protos.kvcommon.eviction import Kind, Policy
from tests.unit.executor.eviction.driving import CPU, Driven, World, policy

PROMPT, LENGTH = 30, 60


class Slow:
    """One KV head of one layer of a world, token by token."""

    def __init__(self, world: World, layer: int, head: int) -> None:
        self.world, self.layer, self.head = world, layer, head
        # Of every query head of the layer, the group's own ones first; [heads, n, n].
        weights = world.weights[layer].double()
        first = head * world.group
        self.group = weights[first : first + world.group]
        self.all = weights
        self.keys = world.keys[layer, head].double()
        self.computed = 0
        # The tokens of each KV head of the layer.
        self.held: list[list[int]] = []

    def seen(self, token: int, first: int = 0) -> torch.Tensor:
        """Weights that computed queries of the group had for a token, the queries from `first` on."""
        return self.group[:, max(first, token) : self.computed, token].flatten()


Score = Callable[[Slow, int, list[int], Policy], Any]


def h2o(slow: Slow, token: int, tokens: list[int], chosen: Policy) -> float:
    return round(float(slow.seen(token).sum()), 9)


def average(slow: Slow, token: int, tokens: list[int], chosen: Policy) -> float:
    return float(slow.seen(token).sum()) / (slow.computed - 1 + 1 - token)


def tova(slow: Slow, token: int, tokens: list[int], chosen: Policy) -> float:
    return float(slow.all[:, slow.computed - 1, token].mean())


def keydiff(slow: Slow, token: int, tokens: list[int], chosen: Policy) -> float:
    normal = [slow.keys[other] / slow.keys[other].norm() for other in tokens]
    mean = sum(normal, torch.zeros(())) / len(normal)
    return -float(torch.cosine_similarity(slow.keys[token], mean, dim=0))


def knorm(slow: Slow, token: int, tokens: list[int], chosen: Policy) -> float:
    return -float(slow.keys[token].norm())


def snapkv(slow: Slow, token: int, tokens: list[int], chosen: Policy) -> float:
    window = PROMPT - chosen.score_window
    near = [other for other in range(token - 3, token + 4) if 0 <= other < window]
    return max((float(slow.seen(other, window).sum()) for other in near), default=0.0)


def newest(slow: Slow, token: int, tokens: list[int], chosen: Policy) -> int:
    return token


SCORES: dict[Kind, Score] = {
    Kind.SLIDING_WINDOW: newest,
    Kind.LAST: newest,
    Kind.ADAPTIVE_WINDOW: newest,
    Kind.H2O: h2o,
    Kind.AVERAGE: average,
    Kind.TOVA: tova,
    Kind.KEYDIFF: keydiff,
    Kind.KNORM: knorm,
    Kind.SNAPKV: snapkv,
}


def free(chosen: Policy, computed: int, tokens: Iterable[int]) -> list[int]:
    """Tokens in neither the start nor the recent area."""
    return [token for token in tokens if chosen.start <= token < computed - chosen.recent]


def reduced(chosen: Policy, slow: Slow, tokens: list[int], count: int) -> list[int]:
    """The tokens that stay by the policy's score alone."""
    score = SCORES[chosen.kind]
    going = sorted(free(chosen, slow.computed, tokens), key=lambda token: (score(slow, token, tokens, chosen), token))
    return sorted(set(tokens) - set(going[: len(tokens) - count]))


def reduced_by_variation(chosen: Policy, slow: Slow, tokens: list[int], count: int) -> list[int]:
    """RoCo: as many of the tokens that vary most as are recent are left alone, then the lowest means go."""
    statistics = {token: slow.seen(token) for token in free(chosen, slow.computed, tokens)}
    steady = sorted(statistics, key=lambda token: (float(statistics[token].std(correction=0)), token))
    steady = steady[: max(len(tokens) - count, len(steady) - chosen.recent)]
    going = sorted(steady, key=lambda token: (float(statistics[token].mean()), token))
    return sorted(set(tokens) - set(going[: len(tokens) - count]))


def reduced_by_two(chosen: Policy, slow: Slow, tokens: list[int], count: int) -> list[int]:
    """Half of what is free stays for the last query, by the heads that hold a token; then the lowest sums go."""
    going = free(chosen, slow.computed, tokens)
    half = (count - (len(tokens) - len(going))) // 2
    heads = [slice(head * slow.world.group, (head + 1) * slow.world.group) for head in range(len(slow.held))]

    def last(token: int) -> float:
        return sum(
            float(slow.all[rows, slow.computed - 1, token].sum())
            for rows, held in zip(heads, slow.held, strict=True)
            if token in held
        )

    by_last = sorted(going, key=lambda token: (last(token), token))
    going = sorted(by_last[: len(by_last) - half], key=lambda token: (h2o(slow, token, tokens, chosen), token))
    return sorted(set(tokens) - set(going[: len(tokens) - count]))


REDUCED = {Kind.ROCO: reduced_by_variation, Kind.H2O_TOVA: reduced_by_two}


def check(chosen: Policy, chunk: int, seed: int = 0) -> None:
    """Every eviction keeps the same tokens as the slow reading."""
    world = World(LENGTH, seed=seed)
    driven = Driven(chosen, world, PROMPT, shuffle=True)
    slow = {(layer, head): Slow(world, layer, head) for layer in range(2) for head in range(2)}
    tokens: dict[tuple[int, int], list[int]] = {place: [] for place in slow}
    keep = REDUCED.get(chosen.kind, reduced)
    while driven.computed < LENGTH:
        slots = driven.positions.shape[-1]
        count = chosen.kept_after(slots, driven.computed, PROMPT)
        driven.evict()
        for (layer, _), one in slow.items():
            one.computed = driven.computed
            one.held = [tokens[layer, head] for head in range(2)]
        for place, one in slow.items():
            if count < slots:
                tokens[place] = keep(chosen, one, tokens[place], count)
                assert sorted(driven.positions[place].tolist()) == tokens[place], f"{place} at {driven.computed}"
        room = chosen.room(count, driven.computed, PROMPT)
        wanted = min(chunk, PROMPT - driven.computed) if driven.computed < PROMPT else 1
        first = driven.computed
        driven.compute(wanted if room is None else min(wanted, room))
        for place in slow:
            tokens[place] += range(first, driven.computed)
    assert driven.kept


@pytest.mark.parametrize("kind", [*SCORES, *REDUCED])
@pytest.mark.parametrize("chunk", [7, PROMPT])
def test_policies_keep_what_their_papers_say(kind: Kind, chunk: int) -> None:
    check(policy(kind), chunk)


@pytest.mark.parametrize("kind", [Kind.AVERAGE, Kind.H2O, Kind.TOVA, Kind.ROCO, Kind.KEYDIFF, Kind.SLIDING_WINDOW])
def test_policies_evict_while_the_prompt_is_computed(kind: Kind) -> None:
    check(policy(kind, during_prefill=True), 5)


def test_areas_may_be_empty() -> None:
    check(policy(Kind.SLIDING_WINDOW, start_tokens=0, recent_tokens=5), 8)
    check(policy(Kind.KEYDIFF, start_tokens=0, recent_tokens=0), 8)


def observed(kind: Kind, weights: list[float], **fields: Any) -> tuple[Any, KvView]:
    """An evictor of one head that saw these weights in one step."""
    made = EVICTORS[kind](policy(kind, **fields), KvShape(1, 1, CPU))
    values, slots = torch.tensor([[weights]]), len(weights)
    made.observe(SequenceScores(values, values.square(), 1), slots)
    return made, KvView(torch.arange(slots)[None, None], slots, lambda: torch.ones(1, 1, slots, 2))


def test_of_equal_scores_the_earlier_is_evicted() -> None:
    made, contents = observed(Kind.H2O, [0.1, 0.2, 0.1, 0.1, 0.2, 0.3], recent_tokens=1)
    assert made.keep(contents, 4).tolist() == [[[1, 3, 4, 5]]]
    made, contents = observed(Kind.KNORM, [0.0] * 6, start_tokens=1, recent_tokens=1)
    assert made.keep(contents, 4).tolist() == [[[0, 3, 4, 5]]]


def test_zeros_of_either_sign_are_equal() -> None:
    scores = torch.tensor([0.0, -0.0, 0.0, -1.0])
    assert lowest(scores, torch.arange(4), 2).sort().values.tolist() == [0, 3]


def test_squares_are_asked_for() -> None:
    made = EVICTORS[Kind.ROCO](policy(Kind.ROCO), KvShape(1, 1, CPU))
    with pytest.raises(ValueError, match="squares"):
        made.observe(SequenceScores(torch.ones(1, 1, 3), None, 1), 3)


def test_chance_depends_on_the_seed_and_the_length_and_on_nothing_else() -> None:
    kept = []
    for seed, length in ((1, 60), (1, 60), (1 << 40, 60), (2, 60), (1, 61)):
        made = EVICTORS[Kind.RANDOM](
            policy(Kind.RANDOM, start_tokens=0, recent_tokens=0, seed=seed), KvShape(2, 2, CPU)
        )
        contents = KvView(torch.arange(60).expand(2, 2, -1), length, lambda: torch.ones(2, 2, 60, 2))
        kept.append(made.keep(contents, 30))
    assert torch.equal(kept[0], kept[1])
    assert not any(torch.equal(kept[0], other) for other in kept[2:])
    assert not torch.equal(kept[0][0, 0], kept[0][0, 1])


def test_draws_are_spread_evenly() -> None:
    drawn = torch.cat([torch.rand(64, generator=generator(policy(Kind.RANDOM), computed)) for computed in range(64)])
    assert float(drawn.mean()) == pytest.approx(0.5, abs=0.03)
