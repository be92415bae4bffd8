"""The quality of eviction is measured right: texts, ROUGE, intervals, windows, and all measures on a tiny model."""

import itertools
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from bench.eviction import generation, passkey, statistics, stream, windows
from bench.eviction.cache import Cache
from bench.eviction.outputs import Outputs
from bench.eviction.policies import FULL, POLICIES, policy
from bench.eviction.report import Windows, expectations, report
from bench.eviction.rouge import rouge_2, rouge_l
from bench.prose import NoTextError, novel, spread
from executor.models.files import ModelFiles
from executor.models.load import Model
from tests.unit.executor.conftest import load, save_model
from tests.unit.executor.tiny_models import COMPILED_CONFIGS, VOCAB

BUDGETS = (64, 128, 256, 512, 1024)
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


def test_windows_are_spread_and_do_not_overlap() -> None:
    chosen = spread(range(100), 4, 10)
    assert [window[0] for window in chosen] == [0, 30, 60, 90]
    assert all(window == list(range(window[0], window[0] + 10)) for window in chosen)
    assert spread(range(100), 10, 10) == [list(range(at, at + 10)) for at in range(0, 100, 10)]
    assert spread(range(100), 1, 10) == [list(range(10))]
    for count, length in ((11, 10), (0, 10), (1, 101)):
        with pytest.raises(ValueError, match="do not fit"):
            spread(range(100), count, length)


def test_the_text_is_fetched_once_and_says_why_it_cannot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoTextError, match="npm"):
        novel(tmp_path / "texts")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "moby-dick.txt").write_text("Call me Ishmael.")
    assert novel(tmp_path / "texts") == "Call me Ishmael."


@pytest.mark.parametrize(("name", "budget"), [*itertools.product(POLICIES, BUDGETS)])
def test_every_policy_keeps_exactly_the_budget(model: Model, name: str, budget: int) -> None:
    chosen = policy(name, budget, Cache(model, 16).layout)
    assert chosen.kept_after(1792, 1792, 1792) == budget
    assert chosen.seed == 1
    assert policy(name, budget, Cache(model, 16).layout, seed=7).seed == 7


@pytest.mark.parametrize("name", POLICIES)
def test_nothing_is_lost_where_nothing_is_evicted(model: Model, folder: Path, name: str) -> None:
    cache = Cache(model, 80)
    window = windows.Window(cache, TEXT[:65], 48, Outputs(ModelFiles("tiny", str(folder)), model.dtype))
    figures = window.evicted(name, 64, seed=3)
    assert figures["kl"] == pytest.approx(0, abs=1e-5)
    assert figures["nll"] == pytest.approx(window.full()["nll"], abs=1e-6)
    assert figures["top1"] == 1
    assert figures["mass"] == pytest.approx(1)
    assert figures["error"] == pytest.approx(0, abs=1e-6)


def test_counted_again_attention_is_what_one_pass_counts(model: Model) -> None:
    """Of the last rows of a prompt; the window's figures rest on it."""
    cache = Cache(model, 128)
    cache.prefill(TEXT[:100])
    kept = cache.evicted(policy("SNAPKV", 64, cache.layout))
    known = cache.engine.positions(kept)
    other = Cache(model, 128)
    sequence = other.sequence(TEXT[:100], policy("SNAPKV", 64, cache.layout))
    counted = other.engine.counted([sequence], [100])
    attention = other.compute(sequence, TEXT[:100], counted).attention
    assert attention is not None
    assert attention.rows == 8
    other.engine.observe([sequence], [100], counted, [attention])
    other.evict(sequence, other.private)
    assert torch.equal(other.engine.positions(sequence), known)


def test_what_a_window_loses(model: Model, folder: Path) -> None:
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


def test_a_stream_shorter_than_its_window_is_the_full_cache(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "BIN", 100)
    short = {record["positions"]: record["nll"] for record in stream.measure(model, [TEXT[:202]])}
    assert all(len(bins) == 2 for bins in short.values())
    assert short["absolute"] == pytest.approx(short[stream.FRESH], rel=1e-4)
    assert short["compacted"] == short["absolute"]
    monkeypatch.setattr(stream, "RECENT", 60)
    long = {record["positions"]: record["nll"] for record in stream.measure(model, [TEXT[:202]])}
    assert long["absolute"] != short["absolute"]
    assert long["compacted"] != long["absolute"]


def test_generation_compares_with_the_full_cache(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "OUTPUT", 24)
    tokenizer = SimpleNamespace(decode=lambda tokens: " ".join(map(str, tokens)))
    names = [name for name in POLICIES if name != "ADAPTIVE_RKV"]
    records = list(generation.measure(model, tokenizer, [TEXT[:100]], names, 64))
    assert [record["policy"] for record in records] == [*names, FULL]
    assert all(len(record["text"].split()) == 24 for record in records)
    kept = list(generation.measure(model, tokenizer, [TEXT[:40]], ["SUM", "H2O", "TOVA"], 80))
    assert all(record["rouge2"] == record["rougel"] == 1 for record in kept[:-1])


class Characters:
    """A tokenizer whose tokens are characters, and whose chats stand between brackets."""

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [ord(character) for character in text]}

    def apply_chat_template(self, chat: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool) -> str:
        return f"[{chat[0]['content']}]"

    def decode(self, tokens: list[int]) -> str:
        return "".join(map(chr, tokens))


def test_a_pass_key_stands_where_it_should() -> None:
    tokenizer = Characters()
    texts = [tokenizer.decode(passkey.prompt(tokenizer, 1000, depth, "12345")) for depth in passkey.DEPTHS]
    assert all(len(text) == 1000 and text.count("12345") == 2 for text in texts)
    places = [text.index("12345") for text in texts]
    assert places == sorted(places)
    assert places[-1] - places[0] == pytest.approx(0.8 * (1000 - 260), abs=40)
    assert all(text.endswith("What is the pass key?]The pass key is the number") for text in texts)
    with pytest.raises(ValueError, match="too few"):
        passkey.prompt(tokenizer, 50, 0.5, "12345")


@pytest.mark.parametrize(("loss", "met"), [(2.0, "met   "), (2.1, "MISSED")])
def test_the_report_says_what_is_met(loss: float, met: str) -> None:
    def record(name: str, nll: float, number: int) -> dict[str, object]:
        figures = {"nll": nll + number, "kl": 0.1, "top1": 0.9, "mass": 0.8}
        return {"window": number, "policy": name, "budget": 1792 if name == FULL else 512, **figures}

    losses: dict[str, Callable[[], float]] = {
        FULL: lambda: 2.0,
        "window, 4 sinks": lambda: 2.01,
        "NORM_SUM": lambda: loss,
    }
    records = [record(name, value(), number) for name, value in losses.items() for number in range(3)]
    # Of a window that was interrupted.
    records.append(record(FULL, 9.0, 3))
    assert Windows(records).full == pytest.approx(math.exp(3))
    lines = expectations({"windows": records})
    assert len(lines) == 2
    assert all(line.startswith(met) for line in lines)
    text = report({"windows": records})
    assert f"{math.exp(loss - 2):.3f}" in text
    assert "20.09" in text
