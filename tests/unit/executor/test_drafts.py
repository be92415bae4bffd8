"""Drafts: which are proposed, which are worth their computation, and that output never depends on them."""

import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from operator import sub
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY

from executor.batch import SequenceState
from executor.cache.tiers.hazards import SlotRef
from executor.cache.tiers.tiers import Tiers
from executor.core.draft_model import Claim
from executor.core.drafts import Decodes, DraftCosts, Drafter, Method, NgramProposer, count_accepted
from executor.core.sampler import SamplingRow, sample
from executor.errors import CapacityExceededError, InvalidStepError, UnknownSequenceError
from executor.models.forward import Model
from executor.step import Sampling, StepOutput
from protos.kvcommon.eviction import parse
from protos.kvcommon.v1 import kvcommon_pb2 as common
from tests.unit.executor.conftest import PATHS, Driver, FreeDrafts, num_accepted
from tests.unit.executor.evicting_sequences import VARIANTS

PROMPT = [5, 60, 7, 80, 9, 10, 11, 3, 44]
MOST = 6
SAMPLINGS = {
    "greedy": Sampling(),
    "greedy with penalties": Sampling(repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2),
    "sampled": Sampling(temperature=1.1, seed=7),
    "sampled with all": Sampling(
        temperature=1.2,
        top_k=20,
        top_p=0.95,
        min_p=0.01,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        seed=42,
    ),
}


class Hinted(NgramProposer):
    """Proposes an output that is known before, and is wrong after a random number of tokens."""

    chance = 0.99

    def __init__(self, expected: Sequence[int], luck: random.Random) -> None:
        super().__init__(())
        self._left = list(expected)
        self._luck = luck

    def append(self, token_id: int) -> None:
        del self._left[:1]

    def propose(self, most: int) -> list[int]:
        """Right tokens and then others; also nothing."""
        proposed = self._left[: self._luck.randint(0, most)]
        right = self._luck.randint(0, len(proposed))
        return proposed[:right] + [(token_id + 1) % 90 for token_id in proposed[right:]]


@pytest.fixture(scope="module", params=PATHS)
def tiny(request: pytest.FixtureRequest, model_folder: Callable[[str], Path]) -> Model:
    return PATHS[request.param](model_folder("llama, compiled"))


def drafting(model: Model, expected: Sequence[int], seed: int) -> Driver:
    """A driver whose sequence gets drafts of this output, more or less."""
    luck = random.Random(seed)
    return Driver(model, drafter=Drafter(MOST, lambda *_: Hinted(expected, luck), FreeDrafts))


def run(driver: Driver, sampling: Sampling, count: int) -> list[StepOutput]:
    """Steps of one sequence until it has N = `count` tokens or stops; each step allows all drafts that are left."""
    new = driver.new_sequence(1, PROMPT, sampling, room=count)
    outputs = [driver.step(new_sequences=(new,), chunks={1: len(PROMPT)})]
    have = 1
    while have < count and not outputs[-1].sampled[-1].stopped:
        most = min(MOST, count - have - 1)
        outputs.append(driver.step(drafts={1: most} if most else {}))
        have += len(outputs[-1].sampled)
    driver.step(removed=(1,))
    return outputs


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_output_is_the_same_with_drafts(tiny: Model, sampling: Sampling) -> None:
    expected = [token.token_id for token in Driver(tiny).generate(1, PROMPT, 40, sampling)]
    for seed in range(4):
        outputs = run(drafting(tiny, expected, seed), sampling, 40)
        assert [token.token_id for output in outputs for token in output.sampled] == expected
        drafts, accepted = sum(output.num_drafts for output in outputs), num_accepted(outputs)
        assert 0 < accepted < drafts
        assert len(outputs) == 40 - accepted


def test_a_stop_id_among_accepted_drafts_ends_the_sequence(tiny: Model) -> None:
    expected = [token.token_id for token in Driver(tiny).generate(1, PROMPT, 40)]
    end = next(index for index in range(5, 40) if expected[index] not in expected[:index])
    stopping = Sampling(stop_token_ids=frozenset({expected[end]}))
    for seed in range(6):
        driver = drafting(tiny, expected, seed)
        outputs = run(driver, stopping, 40)
        sampled = [token for output in outputs for token in output.sampled]
        assert [token.token_id for token in sampled] == expected[: end + 1]
        assert [token.stopped for token in sampled] == [False] * end + [True]


