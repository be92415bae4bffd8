"""The quality of eviction is measured right: texts, ROUGE, intervals, windows, and all measures on a tiny model."""

import math
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from bench.research import eval_eviction
from bench.research.eviction import statistics, windows
from bench.research.eviction.cache import Cache
from bench.research.eviction.outputs import Outputs
from bench.research.eviction.policies import POLICIES, policy
from bench.research.eviction.rouge import rouge_2, rouge_l
from executor.models.files import ModelFiles
from executor.models.forward import Model
from tests.unit.executor.conftest import load, save_model
from tests.unit.executor.tiny_models import COMPILED_CONFIGS, VOCAB

TEXT = torch.randint(VOCAB, (250,), generator=torch.Generator().manual_seed(5)).tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(COMPILED_CONFIGS["llama, compiled"](), tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return load(folder)


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.mark.parametrize(
    ("candidate", "reference", "two", "longest"),
    [
        ("the cat sat on the mat", "the cat sat on the mat", 1.0, 1.0),
        ("The Cat", "the cat", 1.0, 1.0),
        ("a b c", "d e f", 0.0, 0.0),
        ("", "a b", 0.0, 0.0),
        ("a", "a", 0.0, 1.0),
        # Pairs ab, bc, cd against ab, bx, xd; longest a b d.
        ("a b c d", "a b x d", 1 / 3, 3 / 4),
        # A pair counts as often as both have it.
        ("a b a b", "a b c", 2 / 5, 4 / 7),
        ("police killed the gunman", "police kill the gunman", 1 / 3, 3 / 4),
    ],
)
def test_rouge(candidate: str, reference: str, two: float, longest: float) -> None:
    assert rouge_2(candidate, reference) == pytest.approx(two)
    assert rouge_l(candidate, reference) == pytest.approx(longest)


def test_an_interval_holds_its_mean_and_narrows_with_more_windows() -> None:
    source = random.Random(2)
    few = [source.gauss(1, 0.1) for _ in range(10)]
    many = few * 16
    for values in (few, many):
        one = statistics.mean(values)
        assert one.low < one.value < one.high
        assert one.value == pytest.approx(sum(values) / len(values))
    wide, narrow = statistics.mean(few), statistics.mean(many)
    assert (wide.high - wide.low) / (narrow.high - narrow.low) == pytest.approx(4, rel=0.2)
    assert statistics.mean(few) == wide


def test_a_ratio_is_paired() -> None:
    hard = [1.0, 5.0, 2.0, 9.0]
    one = statistics.ratio([value + 0.1 for value in hard], hard)
    assert (one.low, one.value, one.high) == pytest.approx([math.exp(0.1)] * 3)
    with pytest.raises(ValueError, match="argument"):
        statistics.ratio(hard, hard[1:])


@pytest.mark.parametrize("name", POLICIES)
def test_predictions_are_equal_where_nothing_is_evicted(model: Model, folder: Path, name: str) -> None:
    cache = Cache(model, 80)
    window = windows.Window(cache, TEXT[:65], 48, Outputs(ModelFiles("tiny", str(folder)), model.dtype))
    figures = window.evicted(name, 64, seed=3)
    assert figures["kl"] == pytest.approx(0, abs=1e-5)
    assert figures["nll"] == pytest.approx(window.full()["nll"], abs=1e-6)
    assert figures["top1"] == 1
    assert figures["mass"] == pytest.approx(1)
    assert figures["error"] == pytest.approx(0, abs=1e-6)


def test_attention_counted_in_two_passes_equals_one_pass(model: Model) -> None:
    """Of the last rows of a prompt; the window's figures rest on it."""
    cache = Cache(model, 128)
    cache.prefill(TEXT[:100])
    kept = cache.evicted(policy("SNAPKV", 64, cache.layout))
    known = cache.engine.positions(kept)
    other = Cache(model, 128)
    sequence = other.sequence(TEXT[:100], policy("SNAPKV", 64, cache.layout))
    counted = other.engine.scored([sequence], [100])
    attention = other.compute(sequence, TEXT[:100], counted).attention
    assert attention is not None
    assert attention.rows == 8
    other.engine.observe([sequence], [100], [attention])
    other.evict(sequence, other.private)
    assert torch.equal(other.engine.positions(sequence), known)


def test_quality_lost_with_a_window(model: Model, folder: Path) -> None:
    """Mass and error, against attention over all pairs of tokens in transformers."""
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    weights = module(input_ids=torch.tensor([TEXT[:120]]), output_attentions=True).attentions
    rows = torch.stack([layer[0, :, 100:] for layer in weights])
    outputs = {0: Outputs(ModelFiles("tiny", str(folder)), model.dtype)}
    names = ["window", "window, 4 sinks"]
    full, *records = windows.measure(Cache(model, 128), [TEXT[:121]], 100, names, [64], outputs)
    logits = module(input_ids=torch.tensor([TEXT[:120]])).logits[0, 100:]
    assert full["nll"] == pytest.approx(float(F.cross_entropy(logits, torch.tensor(TEXT[101:121]))), rel=1e-4)
    for record, sinks in zip(records, (0, 4), strict=True):
        gone = rows[..., sinks : 36 + sinks].sum() / rows.sum()
        assert record["mass"] == pytest.approx(1 - float(gone), rel=1e-4)
        assert record["error"] > 0.01
        assert record["kl"] > 0
        assert 0 <= record["top1"] < 1


def test_policies_are_added_to_results_without_loss_of_the_others() -> None:
    records = [{"policy": name, "right": True} for name in ("full cache", "H2O", "TOVA")]
    for part in ("windows", "passkeys", "rouge"):
        assert eval_eviction.untouched(part, records, ["TOVA"]) == [{"policy": "H2O", "right": True}]
    assert eval_eviction.untouched("streams", [{"positions": "absolute"}], ["TOVA"]) == []
    assert eval_eviction.untouched("adaptive", records, ["TOVA"]) == []


def test_policies_are_added_to_results_of_the_same_settings_only() -> None:
    before = {"dtype": "bfloat16", "windows": 20, "policies": {"H2O": "old", "TOVA": "old"}}
    now = before | {"policies": {"H2O": "new", "TOVA": "new", "ROCO": "new"}}
    merged = eval_eviction.merged_settings(before, now, ["TOVA", "ROCO"])
    assert merged == before | {"policies": {"H2O": "old", "TOVA": "new", "ROCO": "new"}}
    assert eval_eviction.merged_settings({}, now, ["ROCO"])["policies"] == {"ROCO": "new"}
    with pytest.raises(ValueError, match="--add: the results have windows 20, not 10"):
        eval_eviction.merged_settings(before, now | {"windows": 10}, ["ROCO"])
