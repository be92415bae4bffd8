"""When compiled code replaces torch, and when it must not."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from transformers import LlamaConfig

from executor.models.cpu import CpuModel
from executor.models.files import find
from executor.models.forward import ForwardOutput, Model
from executor.models.llama import FAMILIES, probe
from executor.models.load import load_model, multiplies_bfloat16
from executor.models.torch import TorchForward
from kernels.cpu_decoder.launch import obstacle
from tests.kernels.decoder_cases import Case, build_weights, compiled_decoder, decoder_for
from tests.stack import model_cache
from tests.unit.executor.conftest import Driver, load, load_fused, on_torch, save_model
from tests.unit.executor.tiny_models import COMPILED_CONFIGS, CONFIGS

FOLDER = model_cache() / "compiled"
Loader = Callable[[Path], Model]


@pytest.fixture(scope="session", autouse=True)
def _compiler() -> None:
    compiled_decoder(FOLDER)


@pytest.mark.parametrize("name", sorted(COMPILED_CONFIGS))
def test_a_family_that_it_knows_is_compiled(name: str, model_folder: Callable[[str], Path]) -> None:
    assert isinstance(load(model_folder(name)).forward, CpuModel)


OTHERS = [(load, name, ".") for name in sorted(CONFIGS)]
OTHERS += [(load_fused, name, "no fused decoder") for name in sorted(CONFIGS) if not name.startswith(FAMILIES)]


@pytest.mark.parametrize(("loader", "name", "words"), OTHERS)
def test_others_run_on_torch_and_the_log_says_why(
    loader: Loader, name: str, words: str, model_folder: Callable[[str], Path]
) -> None:
    with capture_logs() as logs:
        model = loader(model_folder(name))
    assert isinstance(model.forward, TorchForward)
    assert [bool(re.match(words, entry["cause"])) for entry in logs if "running on torch" in entry["event"]] == [True]


@pytest.mark.parametrize(
    ("lanes", "changes", "words"),
    [
        (8, {"head_dim": 16}, ""),
        (8, {"head_dim": 8}, "the head size 8 is no multiple of 16"),
        (8, {"head_dim": 16, "intermediate": 44}, "its widths are no multiples of 16"),
        (16, {"head_dim": 32}, ""),
        (16, {"head_dim": 16}, "the head size 16 is no multiple of 32"),
        (16, {"head_dim": 32, "intermediate": 44}, "its widths are no multiples of 32"),
    ],
)
def test_which_models_fit_depends_on_the_lanes_of_a_vector(lanes: int, changes: dict[str, int], words: str) -> None:
    weights = build_weights(Case(**{"hidden": 32, "intermediate": 48, "q_heads": 2, **changes}))
    assert obstacle(decoder_for(lanes, FOLDER), weights, torch.float32) == words


@pytest.mark.parametrize(
    ("loader", "changes", "words"),
    [
        (
            load,
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "changes with",
        ),
        (load, {"hidden_act": "gelu"}, "not SiLU"),
        (load_fused, {"hidden_act": "gelu"}, "not SiLU"),
        (load, {"mlp_bias": True}, "mlp.gate_proj.bias"),
        (load, {"attention_bias": True}, "self_attn.o_proj.bias"),
    ],
)
def test_what_a_configuration_adds_keeps_it_on_torch(
    loader: Loader, changes: dict[str, object], words: str, tmp_path: Path
) -> None:
    base = COMPILED_CONFIGS["llama, compiled"]().to_dict()
    with capture_logs() as logs:
        model = loader(save_model(LlamaConfig(**(base | changes)), tmp_path / "model"))
    assert isinstance(model.forward, TorchForward)
    assert [words in entry["cause"] for entry in logs if "slower" in entry["event"]] == [True]


def test_a_decoder_that_computes_something_else_is_not_used(
    model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.models.llama.modeling_llama.LlamaRMSNorm.forward", lambda self, x: 2 * x)
    with capture_logs() as logs:
        model = load(model_folder("llama, compiled"))
    assert isinstance(model.forward, TorchForward)
    assert any("is off by" in entry.get("cause", "") for entry in logs)


def test_without_a_compiler_it_runs_on_torch(
    model_folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    folder = model_folder("llama, compiled")
    with capture_logs() as logs:
        model = load_model(find(str(folder), folder), torch.device("cpu"), "float32", compiled_folder=tmp_path / "none")
    assert isinstance(model.forward, TorchForward)
    assert any("C++ compiler" in entry.get("cause", "") for entry in logs)


def test_bfloat16_is_close_to_float32(model_folder: Callable[[str], Path]) -> None:
    if not multiplies_bfloat16():
        pytest.skip("the processor does not multiply bfloat16")
    folder = model_folder("llama, compiled")
    exact = load(folder)
    model = load_model(find(str(folder), folder), torch.device("cpu"), "auto", compiled_folder=FOLDER)
    assert (model.dtype, type(model.forward)) == (torch.bfloat16, CpuModel)
    logits, expected = (probe(one.forward, one.groups, one.vocab_size, one.dtype, one.device) for one in (model, exact))
    assert (logits - expected).square().mean().sqrt() < 0.03 * expected.square().mean().sqrt()


def test_a_second_runner_gets_pools_of_its_own(model_folder: Callable[[str], Path]) -> None:
    model = load(model_folder("llama, compiled"))
    prompts = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8]]
    first, second = Driver(model), Driver(model)
    alone = [
        [one.token_id for one in Driver(on_torch(model_folder("llama, compiled"))).generate(1, prompt, 6)]
        for prompt in prompts
    ]
    assert [one.token_id for one in first.generate(1, prompts[0], 6)] == alone[0]
    assert [one.token_id for one in second.generate(1, prompts[1], 6)] == alone[1]
    assert [one.token_id for one in first.generate(2, prompts[1], 6)] == alone[1]


def test_all_steps_leave_their_logits_in_one_buffer(model_folder: Callable[[str], Path]) -> None:
    model = load(model_folder("llama, compiled"))
    places = []

    class Noting:
        def prepare(self, *arguments: Any) -> Callable[[], ForwardOutput]:
            result = model.forward.prepare(*arguments)()
            places.append((result.logits.data_ptr(), len(result.logits)))
            return lambda: result

    driver = Driver(replace(model, forward=Noting()))  # type: ignore[arg-type]
    first = tuple(driver.new_sequence(number, [3, 1, 4, number]) for number in range(1, 6))
    driver.step(new_sequences=first, chunks={one.sequence: 4 for one in first})
    driver.step(removed=(2, 3))
    driver.step(new_sequences=(driver.new_sequence(6, [9, 2]), driver.new_sequence(7, [5, 3])), chunks={6: 2, 7: 2})
    assert [rows for _, rows in places] == [5, 3, 5]
    assert len({place for place, _ in places}) == 1


@pytest.mark.parametrize(
    ("line", "expected"),
    [("flags : fpu avx512_bf16 sse", True), ("Features : fp bf16 asimd", False), ("flags : fpu avx512f", False)],
)
def test_a_processor_says_what_it_multiplies(line: str, expected: bool, tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor : 0\n{line}\n")
    assert multiplies_bfloat16(tmp_path / "cpuinfo") is expected
    assert not multiplies_bfloat16(tmp_path / "none")
