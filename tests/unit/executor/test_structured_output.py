"""Sampling under grammars and other restrictions: its outputs, and that they are the same however they are computed."""

import itertools
import json
import math
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from executor.core.drafts import Drafter
from executor.core.grammars import Grammars
from executor.errors import InvalidStepError
from executor.models.forward import Model
from executor.step import Grammar, GrammarKind, SampledToken, Sampling
from tests.support.heavy_grammar import FOLLOWED, HEAVY
from tests.support.scheduler.tokenizers import EOS, printable_tokenizer
from tests.unit.executor.conftest import PATHS, Driver, FreeDrafts, num_accepted
from tests.unit.executor.test_drafts import MOST, PROMPT, Hinted, run

TOKENIZER = printable_tokenizer()
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": -9, "maximum": 999}, "maxItems": 3},
        "good": {"type": "boolean"},
    },
    "required": ["name", "sizes", "good"],
    "additionalProperties": False,
}
JSON = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))
WORDS = Grammar(GrammarKind.REGEX, "(ab|ba|c+ ){6,9}")
COUNT = 120
SAMPLINGS = {
    "greedy": Sampling(),
    "sampled": Sampling(temperature=1.3, top_k=30, top_p=0.95, seed=11),
    "penalised": Sampling(temperature=0.8, min_p=0.01, repetition_penalty=1.3, frequency_penalty=0.4, seed=5),
}


@pytest.fixture(scope="module", params=PATHS)
def tiny(request: pytest.FixtureRequest, model_folder: Callable[[str], Path]) -> Model:
    return PATHS[request.param](model_folder("llama, compiled"))


def grammars() -> Grammars:
    return Grammars(TOKENIZER.to_str().encode(), TOKENIZER.get_vocab_size(), [EOS])


@pytest.fixture
def driver(tiny: Model) -> Driver:
    return Driver(tiny, num_blocks=400, grammars=grammars())


def text_of(sampled: list[SampledToken]) -> str:
    """The text in front of the end."""
    assert [token.stopped for token in sampled] == [False] * (len(sampled) - 1) + [True]
    assert sampled[-1].token_id == EOS
    return str(TOKENIZER.decode([token.token_id for token in sampled[:-1]], skip_special_tokens=False))


def is_valid(text: str) -> bool:
    value = json.loads(text)
    return (
        list(value) == ["name", "sizes", "good"]
        and len(value["name"]) <= 6
        and all(-9 <= size <= 999 for size in value["sizes"])
        and isinstance(value["good"], bool)
    )


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_output_has_the_form_that_its_grammar_says(driver: Driver, sampling: Sampling) -> None:
    texts = set()
    for seed in range(6):
        prompt = [*PROMPT, seed]
        constrained = replace(sampling, seed=sampling.seed + seed, grammar=JSON)
        texts.add(text_of(driver.generate(1, prompt, COUNT, constrained)))
    assert all(map(is_valid, texts))
    assert len(texts) > 2
    for ignored in (frozenset[int](), frozenset({3, 4})):
        words = text_of(driver.generate(2, PROMPT, COUNT, replace(sampling, grammar=WORDS, stop_token_ids=ignored)))
        assert re.fullmatch("(ab|ba|c+ ){6,9}", words)


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("grammar", [JSON, WORDS], ids=["JSON", "words"])
def test_output_under_a_grammar_is_the_same_with_drafts(tiny: Model, grammar: Grammar, sampling: Sampling) -> None:
    constrained = replace(sampling, grammar=grammar)
    expected = [one.token_id for one in Driver(tiny, grammars=grammars()).generate(1, PROMPT, COUNT, constrained)]
    for seed in range(4):
        luck = random.Random(seed)
        drafter = Drafter(MOST, lambda *_, luck=luck: Hinted(expected, luck), FreeDrafts)  # type: ignore[misc]
        outputs = run(Driver(tiny, drafter=drafter, grammars=grammars()), constrained, COUNT)
        assert [token.token_id for output in outputs for token in output.sampled] == expected
        assert num_accepted(outputs) > 0