def test_a_stopped_sequence_ignores_the_drafts_that_a_step_allows(tiny: Model) -> None:
    expected = [token.token_id for token in Driver(tiny).generate(1, PROMPT, 2)]
    driver = drafting(tiny, expected, 1)
    joining = driver.new_sequence(1, PROMPT, Sampling(stop_token_ids=frozenset(expected[:1])))
    driver.step(new_sequences=(joining,), chunks={1: len(PROMPT)})
    assert driver.step(drafts={1: 3}).num_tokens == 0


def test_every_accepted_token_has_its_log_probabilities(tiny: Model) -> None:
    asking = Sampling(num_logprobs=2)
    plain = Driver(tiny).generate(1, PROMPT, 24, asking)
    outputs = run(drafting(tiny, [token.token_id for token in plain], 3), asking, 24)
    sampled = [token for output in outputs for token in output.sampled]
    for token, same in zip(sampled, plain, strict=True):
        assert token.logprobs is not None
        assert same.logprobs is not None
        assert token.logprobs.top_ids == same.logprobs.top_ids
        assert token.logprobs.top_logprobs == pytest.approx(same.logprobs.top_logprobs, abs=1e-4)


def test_drafts_change_nothing_of_other_sequences(tiny: Model) -> None:
    texts = [[9, 8, 7, 6], PROMPT, [1, 2, 1, 2, 1, 2]]
    samplings = list(SAMPLINGS.values())[1:]
    plain = [
        [token.token_id for token in Driver(tiny).generate(1, text, 30, sampling)]
        for text, sampling in zip(texts, samplings, strict=True)
    ]
    luck, hints = random.Random(2), iter(plain)
    driver = Driver(tiny, drafter=Drafter(MOST, lambda *_: Hinted(next(hints), luck), FreeDrafts))
    joining = tuple(driver.new_sequence(n, text, samplings[n]) for n, text in enumerate(texts))
    outputs = [driver.step(new_sequences=joining, chunks={n: len(text) for n, text in enumerate(texts)})]
    outputs += [driver.step(drafts={0: 2, 2: MOST}) for _ in range(29)]
    for number, expected in enumerate(plain):
        got = [token.token_id for output in outputs for token in output.sampled if token.sequence == number]
        assert got[:30] == expected


@pytest.mark.parametrize("sampling", [SAMPLINGS["greedy"], SAMPLINGS["sampled with all"]], ids=["greedy", "sampled"])
def test_the_real_proposer_finds_what_repeats(tiny: Model, sampling: Sampling) -> None:
    prompt = PROMPT * 4
    expected = [token.token_id for token in Driver(tiny).generate(1, prompt, 60, sampling)]
    driver = Driver(tiny, drafter=Drafter(MOST, costs=FreeDrafts))
    outputs = [driver.step(new_sequences=(driver.new_sequence(1, prompt, sampling),), chunks={1: len(prompt)})]
    got = [outputs[0].sampled[0].token_id]
    while len(got) < 60:
        wanted = outputs[-1].wanted_drafts.get(1, 0)
        outputs.append(driver.step(drafts={1: wanted} if wanted else {}))
        got += [token.token_id for token in outputs[-1].sampled]
    assert got[:60] == expected


def counted() -> dict[str, tuple[float, float]]:
    """Tokens drafted and drafts accepted so far in this process, by method."""
    names = ("kvkeep_executor_drafted_tokens_total", "kvkeep_executor_accepted_drafts_total")
    return {
        method: tuple(REGISTRY.get_sample_value(name, {"method": method}) or 0 for name in names) for method in Method
    }


@pytest.mark.parametrize("method", list(Method))
def test_drafts_are_counted_by_the_method_that_proposed_them(tiny: Model, method: Method) -> None:
    prompt = PROMPT * 4 if method is Method.NGRAM else PROMPT
    expected = [token.token_id for token in Driver(tiny).generate(1, prompt, 20)]
    draft = tiny if method is Method.DRAFT_MODEL else None
    driver = Driver(tiny, draft=draft, drafter=None if draft else Drafter(MOST, costs=FreeDrafts))
    continuation = expected if method is Method.CONTINUATION else []
    before = counted()
    joining = replace(driver.new_sequence(1, prompt), continuation=continuation)
    outputs = [driver.step(new_sequences=(joining,), chunks={1: len(prompt)})]
    while not (drafts := outputs[-1].wanted_drafts):
        outputs.append(driver.step())
    outputs.append(driver.step(drafts=drafts))
    drafted, accepted = outputs[-1].num_drafts, num_accepted(outputs[-1:])
    assert drafted > 0
    changed = {name: tuple(map(sub, now, before[name])) for name, now in counted().items() if now != before[name]}
    assert changed == {method: (drafted, accepted)}


