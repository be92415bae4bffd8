"""The sampler draws from the distribution that the parameters describe, and a row's choice is its own business."""

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch

from executor.core.sampler import SamplingRow, sample
from executor.core.token_counts import TokenCounts
from executor.step import Sampling, uniform

VOCAB = 40


def _logits(rows: int, vocab: int = VOCAB, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def _draws(logits: torch.Tensor, sampling: Sampling, count: int) -> Counter[int]:
    """`count` draws of one distribution, a seed each."""
    rows = [SamplingRow(replace(sampling, seed=seed), 0) for seed in range(count)]
    return Counter(sample(logits.expand(count, -1).clone(), rows).ids.tolist())


def _expected(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """The filtered distribution, [V], computed the slow way."""
    scaled = logits.double() / sampling.temperature
    kept = list(range(len(scaled)))
    kept.sort(key=lambda token: -float(scaled[token]))
    if sampling.top_k:
        kept = kept[: sampling.top_k]
    weights = {token: math.exp(float(scaled[token] - scaled[kept[0]])) for token in kept}
    total, before, nucleus = sum(weights.values()), 0.0, []
    for token in kept:
        if before < sampling.top_p * total or sampling.top_p == 1:
            nucleus.append(token)
        before += weights[token]
    nucleus = [token for token in nucleus if weights[token] >= sampling.min_p]
    result = torch.zeros(len(scaled), dtype=torch.float64)
    for token in nucleus:
        result[token] = weights[token]
    return result / result.sum()


FILTERS = {
    "plain": Sampling(temperature=1.0),
    "hot": Sampling(temperature=1.7),
    "top_k": Sampling(temperature=1.0, top_k=5),
    "top_k_of_one": Sampling(temperature=1.0, top_k=1),
    "top_k_beyond_the_vocabulary": Sampling(temperature=1.0, top_k=1000),
    "top_p": Sampling(temperature=1.0, top_p=0.7),
    "tiny_top_p": Sampling(temperature=1.0, top_p=1e-6),
    "min_p": Sampling(temperature=1.0, min_p=0.1),
    "all_of_them": Sampling(temperature=1.3, top_k=12, top_p=0.8, min_p=0.05),
}


@pytest.mark.parametrize("name", FILTERS)
def test_draws_follow_the_filtered_distribution(name: str) -> None:
    logits, count = _logits(1)[0], 4000
    expected = _expected(logits, FILTERS[name])
    drawn = _draws(logits, FILTERS[name], count)
    assert set(drawn) <= set(expected.nonzero().flatten().tolist()), "only tokens in the support may be drawn"
    frequent = [token for token in range(VOCAB) if expected[token] * count >= 5]
    distance = sum((drawn[token] - expected[token] * count) ** 2 / (expected[token] * count) for token in frequent)
    # Mean and four standard deviations of chi-square.
    freedom = max(len(frequent) - 1, 1)
    assert float(distance) < freedom + 4 * math.sqrt(2 * freedom)


def test_a_wide_nucleus_is_not_cut_at_the_candidates() -> None:
    logits = _logits(1, vocab=5000, scale=0.01)[0]
    drawn = _draws(logits, Sampling(temperature=1.0, top_p=0.9), 3000)
    assert len(drawn) > 2000
    allowed = _expected(logits, Sampling(temperature=1.0, top_p=0.9)).nonzero().flatten().tolist()
    assert set(drawn) <= set(allowed)


def test_a_row_does_not_depend_on_the_rest_of_the_batch() -> None:
    samplings = [*FILTERS.values(), Sampling(), Sampling(temperature=0.9, top_k=700, top_p=0.99)]
    rows = [SamplingRow(replace(sampling, seed=11 * i), i) for i, sampling in enumerate(samplings)]
    logits = _logits(len(rows), vocab=3000)
    together = sample(logits.clone(), rows).ids.tolist()
    alone = [sample(logits[i : i + 1].clone(), [row]).ids.item() for i, row in enumerate(rows)]
    reverse = sample(logits.flip(0).clone(), rows[::-1]).ids.tolist()[::-1]
    assert together == alone == reverse


def test_the_choice_changes_with_seed_and_with_position() -> None:
    logits = _logits(1).expand(200, -1)
    sampling = Sampling(temperature=1.5, seed=3)
    by_position = sample(logits.clone(), [SamplingRow(sampling, i) for i in range(200)]).ids
    by_seed = sample(logits.clone(), [SamplingRow(replace(sampling, seed=i), 3) for i in range(200)]).ids
    assert len(set(by_position.tolist())) > 5
    assert len(set(by_seed.tolist())) > 5
    assert by_position.tolist() != by_seed.tolist()


def test_uniform_numbers_are_uniform_over_seeds_and_positions() -> None:
    for numbers in ([uniform(seed, 5) for seed in range(4000)], [uniform(5, place) for place in range(4000)]):
        buckets = Counter(int(number * 20) for number in numbers)
        assert max(abs(buckets[i] - 200) for i in range(20)) < 70
        assert all(0 <= number < 1 for number in numbers)
    assert uniform(2**64 - 1, 10**6) < 1


def test_rows_without_temperature_take_the_best() -> None:
    logits = _logits(3)
    assert sample(logits.clone(), [SamplingRow(Sampling(), 0)] * 3).ids.tolist() == logits.argmax(-1).tolist()


def _penalised(logits: list[float], prompt: list[int], output: list[int], sampling: Sampling) -> list[float]:
    result = list(logits)
    for token in set(prompt) | set(output):
        factor = sampling.repetition_penalty
        result[token] = result[token] / factor if result[token] > 0 else result[token] * factor
    for token in set(output):
        result[token] -= sampling.presence_penalty + sampling.frequency_penalty * output.count(token)
    return result


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(repetition_penalty=1.4),
        Sampling(presence_penalty=0.7),
        Sampling(frequency_penalty=-0.3),
        Sampling(repetition_penalty=0.8, presence_penalty=-0.2, frequency_penalty=0.5),
    ],
    ids=["repetition", "presence", "frequency", "all"],
)
def test_penalties_equal_their_naive_form(sampling: Sampling) -> None:
    prompt, output = [1, 2, 2, 7], [7, 9, 9, 9]
    counts = TokenCounts(VOCAB, torch.device("cpu"))
    # The row of the counts was another sequence's.
    counts.join(3, [5, 6, 7, 9], 2)
    counts.leave(3)
    counts.join(4, [8], 1)
    counts.join(3, prompt + output[:-2], len(prompt))
    counts.add([4, 3], torch.tensor([8, output[-2]]))
    asking = replace(sampling, num_logprobs=VOCAB)
    logits = _logits(2)
    # The last token of the output is drafted.
    counted = SamplingRow(asking, 4, counted=3, drafted=output[-1:])
    choice = sample(logits.clone(), [SamplingRow(Sampling(), 0), counted], counts=counts)
    expected = torch.tensor(_penalised(logits[1].tolist(), prompt, output, sampling))
    assert choice.ids.tolist() == [int(logits[0].argmax()), int(expected.argmax())]
    assert choice.top_ids is not None
    assert choice.top_logprobs is not None
    found = torch.empty(VOCAB)
    found[choice.top_ids[0]] = choice.top_logprobs[0]
    torch.testing.assert_close(found, expected.log_softmax(0), rtol=1e-5, atol=1e-5)


