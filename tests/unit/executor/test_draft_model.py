"""A draft model: its keys and values lie in the same blocks, and output stays the same whatever it proposes."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from executor.cache.pool import KvPools, LayerShape
from executor.cache.shares import Shares
from executor.cache.tiers.device import CpuBlocks
from executor.cache.tiers.hazards import SlotRef
from executor.core.draft_model import Draft
from executor.core.drafts import Decodes, DraftCosts, Method, ModelChance, Proposed
from executor.errors import ModelError
from executor.models.files import ModelFiles
from executor.models.forward import Model
from executor.models.tokenizer import TokenizerFiles
from executor.settings import ExecutorSettings
from executor.step import Copy, Sampling, StepOutput
from protos.rpc.settings import SettingsError
from protos.rpc.settings import load as load_settings
from tests.support.scheduler.tokenizers import byte_level_tokenizer
from tests.unit.executor.conftest import BLOCK_SIZE, Driver, load, num_accepted, on_torch, save_model
from tests.unit.executor.test_drafts import SAMPLINGS

# Without a run of tokens that stands in it twice.
PROMPT = [5, 60, 7, 80, 9, 10, 11, 3, 44, 90, 21, 33, 2, 71]


@pytest.fixture(scope="module")
def model(model_folder: Callable[[str], Path]) -> Model:
    return load(model_folder("llama, compiled"))


@pytest.fixture(scope="module")
def same(model_folder: Callable[[str], Path]) -> Model:
    """The model itself as its draft model: it is always right where it has all keys and values."""
    return load(model_folder("llama, compiled"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A model of another shape, which is hardly ever right; it runs on torch."""
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        max_position_embeddings=64,
        eos_token_id=None,
    )
    return on_torch(save_model(config, tmp_path_factory.mktemp("other"), seed=9))


def run(driver: Driver, count: int, sampling: Sampling, handle: int = 1, **joining: object) -> list[StepOutput]:
    """Steps of one sequence until it has N = `count` tokens; each step computes as many drafts as are worth it."""
    new = replace(driver.new_sequence(handle, PROMPT, sampling), **joining)
    left = len(PROMPT) - new.num_computed_tokens
    outputs = [driver.step(new_sequences=(new,), chunks={handle: left} if left > 1 else {})]
    have = 1
    while have < count:
        wanted = min(outputs[-1].wanted_drafts.get(handle, 0), count - have - 1)
        outputs.append(driver.step(drafts={handle: wanted} if wanted > 0 else {}))
        have += len(outputs[-1].sampled)
    return outputs


def ids_of(outputs: list[StepOutput]) -> list[int]:
    return [token.token_id for output in outputs for token in output.sampled]


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("kind", ["same", "other"])
def test_output_is_the_same_whatever_the_draft_model_says(
    model: Model, request: pytest.FixtureRequest, sampling: Sampling, kind: str
) -> None:
    expected = [token.token_id for token in Driver(model).generate(1, PROMPT, 40, sampling)]
    outputs = run(Driver(model, draft=request.getfixturevalue(kind)), 40, sampling)
    assert ids_of(outputs) == expected
    assert sum(output.num_drafts for output in outputs) > 0


def test_a_draft_model_that_is_right_saves_most_steps(model: Model, same: Model) -> None:
    outputs = run(Driver(model, draft=same), 40, Sampling())
    drafts, accepted = sum(output.num_drafts for output in outputs), num_accepted(outputs)
    # Rejected are only those of text that repeats, which the model has not said.
    assert accepted >= 0.9 * drafts
    assert len(outputs) == 40 - accepted < 15


def test_a_draft_model_that_is_wrong_is_asked_less_and_less(model: Model, other: Model) -> None:
    driver = Driver(model, num_blocks=400, draft=other)
    new = driver.new_sequence(1, PROMPT[:4], Sampling(temperature=1.5, seed=1), room=60)
    outputs = [driver.step(new_sequences=(new,), chunks={1: 4})]
    while sum(len(output.sampled) for output in outputs) < 45:
        wanted = outputs[-1].wanted_drafts.get(1, 0)
        outputs.append(driver.step(drafts={1: wanted} if wanted else {}))
    half = len(outputs) // 2
    first, last = (sum(output.num_drafts for output in part) for part in (outputs[:half], outputs[half:]))
    assert last < first / 2