def test_a_sequence_with_an_eviction_policy_has_no_drafts(tiny: Model) -> None:
    driver = Driver(tiny, drafter=Drafter(MOST, costs=FreeDrafts))
    policy = parse(common.EvictionPolicy(**VARIANTS["window alone"]), driver.runner.layout)
    joining = replace(driver.new_sequence(1, [3] * 12), policy=policy)
    outputs = driver.step(new_sequences=(joining,), chunks={1: 12})
    for _ in range(5):
        outputs = driver.step()
        assert not outputs.wanted_drafts
    with pytest.raises(InvalidStepError):
        driver.step(drafts={1: 2})


def test_a_step_with_wrong_drafts_is_refused(tiny: Model) -> None:
    driver = drafting(tiny, [], 1)
    driver.step(new_sequences=(driver.new_sequence(1, PROMPT, room=3),), chunks={1: 4})
    with pytest.raises(InvalidStepError, match="draft_sequences must decode"):
        driver.step(drafts={1: 2})
    driver.step(chunks={1: 5})
    with pytest.raises(UnknownSequenceError):
        driver.step(drafts={2: 1})
    with pytest.raises(InvalidStepError, match="draft_tokens must be at least 1"):
        driver.step(drafts={1: 0})
    with pytest.raises(InvalidStepError, match="draft_sequences must decode"):
        driver.step(drafts={1: 1}, idle=frozenset({1}))
    with pytest.raises(CapacityExceededError):
        driver.step(drafts={1: 3})
    with pytest.raises(InvalidStepError, match="continuation_token_ids must be below"):
        driver.step(new_sequences=(replace(driver.new_sequence(3, PROMPT), continuation=(1, 1 << 20)),))
    assert len(driver.step(drafts={1: 2}).sampled) == 1


def test_drafts_beyond_the_models_last_position_are_refused_by_their_field(tiny: Model) -> None:
    driver = drafting(tiny, [], 1)
    driver.step(new_sequences=(driver.new_sequence(1, [3] * 253, room=8),), chunks={1: 253})
    with pytest.raises(CapacityExceededError, match="the model takes 256") as caught:
        driver.step(drafts={1: 3})
    assert caught.value.fields == {"draft_tokens": "must be at most 2: the model takes no more tokens"}
    driver.step(drafts={1: 2})


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.lists(st.integers(0, 3), min_size=1, max_size=40))
def test_what_is_proposed_stood_behind_the_last_tokens_before(prompt: list[int], output: list[int]) -> None:
    proposer, text = NgramProposer(prompt), list(prompt)
    for token_id in output:
        proposer.append(token_id)
        text.append(token_id)
        proposed = proposer.propose(5)
        assert (proposer.chance > 0) == bool(proposed)
        longer = text + proposed
        earlier = [at for at in range(2, len(text)) if text[at - 2 : at] == text[-2:]]
        assert bool(proposed) == bool(earlier)
        if proposed:
            assert len(proposed) == 5
            assert any(longer[at : at + 5] == proposed for at in earlier)


def test_the_longest_run_of_tokens_counts() -> None:
    proposer = NgramProposer([1, 2, 3, 4, 50, 9, 3, 4, 60, 8, 1, 2, 3])
    proposer.append(4)
    assert proposer.propose(2) == [50, 9]


def test_a_continuation_is_followed_from_its_beginning_and_found_again() -> None:
    proposer = NgramProposer([1, 2, 3], [4, 5, 6, 7, 8, 9])
    assert (proposer.propose(9), proposer.chance) == ([4, 5, 6, 7, 8, 9], 0.8)
    proposer.append(4)
    assert proposer.propose(3) == [5, 6, 7]
    proposer.append(60)
    assert (proposer.propose(3), proposer.chance) == ([], 0)
    proposer.append(6)
    proposer.append(7)
    assert proposer.propose(9) == [8, 9]
    for token_id in (8, 9):
        proposer.append(token_id)
    # Its end says nothing about the following tokens.
    assert (proposer.propose(9), proposer.chance) == ([], 0)


def test_a_text_in_a_circle_is_proposed_on_and_on() -> None:
    proposer = NgramProposer([7, 1, 2, 3, 1, 2])
    proposer.append(3)
    assert proposer.propose(8) == [1, 2, 3, 1, 2, 3, 1, 2]


