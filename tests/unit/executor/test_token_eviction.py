"""What holds for every policy of token eviction in the runner, alone and in company, on every path of a model."""

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from executor.batch import build_batch
from executor.core import runner
from executor.core.timing import Clock
from executor.errors import CapacityExceededError, InvalidStepError, UnknownSequenceError
from executor.models.forward import Model
from executor.models.probe import deviation
from executor.step import Evicted
from protos.kvcommon.eviction import Kind
from tests.unit.executor.conftest import BLOCK_SIZE, PATHS, Driver, load, save_model
from tests.unit.executor.evicting_sequences import OUTPUT, PROMPT, VARIANTS, EvictingSequence, policy_of, run, small
from tests.unit.executor.tiny_models import VOCAB


@pytest.fixture(scope="module", params=PATHS)
def model(request: pytest.FixtureRequest, model_folder: Callable[[str], Path]) -> Model:
    return PATHS[request.param](model_folder("llama, compiled"))


# LAST keeps one token for every budget.
@pytest.mark.parametrize("name", [name for name, fields in VARIANTS.items() if fields["kind"] != Kind.LAST.value])
def test_a_budget_above_the_length_changes_nothing(model: Model, name: str) -> None:
    fields = dict(VARIANTS[name])
    if fields["kind"] == Kind.SLIDING_WINDOW.value:
        fields["recent_tokens"] = 100
    elif fields["kind"] == Kind.ADAPTIVE_WINDOW.value:
        fields |= {"recent_tokens": 96, "max_cache_tokens": 100}
    else:
        fields["max_cache_tokens"] = 100
    (outputs, evicted), (plain, _) = (run(model, {1: PROMPT}, {1: one}) for one in (policy_of(model, fields), None))
    assert evicted == []
    assert outputs == plain


def test_a_window_that_grows_with_all_attention_changes_nothing(model: Model) -> None:
    fields = small(Kind.ADAPTIVE_WINDOW) | {"max_cache_tokens": 100, "attention_mass": 1.0}
    chosen = policy_of(model, fields)
    assert chosen.most_kept is not None
    assert chosen.most_kept < len(PROMPT)
    (outputs, evicted), (plain, _) = (run(model, {1: PROMPT}, {1: one}) for one in (chosen, None))
    assert evicted == []
    assert outputs == plain


def test_a_window_follows_the_attention_within_its_bounds(tiny: Model) -> None:
    lengths = {}
    for mass in (0.3, 0.85, 1.0):
        fields = small(Kind.ADAPTIVE_WINDOW) | {"max_cache_tokens": 40, "attention_mass": mass}
        client = EvictingSequence(1, policy_of(tiny, fields))
        driver = Driver(tiny)
        while client.computed < len(PROMPT) + 40:
            client.step(driver)
            (sequence,) = driver.runner._sequences
            assert sequence.kept == client.kept
            if client.windows:
                assert len(sequence.tables[0]) * BLOCK_SIZE == client.policy.most_kept
                assert client.kept <= client.policy.most_kept
        bounds = client.policy.bounds
        assert bounds is not None
        assert all(bounds.least <= window <= bounds.most for window in client.windows)
        changes = [later - window for window, later in itertools.pairwise(client.windows)]
        assert all(abs(change) <= client.policy.period for change in changes)
        lengths[mass] = client.windows
    assert set(lengths[0.3]) == {16}
    assert set(lengths[1.0]) == {36}
    assert 16 < min(lengths[0.85]) < max(lengths[0.85])
    assert {-4, 0, 4} <= {later - window for window, later in itertools.pairwise(lengths[0.85])}


@pytest.mark.parametrize("name", VARIANTS)
def test_company_changes_neither_decisions_nor_output(model: Model, name: str) -> None:
    chosen = policy_of(model, VARIANTS[name])
    alone, evicted = run(model, {1: PROMPT}, {1: chosen})
    assert sum(one.tokens for one in evicted) > 0
    if chosen.uses_scores:
        assert all(one.mass is not None and 0 < one.mass <= 1 for one in evicted)
    others = {
        2: policy_of(model, VARIANTS["tova"]),
        3: None,
        4: policy_of(model, VARIANTS["window alone"]),
        5: policy_of(model, VARIANTS["norm_sum"]),
    }
    prompts = {1: PROMPT, 2: PROMPT[:11], 3: PROMPT[::-1], 4: PROMPT[5:], 5: PROMPT[7:20]}
    together, evictions = run(model, prompts, {1: chosen, **others})
    assert together[1] == alone[1]
    assert [one.tokens for one in evictions if one.sequence == 1] == [one.tokens for one in evicted]
    assert together[3] == run(model, {3: PROMPT[::-1]}, {3: None})[0][3]