def test_a_draft_model_knows_a_prefix_that_another_sequence_has_computed(model: Model, same: Model) -> None:
    """Also after a copy of a block that is partly filled."""
    driver = Driver(model, draft=same)
    run(driver, 30, Sampling())
    shared = driver.runner._sequences.get(1).tables[0][:4].tolist()
    own = list(driver.blocks(64)[0])
    copy = Copy(7, 0, shared[3], own[0])
    table = ((*shared[:3], *own),)
    new = replace(driver.new_sequence(2, PROMPT), tables=table, num_computed_tokens=13)
    outputs = [driver.step(new_sequences=(new,), copies=(copy,), idle=frozenset({1}))]
    for _ in range(6):
        wanted = outputs[-1].wanted_drafts.get(2, 0)
        outputs.append(driver.step(drafts={2: wanted} if wanted else {}, idle=frozenset({1})))
    drafts, accepted = sum(output.num_drafts for output in outputs), num_accepted(outputs)
    assert drafts > 10
    assert accepted >= 0.9 * drafts


def test_a_prompt_in_chunks_and_a_batch_of_several_change_nothing(model: Model, same: Model) -> None:
    prompts = {1: PROMPT, 2: PROMPT[::-1], 3: PROMPT[3:9]}
    plain = {n: [token.token_id for token in Driver(model).generate(n, ids, 20)] for n, ids in prompts.items()}
    driver = Driver(model, draft=same)
    joining = tuple(driver.new_sequence(number, ids) for number, ids in prompts.items())
    outputs = [driver.step(new_sequences=joining, chunks=dict.fromkeys(prompts, 5))]
    left = {number: len(ids) - 5 for number, ids in prompts.items()}
    while any(left.values()):
        chunks = {number: min(5, count) for number, count in left.items() if count > 1}
        left = {n: count - (chunks.get(n, min(count, 1))) for n, count in left.items()}
        outputs.append(driver.step(chunks=chunks))
    for _ in range(8):
        outputs.append(driver.step(drafts=outputs[-1].wanted_drafts))
    for number, expected in plain.items():
        got = [token.token_id for output in outputs for token in output.sampled if token.sequence == number]
        assert len(got) >= 8
        assert got[:20] == expected[: len(got)]


def test_no_draft_lies_behind_the_draft_models_last_position(model: Model, other: Model) -> None:
    expected = [token.token_id for token in Driver(model).generate(1, PROMPT, 64)]
    driver = Driver(model, draft=other)
    assert ids_of(run(driver, 64, Sampling())) == expected


class DearDrafts(DraftCosts):
    """No draft is worth its computation."""

    def least_chance(self, decodes: Decodes) -> float:
        return 1.0


