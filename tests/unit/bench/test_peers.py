"""Peers are driven, named with the reason when they cannot be, and compared as the table says."""

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from bench import unquantized
from bench.peers import gguf_file
from bench.peers.__main__ import Measured, medians, report
from bench.peers.processes import PeerError, PeerProcess
from bench.peers.set_up import ADAPTERS, Peer
from bench.workloads import Case
from tests.unit.executor.conftest import save_model
from tests.unit.executor.tiny_models import CONFIGS

CASE = Case("T", "", own=(2, 3), output_tokens=2)
PROMPTS = [[5, 6], [7, 8, 9]]
ADAPTER = f"""
import sys
sys.path.insert(0, {str(ADAPTERS)!r})
import jobs

answers = jobs.answers()
model, dtype, threads, cache = jobs.arguments()
print("an engine's chatter")

def run(job):
    BODY

jobs.serve(f"engine of {{model}} in {{dtype}}", run, answers)
"""


def peer(tmp_path: Path, body: str) -> PeerProcess:
    script = tmp_path / "adapter.py"
    script.write_text(ADAPTER.replace("BODY", body))
    return PeerProcess(Peer("fake", (), str(script)), Path(sys.executable), Path("m"), "float32", tmp_path / "cache")


def test_a_peer_gets_the_prompts_and_gives_times_and_tokens(tmp_path: Path) -> None:
    body = (
        "return [[0.5, 1.0]] * len(job.prompts), [[sum(prompt), job.reuse + 2 * job.ahead] for prompt in job.prompts]"
    )
    with peer(tmp_path, body) as process:
        assert process.version == "engine of m in float32"
        for ahead in (False, True):
            done = process.run(CASE, PROMPTS, 2, ahead=ahead)
            assert done.outputs == [[11, 1 + 2 * ahead], [24, 1 + 2 * ahead]]
            assert done.times.output_rate == 4.0
            assert done.times.prompt_tokens == 5


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("return [[0.5]] * 2, [[1]] * 2", r"gave \[1\] tokens for 2"),
        ("return [[0.5, 1.0]], [[1, 2]]", "gave"),
        ("raise MemoryError('too small')", "MemoryError: too small"),
        ("sys.exit()", "it ended"),
    ],
    ids=["too few tokens", "a request lost", "an exception", "a silent end"],
)
def test_a_peer_that_fails_says_why(tmp_path: Path, body: str, reason: str) -> None:
    with peer(tmp_path, body) as process, pytest.raises(PeerError, match=reason):
        process.run(CASE, PROMPTS, 2)


def record(engine: str, case: str, figure: float, repeat: int = 1) -> dict[str, object]:
    return {
        "dtype": "float32",
        "engine": engine,
        "case": case,
        "repeat": repeat,
        "output_tokens_per_s": figure,
        "inter_token_mean_ms": figure,
        "seconds": 200 / figure,
        "others_cpu": figure / 1000,
        "limit_s": 1.0,
        "limit_step_ms": 5.0,
    }


def test_ratios_are_by_the_best_peer_and_larger_is_better() -> None:
    repeats = [
        *(record("kvkeep", "W1", figure, repeat) for repeat, figure in enumerate((100, 1, 120), 1)),
        record("slow", "W1", 25),
        record("fast", "W1", 50),
        record("kvkeep", "W4", 10),
        record("slow", "W4", 40),
        record("fast", "W4", 15),
    ]
    alone = {"weights": {"float32": 12.0}}
    absent, differing = {"absent float32": "not installed"}, {"odd float32": "position 3"}
    found = Measured({"weights": medians(repeats)}, {}, alone, {}, absent, differing)
    shown = report(found)
    rows = {cells[1]: cells for cells in (line.split() for line in shown.splitlines()) if "float32" in cells[:1]}
    figures = ["100.0", "25.0", "50.0", "fast", "2.00", "200.0", "50%", "25%"]
    assert rows["W1"] == ["float32", "W1", "tokens/s", *figures]
    assert rows["W4"] == [
        "float32",
        "W4",
        "ms",
        "per",
        "token",
        "10.0",
        "40.0",
        "15.0",
        "fast",
        "1.50",
        "5.0",
        "50%",
        "33%",
    ]
    assert "llama-bench float32 W4: 12.0 ms per token" in shown
    assert "other processes took 3% of the cores during a run, 12% at most" in shown
    assert "not measured: absent float32: not installed" in shown
    assert "measured though its output differs: odd float32: position 3" in shown


def test_each_model_has_a_table_of_its_own() -> None:
    runs = {
        "weights": medians([record("kvkeep", "W1", 100), record("fast", "W1", 25)]),
        "others": medians([record("kvkeep", "W1", 50)]),
    }
    shown = report(Measured(runs, {}, {}, {}, {}, {}))
    tables = [[line.split()[3] for line in part.splitlines() if "W1" in line] for part in shown.split("others")]
    assert tables == [["100.0"], ["50.0"]]


def test_a_model_that_only_a_peer_runs_has_no_ratio() -> None:
    shown = report(Measured({"": medians([record("fast", "W4", 10)])}, {}, {}, {}, {}, {}))
    (cells,) = (line.split() for line in shown.splitlines() if "W4" in line)
    assert cells[5:] == ["10.0", "fast", "-", "5.0", "-", "50%"]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(CONFIGS["llama"](), tmp_path_factory.mktemp("models") / "llama")


def test_a_model_that_nothing_quantized_is_near_the_other_and_in_bfloat16(llama: Path, tmp_path: Path) -> None:
    folder = unquantized.made(llama, tmp_path)
    assert unquantized.made(llama, tmp_path) == folder
    before, after = load_file(llama / "model.safetensors"), load_file(folder / "model.safetensors")
    assert set(before) == set(after)
    for name, weight in after.items():
        assert weight.dtype == torch.bfloat16
        torch.testing.assert_close(weight.float(), before[name], rtol=0.03, atol=0)
        assert weight.numel() < 100 or (weight != before[name].bfloat16()).any()
    again = load_file(unquantized.made(llama, tmp_path / "again") / "model.safetensors")
    assert all(torch.equal(again[name], weight) for name, weight in after.items())
    assert AutoModelForCausalLM.from_pretrained(folder, dtype="auto").dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gguf_file_holds_the_weights_of_its_model(llama: Path, tmp_path: Path, dtype: str) -> None:
    model = unquantized.made(llama, tmp_path)
    file = gguf_file.written(model, dtype, tmp_path)
    config = AutoConfig.from_pretrained(model)
    restored = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    read = load_gguf_checkpoint(file, return_tensors=True, model_to_load=restored)
    for name in ("hidden_size", "num_hidden_layers", "num_key_value_heads", "rms_norm_eps", "vocab_size"):
        assert read["config"][name] == pytest.approx(getattr(config, name))
    weights = load_file(model / "model.safetensors")
    weights.pop("lm_head.weight", None)
    assert {name for name in read["tensors"] if name != "lm_head.weight"} == set(weights)
    for name, weight in weights.items():
        assert torch.equal(torch.as_tensor(read["tensors"][name]).float(), weight.float()), name
    size = {"float32": 4, "bfloat16": 2}[dtype]
    matrices = sum(weight.numel() for name, weight in weights.items() if weight.dim() > 1)
    assert gguf_file.step_bytes(file) == size * matrices


def test_a_gguf_file_is_of_the_llama_family(tmp_path: Path) -> None:
    folder = save_model(CONFIGS["gpt2"](), tmp_path / "gpt2")
    with pytest.raises(ValueError, match="Llama family"):
        gguf_file.written(folder, "float32", tmp_path)