@pytest.mark.parametrize("name", VARIANTS)
def test_staying_in_own_blocks_is_the_same_as_moving(model: Model, name: str) -> None:
    chosen = policy_of(model, VARIANTS[name])
    (stayed, evicted), (moved, expected) = (run(model, {1: PROMPT}, {1: chosen}, stays=one) for one in (True, False))
    assert stayed == moved
    assert [one.tokens for one in evicted] == [one.tokens for one in expected]
    # In another order of slots, sums round differently.
    assert [one.mass for one in evicted] == pytest.approx([one.mass for one in expected])


@pytest.mark.parametrize("name", ["sliding_window", "window alone"])
def test_a_window_computes_what_a_mask_does(model: Model, model_folder: Callable[[str], Path], name: str) -> None:
    chosen = policy_of(model, VARIANTS[name])
    outputs, _ = run(model, {1: PROMPT}, {1: chosen})
    reference = AutoModelForCausalLM.from_pretrained(
        model_folder("llama, compiled"), dtype=torch.float32, attn_implementation="eager"
    )
    tokens = PROMPT + outputs[1][:-1]
    row, column = torch.arange(len(tokens))[:, None], torch.arange(len(tokens))[None]
    seen = column <= row
    # After the prompt, tokens that one token no longer saw are seen by none after it.
    window = (column < chosen.start) | (column >= row - chosen.recent)
    seen &= window | (row < len(PROMPT))
    mask = torch.where(seen, 0.0, -torch.inf)[None, None]
    logits = reference(input_ids=torch.tensor([tokens]), attention_mask=mask).logits[0, len(PROMPT) - 1 :]
    assert logits.argmax(-1).tolist() == outputs[1]


def one_layer(max_position_embeddings: int = 256) -> LlamaConfig:
    """A Llama in which a key depends on its token and its position only."""
    return LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=max_position_embeddings,
    )


@pytest.mark.parametrize("name", ["compacted window", "compacted blocks"])
def test_compacted_positions_are_those_of_the_kept_tokens_alone(tmp_path: Path, name: str) -> None:
    model = load(save_model(one_layer(), tmp_path / "one layer"))
    chosen = policy_of(model, VARIANTS[name])
    driver = Driver(model, num_blocks=400)
    client = EvictingSequence(1, chosen)
    outputs: list[int] = []
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "one layer", dtype=torch.float32)
    while len(outputs) < OUTPUT:
        outcome = client.step(driver)
        if not outcome.sampled:
            continue
        # With one layer a key depends on its token and its position only: what is kept, computed alone, says the same.
        known = PROMPT + outputs
        kept = kept_positions(driver, client.kept)
        logits = reference(input_ids=torch.tensor([[known[place] for place in kept]])).logits[0, -1]
        assert outcome.sampled[0].token_id == int(logits.argmax())
        outputs.append(outcome.sampled[0].token_id)
    assert client.evicted > 0


@pytest.mark.parametrize("cache", [torch.bfloat16, torch.int8], ids=str)
def test_turning_the_keys_of_a_long_window_again_and_again_rounds_them_little(
    tmp_path: Path, cache: torch.dtype
) -> None:
    model = load(save_model(one_layer(max_position_embeddings=1024), tmp_path / "one layer"))
    fields = {"kind": Kind.SLIDING_WINDOW.value, "start_tokens": 4, "recent_tokens": 256, "positions": 2}
    prompt = torch.randint(VOCAB, (330,), generator=torch.Generator().manual_seed(6)).tolist()
    driver = Driver(model, num_blocks=400, cache=cache)
    client = EvictingSequence(1, policy_of(model, fields), chunk=len(prompt))
    outputs: list[int] = []
    while len(outputs) < 320:
        outputs += [sampled.token_id for sampled in client.step(driver, prompt).sampled]
    known = prompt + outputs
    found = {}
    for dtype in (torch.float32, cache):
        fresh = Driver(model, cache=dtype)
        kept = [known[place] for place in kept_positions(driver, client.kept)]
        fresh.step(new_sequences=(fresh.new_sequence(1, kept),), chunks={1: len(kept)})
        found[dtype] = keys_of(fresh)
    rounding = deviation(found[cache], found[torch.float32])
    assert deviation(keys_of(driver), found[torch.float32]) < 3 * rounding


def keys_of(driver: Driver) -> torch.Tensor:
    """The cached keys of the only sequence, whose policy is the same in all heads, in the order of its tokens."""
    eviction, sequence = driver.runner._eviction, next(iter(driver.runner._sequences))
    keys = eviction._keys(sequence)
    return keys[:, :, eviction.positions(sequence)[0, 0].argsort()] if sequence.policy else keys


def kept_positions(driver: Driver, kept: int) -> list[int]:
    """Which tokens a sequence keeps, in order, as its policy's state says."""
    positions = driver.runner._eviction.positions(next(iter(driver.runner._sequences)))
    assert positions.shape[-1] == kept
    return positions[0, 0].sort().values.tolist()