def test_a_draft_model_computes_output_only_where_it_has_use_for_it(model: Model, same: Model) -> None:
    driver = Driver(model, draft=same)
    drafter = driver.drafter
    assert drafter is not None
    assert drafter._model is not None
    free, drafter._model_costs = drafter._model_costs, DearDrafts()
    run(driver, 20, Sampling())
    assert drafter._model._followed[1].ready == len(PROMPT)
    # What it has left out it computes when that changes, and claims the slots: a copy may read these blocks.
    drafter._model_costs = free
    claimed: list[SlotRef] = []
    driver.runner._claim = claimed.extend  # type: ignore[method-assign,assignment]
    outputs = [driver.step()]
    ready = drafter._model._followed[1].ready
    blocks = driver.runner._sequences.get(1).tables[0][len(PROMPT) // BLOCK_SIZE : -(-ready // BLOCK_SIZE)]
    assert ready > len(PROMPT) + BLOCK_SIZE
    assert {slot for _, _, slot in claimed} == set(blocks.tolist())
    for _ in range(5):
        outputs.append(driver.step(drafts=outputs[-1].wanted_drafts))
    drafts, accepted = sum(output.num_drafts for output in outputs), num_accepted(outputs)
    assert drafts > 10
    assert accepted >= 0.9 * drafts
    assert drafter._model._followed[1].ready > len(PROMPT) + 20


def test_slots_are_claimed_before_the_draft_model_writes_them(model: Model, same: Model) -> None:
    driver = Driver(model, draft=same)
    outputs = [driver.step(new_sequences=(driver.new_sequence(1, PROMPT),), chunks={1: len(PROMPT)})]
    (ahead, sequence) = driver.drafter._model, driver.runner._sequences.get(1)  # type: ignore[union-attr]
    claimed: list[SlotRef] = []
    assert ahead is not None
    with torch.inference_mode():
        (drafts,) = ahead.propose({1: 6}, claimed.extend).values()
    assert len(drafts) == 6
    # The prompt's tokens are computed; the sampled token and five drafts after it are written.
    blocks = sequence.tables[0][len(PROMPT) // BLOCK_SIZE : (len(PROMPT) + 5) // BLOCK_SIZE + 1]
    assert {slot for _, _, slot in claimed} == set(blocks.tolist())
    assert outputs


# Blocks


def pools_of(model: Model, draft: Model, shares: Shares) -> KvPools:
    own = KvPools(draft.groups, shares, BLOCK_SIZE, torch.bfloat16, torch.device("cpu"))
    return KvPools(model.groups, shares, BLOCK_SIZE, torch.float32, torch.device("cpu"), drafts={0: own.pools[0]})


def test_a_block_is_copied_as_a_whole(model: Model, other: Model) -> None:
    pools = pools_of(model, other, Shares.fixed([8]))
    pool = pools.pools[0]
    for cache in pool.caches:
        cache.copy_(torch.randn(cache.shape))
    before = [cache[:, 3].clone() for cache in pool.caches]
    alone = KvPools(model.groups, 8, BLOCK_SIZE, torch.float32, torch.device("cpu")).pools[0]
    # Two layers, one head of 16 numbers in two bytes, keys and values.
    assert pool.block_bytes == alone.block_bytes + 2 * 2 * BLOCK_SIZE * 16 * 2
    data = np.empty(pool.block_bytes, dtype=np.uint8)
    CpuBlocks(pools).begin_read(0, 3, data, None)
    CpuBlocks(pools).begin_write(0, 5, data, None)
    for cache, expected in zip(pool.caches, before, strict=True):
        assert torch.equal(cache[:, 5], expected)


def test_an_overwritten_block_is_so_for_the_draft_model_too(model: Model, other: Model) -> None:
    pools = pools_of(model, other, Shares((8,), (8,), memory_bytes=1 << 20))
    for cache in pools.pools[0].caches:
        cache.fill_(1)
    pools.zero(0, 3, 1)
    for cache in pools.pools[0].caches:
        assert not cache[:, 3].any()
        assert cache[:, 4].all()


# What cannot draft


def test_a_draft_model_without_drafts_is_a_mistake() -> None:
    with pytest.raises(SettingsError, match=r"KVKEEP_EXECUTOR_DRAFT_MODEL.*KVKEEP_EXECUTOR_MAX_DRAFTS is 0"):
        load_settings(ExecutorSettings, {"KVKEEP_EXECUTOR_DRAFT_MODEL": "/models/small"})
    given = {"KVKEEP_EXECUTOR_DRAFT_MODEL": "/models/small", "KVKEEP_EXECUTOR_MAX_DRAFTS": "4"}
    assert load_settings(ExecutorSettings, given).draft_model == "/models/small"


def refusal(model: Model, draft: Model, *tokenizers: bytes) -> str:
    files = [TokenizerFiles(json) for json in tokenizers or (b"", b"")]
    with pytest.raises(ModelError) as refused:
        Draft.of(ModelFiles("draft", ""), draft, files[0], model, files[1])
    return str(refused.value)


def test_a_model_that_cannot_draft_is_refused_by_the_reason(
    model: Model, same: Model, model_folder: Callable[[str], Path]
) -> None:
    assert "different vocabularies (98 and 97" in refusal(model, replace(same, vocab_size=98))
    tokenizer = byte_level_tokenizer()
    before = tokenizer.to_str().encode()
    tokenizer.add_tokens(["<other>"])
    assert "different vocabularies" in refusal(model, same, tokenizer.to_str().encode(), before)
    windowed = load(model_folder("mistral, compiled"))
    assert "attention windows" in refusal(model, windowed)
    assert "keeps all tokens" in refusal(windowed, same)
    shape = LayerShape(None, 2, 32)
    mixed = replace(model, groups=(*windowed.groups, replace(model.groups[0], shape=shape)))
    assert Draft.of(ModelFiles("", ""), same, TokenizerFiles(), mixed, TokenizerFiles()).group == 1


# What drafts are worth


def test_a_chance_follows_what_became_of_drafts() -> None:
    found = ModelChance()
    first = found.chance
    for _ in range(20):
        found.note(6, 6)
    assert first < found.chance < 1
    for _ in range(40):
        found.note(6, 0)
    assert found.chance < 0.1
    for _ in range(100):
        found.note(0, 0)
    assert 0.1 < found.chance < first


def test_drafts_of_both_kinds_have_costs_of_their_own(model: Model, same: Model) -> None:
    driver = Driver(model, draft=same)
    drafter = driver.drafter
    assert drafter is not None
    drafter._costs, drafter._model_costs, one = DraftCosts(), DraftCosts(), Decodes(1, 10)
    for _ in range(10):
        drafter.observe(one, 0, 0.010)
        drafter._proposed = {1: Proposed(Method.DRAFT_MODEL, 4)}
        drafter.observe(one, 4, 0.026)
        drafter._proposed = {1: Proposed(Method.NGRAM, 4)}
        drafter.observe(one, 4, 0.014)
        drafter._proposed = {1: Proposed(Method.DRAFT_MODEL, 2), 2: Proposed(Method.NGRAM, 2)}
        # Of both: it says nothing.
        drafter.observe(Decodes(2, 10), 4, 1.0)
    assert drafter._model_costs.least_chance(one) == pytest.approx(0.4, abs=0.05)
    assert drafter._costs.least_chance(one) == pytest.approx(0.1, abs=0.05)
