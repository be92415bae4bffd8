"""GGUF files that benchmarks write and read."""

from pathlib import Path

import pytest
import torch
from gguf import GGUFReader
from safetensors.torch import load_file
from transformers import LlamaConfig

from bench.gguf_file import in_floats, requantised
from executor.models.gguf.module import load_gguf
from tests.support.gguf_files import write_model
from tests.unit.executor.test_gguf import SIZES, of, random_module


@pytest.mark.parametrize(("kind", "of_output"), [("Q4_0", "Q8_0"), ("Q8_0", "Q8_0"), ("BF16", "BF16")])
def test_a_files_model_in_another_type(kind: str, of_output: str, tmp_path: Path) -> None:
    source, target = tmp_path / "source.gguf", tmp_path / "target.gguf"
    write_model(random_module(LlamaConfig(**SIZES)), source, of("F32"))
    requantised(source, target, kind)
    kinds = {one.name: one.tensor_type.name for one in GGUFReader(target).tensors if len(one.shape) > 1}
    assert kinds.pop("output.weight") == of_output
    assert set(kinds.values()) == {kind}
    before, after = (
        load_gguf(one, torch.float32).model.layers[1].self_attn.k_proj.matrix.floats(torch.float32)
        for one in (source, target)
    )
    assert 0 < (after - before).abs().max() < 0.1 * before.abs().max()


def test_the_folder_of_a_file_holds_its_floats_and_is_made_once(tmp_path: Path) -> None:
    module = random_module(LlamaConfig(**SIZES))
    write_model(module, tmp_path / "model.gguf", of("Q4_1"))
    folder = in_floats(tmp_path / "model.gguf", tmp_path)
    stored = load_file(folder / "model.safetensors")
    for name, parameter in module.named_parameters():
        assert stored[name].equal(parameter.detach())
    (folder / "model.safetensors").unlink()
    assert in_floats(tmp_path / "model.gguf", tmp_path) == folder
    assert not (folder / "model.safetensors").exists()