@pytest.mark.parametrize("compacted", [True, False])
def test_only_compacted_positions_go_beyond_the_models_length(tiny: Model, compacted: bool) -> None:
    fields = small(Kind.SLIDING_WINDOW) | {"period_tokens": 8, "positions": 2 if compacted else 1}
    driver, client = Driver(tiny), EvictingSequence(1, policy_of(tiny, fields), chunk=len(PROMPT))
    length = tiny.max_positions
    while client.computed < length:
        assert client.step(driver).sampled
    beyond = nullcontext() if compacted else pytest.raises(CapacityExceededError, match=f"the model takes {length}")
    for _ in range(39 if compacted else 1):
        with beyond:
            assert client.step(driver).sampled


def test_steps_that_evict_wrongly_are_refused_and_change_nothing(tiny: Model) -> None:
    driver = Driver(tiny)
    chosen = policy_of(tiny, small(Kind.SLIDING_WINDOW))
    with_policy = replace(driver.new_sequence(1, PROMPT), policy=chosen)
    driver.step(new_sequences=(with_policy, driver.new_sequence(2, PROMPT)), chunks={1: 37, 2: 37})
    blocks = driver.blocks(24)[0]
    for evicting, error, field in (
        ({3: blocks}, UnknownSequenceError, "evicting_sequences"),
        ({2: blocks}, InvalidStepError, "evicting_sequences"),
        ({1: (0,)}, InvalidStepError, "evicting_slots"),
        ({1: (999,)}, InvalidStepError, "evicting_slots"),
        ({1: blocks[:3]}, InvalidStepError, "evicting_slots"),
        ({1: blocks[:5]}, CapacityExceededError, "table_slots"),
    ):
        with pytest.raises(error) as caught:
            driver.step(evicting=evicting)
        assert list(caught.value.fields) == [field]
    with pytest.raises(InvalidStepError, match="must compute"):
        driver.step(evicting={1: blocks}, idle=frozenset({1}))
    assert driver.step(evicting={1: blocks}).evicted == (Evicted(1, 17, None),)
    with pytest.raises(InvalidStepError):
        driver.step(evicting={1: driver.blocks(24)[0]})
    for changes, error, field in (
        ({"windows": {3: 16}}, UnknownSequenceError, "window_sequences"),
        ({"windows": {1: 16}}, InvalidStepError, "window_sequences"),
        ({"looking": frozenset({3})}, UnknownSequenceError, "looking_sequences"),
        ({"looking": frozenset({1})}, InvalidStepError, "looking_sequences"),
    ):
        with pytest.raises(error) as caught:
            driver.step(**changes)
        assert list(caught.value.fields) == [field]
    assert BLOCK_SIZE == 4


def test_windows_that_a_policy_does_not_allow_are_refused_and_change_nothing(tiny: Model) -> None:
    driver, client = Driver(tiny), EvictingSequence(1, policy_of(tiny, small(Kind.ADAPTIVE_WINDOW)), chunk=37)
    client.step(driver)
    for changes, error, field in (
        ({"windows": {1: 20}}, InvalidStepError, "window_sequences"),
        ({"windows": {1: 12}, "evicting": {1: driver.blocks(24)[0]}}, InvalidStepError, "window_tokens"),
        ({"windows": {1: 18}, "evicting": {1: driver.blocks(24)[0]}}, InvalidStepError, "window_tokens"),
        ({"windows": {1: 32}, "evicting": {1: driver.blocks(40)[0]}}, InvalidStepError, "window_tokens"),
        ({"windows": {1: 28}, "evicting": {1: driver.blocks(24)[0]}}, InvalidStepError, "evicting_slots"),
        ({"looking": frozenset({1}), "idle": frozenset({1})}, InvalidStepError, "looking_sequences"),
    ):
        with pytest.raises(error) as caught:
            driver.step(**changes)
        assert list(caught.value.fields) == [field]
    client.step(driver)
    assert client.windows


@pytest.mark.parametrize("stays", [True, False])
def test_the_work_of_a_step_begins_with_its_eviction_only_if_tokens_are_evicted(
    stays: bool, tiny: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(Clock, "begin", lambda _: said.append("begin"))
    monkeypatch.setattr(runner, "build_batch", lambda *args: (said.append("batch"), build_batch(*args))[1])
    driver, sequence = Driver(tiny), EvictingSequence(1, policy_of(tiny, small(Kind.H2O)), stays=stays)
    eviction, plain = [], []
    for _ in range(20):
        said.clear()
        (eviction if sequence.step(driver).evicted else plain).append(tuple(said))
    assert set(eviction) == {("begin", "batch", "begin")}
    assert set(plain) == {("batch", "begin")}