def test_drafts_are_proposed_only_where_they_save_more_than_they_cost() -> None:
    costs, four, one = DraftCosts(), Decodes(4, 10), Decodes(1, 10)
    assert costs.least_chance(four) == 1
    for _ in range(30):
        costs.observe(four, 0, 0.040)
        # Ten drafts take as long as one token of a sequence each, or no time.
        costs.observe(four, 10, 0.140)
        costs.observe(one, 0, 0.010)
        costs.observe(one, 10, 0.010)
    assert costs.least_chance(four) > 0.9
    assert costs.least_chance(one) == pytest.approx(0.1)
    for _ in range(400):
        costs.observe(four, 0, 0.040)
    assert costs.least_chance(four) < 0.3
    # A step that is held up once says little.
    costs.observe(one, 10, 5.0)
    assert costs.least_chance(one) < 0.3
    # Sequences of another length take another time.
    longer = Decodes(1, 14)
    assert costs.least_chance(longer) == 1
    for _ in range(30):
        costs.observe(longer, 0, 0.020)
        costs.observe(longer, 6, 0.140)
    assert costs.least_chance(longer) > 0.9
    assert costs.least_chance(one) < 0.3


def test_sampled_pairs_of_tokens_are_distributed_as_the_model_says() -> None:
    # Chi-square over the first two tokens, where the first draft is accepted in about one of four cases.
    torch.manual_seed(3)
    logits, many, draft = torch.randn(6, 5), 6000, 2
    found = torch.zeros(5, 5)
    for seed in range(many):
        rows = [SamplingRow(Sampling(temperature=1.0, seed=seed), position) for position in range(2)]
        # The model's logits after the draft differ from the logits after other tokens.
        ids = sample(logits[[5, draft]], rows).ids.tolist()
        kept = ids[: count_accepted(ids, [draft], frozenset())]
        if len(kept) < 2:
            kept += sample(logits[kept], [SamplingRow(Sampling(temperature=1.0, seed=seed), 1)]).ids.tolist()
        found[kept[0], kept[1]] += 1
    first = logits[5].softmax(-1)
    expected = many * first[:, None] * logits[:5].softmax(-1)
    statistic = float(((found - expected) ** 2 / expected).sum())
    # The 99.9th percentile with 24 degrees of freedom.
    assert statistic < 51.18


HOUR = 3600.0


@pytest.fixture
def slow_tiers(monkeypatch: pytest.MonkeyPatch) -> type[Tiers]:
    """Tiers in which each wait for copies takes an hour of a clock that goes forward at once."""
    clock, waits = time.perf_counter, []

    class SlowTiers(Tiers):
        @property
        def busy(self) -> bool:
            return True

        def wait(self, reads: Iterable[SlotRef] = (), writes: Iterable[SlotRef] = ()) -> None:
            waits.append(HOUR)

    monkeypatch.setattr(time, "perf_counter", lambda: clock() + sum(waits))
    return SlowTiers


def test_the_time_that_a_step_waits_for_copies_is_no_cost_of_drafts(tiny: Model, slow_tiers: type[Tiers]) -> None:
    class Costs(FreeDrafts):
        def observe(self, decodes: Decodes, drafts: int, seconds: float) -> None:
            noted.append(seconds)

    noted: list[float] = []
    drafter = Drafter(MOST, lambda *_: NgramProposer(PROMPT), Costs)
    outputs = run(Driver(tiny, tiers=slow_tiers, drafter=drafter), Sampling(), 6)
    assert noted
    assert max(noted) < HOUR
    assert all(output.compute_time < HOUR < output.idle_time for output in outputs)


def test_the_time_that_a_draft_model_waits_for_copies_is_no_computation_of_the_step(
    tiny: Model, slow_tiers: type[Tiers]
) -> None:
    class Lagging(Drafter):
        def keep_up(self, sequences: Sequence[SequenceState], claim: Claim) -> None:
            claim(())

    drafter = Lagging(MOST, lambda *_: NgramProposer(PROMPT), FreeDrafts)
    outputs = run(Driver(tiny, tiers=slow_tiers, drafter=drafter), Sampling(), 6)
    # Each step waits before it evicts, before it writes, and for the draft model.
    assert {(round(one.compute_time / HOUR), round(one.idle_time / HOUR)) for one in outputs} == {(0, 3)}