def test_logprobs_are_those_before_temperature_and_filters() -> None:
    logits = _logits(3)
    rows = [
        SamplingRow(Sampling(temperature=2.0, top_k=3, seed=1, num_logprobs=2), 0),
        SamplingRow(Sampling(), 0),
        SamplingRow(Sampling(num_logprobs=0), 0),
    ]
    choice = sample(logits.clone(), rows)
    expected = logits.log_softmax(-1)
    assert choice.logprob_rows == (0, 2)
    assert choice.logprobs is not None
    assert choice.top_ids is not None
    torch.testing.assert_close(choice.logprobs[0], expected[0, choice.ids[0]])
    torch.testing.assert_close(choice.logprobs[1], expected[2].max())
    assert choice.top_ids[0].tolist() == logits[0].topk(2).indices.tolist()


@pytest.mark.parametrize("temperature", [1e-6, 1e-37, 1e-38, 1e-45, 1e-300])
@pytest.mark.parametrize("filters", [{}, {"top_k": 5, "top_p": 0.9, "min_p": 0.1}], ids=["plain", "filtered"])
def test_the_coldest_temperatures_take_the_best(temperature: float, filters: dict[str, float]) -> None:
    logits = _logits(3, scale=30.0)
    best = logits.argmax(-1)
    rows = [SamplingRow(Sampling(temperature=temperature, seed=seed, **filters), 0, None) for seed in range(3)]  # type: ignore[arg-type]
    assert torch.equal(sample(logits, rows).ids, best)