def test_a_grammar_that_becomes_too_complex_fails_its_output_with_and_without_drafts(tiny: Model) -> None:
    heavy = Sampling(grammar=Grammar(GrammarKind.GRAMMAR, HEAVY))
    expected = Driver(tiny, num_blocks=400, grammars=grammars()).generate(1, PROMPT, 400, heavy)
    assert "".join(map(TOKENIZER.id_to_token, [token.token_id for token in expected[:-1]])) == "a" * FOLLOWED
    assert [token.failed for token in expected] == [False] * FOLLOWED + [True]
    assert (expected[-1].token_id, expected[-1].stopped) == (EOS, True)
    letters = [token.token_id for token in expected[:-1]]
    for seed in range(4):
        luck = random.Random(seed)
        drafter = Drafter(MOST, lambda *_, luck=luck: Hinted(letters + letters, luck), FreeDrafts)  # type: ignore[misc]
        outputs = run(Driver(tiny, num_blocks=400, drafter=drafter, grammars=grammars()), heavy, 400)
        assert [token for output in outputs for token in output.sampled] == expected
        assert num_accepted(outputs) > 0


def test_output_under_a_grammar_is_the_same_after_a_preemption(driver: Driver) -> None:
    sampling = replace(SAMPLINGS["sampled"], grammar=JSON, bad_token_ids=((5, 6), (7, 8, 9)), min_tokens=30)
    whole = [one.token_id for one in driver.generate(1, PROMPT, COUNT, sampling)]
    for known in (1, 2, len(whole) // 2, len(whole) - 1):
        tokens = PROMPT + whole[:known]
        joining = driver.new_sequence(2, tokens, sampling, prompt=len(PROMPT))
        rest = driver.step(new_sequences=(joining,), chunks={2: len(tokens)}).sampled
        while not rest[-1].stopped:
            rest += driver.step().sampled
        driver.step(removed=(2,))
        assert [one.token_id for one in rest] == whole[known:]


def test_free_and_constrained_sequences_of_a_batch_do_not_change_each_other(driver: Driver) -> None:
    samplings = {
        1: Sampling(),
        2: replace(SAMPLINGS["sampled"], grammar=JSON),
        3: SAMPLINGS["sampled"],
        4: Sampling(grammar=WORDS),
        5: Sampling(num_logprobs=2, grammar=WORDS),
    }
    alone = {one: driver.generate(one, [*PROMPT, one], 40, sampling) for one, sampling in samplings.items()}
    joining = tuple(driver.new_sequence(one, [*PROMPT, one], sampling) for one, sampling in samplings.items())
    outcome = driver.step(new_sequences=joining, chunks=dict.fromkeys(samplings, len(PROMPT) + 1))
    together: dict[int, list[SampledToken]] = {one: [] for one in samplings}
    for _ in range(40):
        for token in outcome.sampled:
            together[token.sequence].append(token)
        outcome = driver.step()
    for one, tokens in alone.items():
        assert [token.token_id for token in together[one]] == [token.token_id for token in tokens]


def test_log_probabilities_are_those_of_the_allowed_tokens(driver: Driver) -> None:
    sampled = driver.generate(1, PROMPT, COUNT, Sampling(num_logprobs=5, grammar=WORDS))
    for token in sampled:
        assert token.logprobs is not None
        best = token.logprobs
        assert all(map(math.isfinite, (best.logprob, *best.top_logprobs)))
        assert best.top_ids[0] == token.token_id
        if len(best.top_ids) < 5:
            assert sum(map(math.exp, best.top_logprobs)) == pytest.approx(1, abs=1e-4)
    assert min(len(token.logprobs.top_ids) for token in sampled if token.logprobs) == 1


def test_biases_and_forbidden_and_chosen_tokens_change_what_is_sampled(driver: Driver) -> None:
    def ids(**fields: object) -> list[int]:
        return [one.token_id for one in driver.generate(1, PROMPT, 12, Sampling(**fields))]  # type: ignore[arg-type]

    free = ids()
    assert ids(logit_bias={33: 100.0}) == [33] * 12
    assert ids(logit_bias={free[0]: -100.0})[0] != free[0]
    assert ids(bad_token_ids=((free[0],),))[0] != free[0]
    pair = (free[1], free[2])
    without = ids(bad_token_ids=(pair,))
    assert without[:2] == free[:2]
    assert pair not in itertools.pairwise(without)
    assert set(ids(allowed_token_ids=(3, 4))) <= {3, 4}
    stopping = frozenset({free[0]})
    assert len(ids(stop_token_ids=stopping)) == 1
    assert len(ids(stop_token_ids=stopping, min_tokens=7)) >= 7


def test_a_grammar_that_cannot_be_compiled_changes_nothing(driver: Driver) -> None:
    bad = driver.new_sequence(1, PROMPT, Sampling(grammar=Grammar(GrammarKind.REGEX, "(")))
    field = "new_sequences.sampling.structured_output"
    with pytest.raises(InvalidStepError, match=rf"^sequence 1: {field} cannot be compiled: .*unclosed group") as error:
        driver.step(new_sequences=(bad,), chunks={1: len(PROMPT)})
    assert (list(error.value.fields), error.value.metadata) == ([field], {"sequence": "1"})
    assert driver.runner.num_sequences == 0
    assert driver.generate(1, PROMPT, 3)


# Log-probabilities of prompts


@pytest.mark.parametrize("chunk", [1000, 4, 1])
def test_log_probabilities_of_a_prompt_are_those_of_its_tokens_as_output(driver: Driver, chunk: int) -> None:
    sampling = Sampling(num_prompt_logprobs=3)
    outcomes = [driver.step(new_sequences=(driver.new_sequence(1, PROMPT, sampling),), chunks={1: min(chunk, 9)})]
    while not outcomes[-1].sampled:
        left = len(PROMPT) - sum(outcome.num_tokens for outcome in outcomes)
        outcomes.append(driver.step(chunks={1: min(chunk, left)}))
    last = driver.step()
    assert not last.prompt_logprobs
    driver.step(removed=(1,))
    found = {
        position: one
        for outcome in outcomes
        for prompt in outcome.prompt_logprobs
        for position, one in enumerate(prompt.logprobs, prompt.position)
    }
    assert list(found) == list(range(1, len(PROMPT)))
    for position, one in found.items():
        behind = Sampling(num_logprobs=20)
        [token] = driver.generate(2, PROMPT[:position], 1, behind)
        assert token.logprobs is not None
        assert one.top_ids == token.logprobs.top_ids[:3]
        assert one.top_logprobs == pytest.approx(token.logprobs.top_logprobs[:3], abs=1e-4)
        if PROMPT[position] in token.logprobs.top_ids:
            rank = token.logprobs.top_ids.index(PROMPT[position])
            assert one.rank == rank + 1
            assert one.logprob == pytest.approx(token.logprobs.top_logprobs[rank], abs=1e-4)
        else:
            assert one.rank > 20
    assert any(one.rank <= 20 for one in found.values())


def test_scored_prompts_and_others_of_a_batch_do_not_change_each_other(driver: Driver) -> None:
    samplings = {1: Sampling(), 2: Sampling(num_prompt_logprobs=0), 3: replace(SAMPLINGS["sampled"], grammar=WORDS)}
    alone = {one: driver.generate(one, [*PROMPT, one], 8, sampling) for one, sampling in samplings.items()}
    joining = tuple(driver.new_sequence(one, [*PROMPT, one], sampling) for one, sampling in samplings.items())
    first = driver.step(new_sequences=joining, chunks={1: 10, 2: 6, 3: 10})
    outcomes = [first, driver.step(chunks={2: 4}), *(driver.step() for _ in range(8))]
    for one, tokens in alone.items():
        together = [token.token_id for outcome in outcomes for token in outcome.sampled if token.sequence == one]
        assert together[:8] == [token.token_id for token in tokens]
    assert [len(prompt.logprobs) for outcome in outcomes for prompt in outcome.prompt_logprobs] == [6, 3]


def test_a_prompt_is_scored_only_where_nothing_of_it_is_computed(driver: Driver) -> None:
    joining = replace(driver.new_sequence(1, PROMPT, Sampling(num_prompt_logprobs=1)), num_computed_tokens=4)
    with pytest.raises(InvalidStepError, match="num_computed_tokens must be 0"):
        driver.step(new_sequences=(joining,), chunks={1: 5})
