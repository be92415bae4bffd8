"""Scales of caches of 8 bits: calibrated once for all starts, read from the checkpoint, or 1.0."""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from executor.cache.pool import KvPools, Scales
from executor.errors import ModelError
from executor.models.files import ModelFiles, find
from executor.models.fingerprint import fingerprint
from executor.models.forward import Model
from executor.models.scales import choose_scales
from executor.models.tokenizer import TokenizerFiles
from executor.settings import ExecutorSettings
from protos.rpc.settings import SettingsError, load
from tests.support.scheduler.tokenizers import byte_level_tokenizer
from tests.unit.executor.conftest import on_torch

FP8 = torch.float8_e4m3fn


def chosen(
    folder: Path, choice: str, dtype: torch.dtype = FP8, *, kept: Path = Path("/dev/null"), text: bytes = b""
) -> tuple[Model, ModelFiles, list[Scales]]:
    """A model, and the scales that an executor that starts with it takes."""
    model, files = on_torch(folder), find(str(folder), folder)
    return model, files, choose_scales(choice, model, files, TokenizerFiles(text), dtype, kept)


def print_of(model: Model, files: ModelFiles, scales: list[Scales]) -> bytes:
    return fingerprint(model, files, KvPools(model.groups, 4, 4, FP8, model.device, scales))


def with_tensors(source: Path, target: Path, added: Mapping[str, Tensor]) -> Path:
    """A copy of a model's folder, with more tensors in its file."""
    shutil.copytree(source, target)
    file = target / "model.safetensors"
    save_file(load_file(file) | dict(added), file, {"format": "pt"})
    return target


def scales_of(layers: int, k: str = "self_attn.k_scale", v: str = "self_attn.v_scale") -> dict[str, Tensor]:
    """Scales of a checkpoint, another number for each."""
    return {
        f"model.layers.{layer}.{name}": torch.tensor(number + layer / 16)
        for layer in range(layers)
        for name, number in ((k, 0.25), (v, 2.0))
    }


def test_a_later_start_takes_the_scales_that_the_first_calibrated(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    model, files, scales = chosen(model_folder("llama"), "calibrated", kept=tmp_path)
    [file] = tmp_path.iterdir()
    # As if another processor had rounded otherwise.
    save_file({name: 2 * tensor for name, tensor in load_file(file).items()}, file)
    *_, again = chosen(model_folder("llama"), "calibrated", kept=tmp_path)
    assert torch.equal(again[0].k, 2 * scales[0].k)
    assert torch.equal(again[0].v, 2 * scales[0].v)
    assert print_of(model, files, again) != print_of(model, files, scales)
    *_, third = chosen(model_folder("llama"), "calibrated", kept=tmp_path)
    assert print_of(model, files, third) == print_of(model, files, again)


def test_each_model_type_and_tokenizer_has_scales_of_its_own(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    chosen(model_folder("llama"), "calibrated", kept=tmp_path)
    chosen(model_folder("llama"), "calibrated", torch.int8, kept=tmp_path)
    chosen(model_folder("mistral"), "calibrated", kept=tmp_path)
    chosen(model_folder("llama"), "calibrated", kept=tmp_path, text=byte_level_tokenizer().to_str().encode())
    assert len(list(tmp_path.iterdir())) == 4
    assert chosen(model_folder("llama"), "calibrated", torch.bfloat16, kept=tmp_path)[2] == []
    assert len(list(tmp_path.iterdir())) == 4


def test_scales_that_cannot_be_read_or_kept_are_calibrated_again(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    _, _, [scales] = chosen(model_folder("llama"), "calibrated", kept=tmp_path)
    [file] = tmp_path.iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole[:-10])
    _, _, [again] = chosen(model_folder("llama"), "calibrated", kept=tmp_path)
    assert torch.equal(again.k, scales.k)
    assert file.read_bytes() == whole
    # A file cannot be a folder, whoever runs this.
    _, _, [lost] = chosen(model_folder("llama"), "calibrated", kept=file / "scales")
    assert torch.equal(lost.v, scales.v)


@pytest.mark.parametrize("names", [(), ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale")], ids=str)
def test_a_checkpoint_may_have_scales(
    model_folder: Callable[[str], Path], tmp_path: Path, names: tuple[str, ...]
) -> None:
    layers = on_torch(model_folder("llama")).config.num_hidden_layers
    folder = with_tensors(model_folder("llama"), tmp_path / "scaled", scales_of(layers, *names))
    model, _, [scales] = chosen(folder, "checkpoint")
    shape = model.groups[0].shape
    assert scales.k.shape == scales.v.shape == (layers, shape.kv_heads, shape.head_dim)
    assert scales.k.is_contiguous()
    for layer in range(layers):
        assert bool((scales.k[layer] == 0.25 + layer / 16).all())
        assert bool((scales.v[layer] == 2 + layer / 16).all())


def test_a_scale_may_be_that_of_a_head(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    config = on_torch(model_folder("llama")).config
    heads = torch.arange(1, config.num_key_value_heads + 1).float()
    added = {name: heads[:, None, None].clone() for name in scales_of(config.num_hidden_layers)}
    _, _, [scales] = chosen(with_tensors(model_folder("llama"), tmp_path / "scaled", added), "checkpoint")
    assert torch.equal(scales.k, heads[None, :, None].expand_as(scales.k))


@pytest.mark.parametrize("value", [torch.tensor(0.0), torch.tensor(torch.inf), torch.ones(7)], ids=str)
def test_scales_that_are_no_scales_are_refused(
    model_folder: Callable[[str], Path], tmp_path: Path, value: Tensor
) -> None:
    added = scales_of(on_torch(model_folder("llama")).config.num_hidden_layers)
    added["model.layers.1.self_attn.v_scale"] = value
    folder = with_tensors(model_folder("llama"), tmp_path / "scaled", added)
    with pytest.raises(ModelError, match=r"KVKEEP_EXECUTOR_KV_SCALES: v_scale of layer 1 .* above 0.*take calibrated"):
        chosen(folder, "checkpoint")


def test_a_checkpoint_without_scales_is_refused(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"KVKEEP_EXECUTOR_KV_SCALES: .* no k_scale of layer 0: take calibrated"):
        chosen(model_folder("llama"), "checkpoint")
    model = on_torch(model_folder("llama"))
    gguf = tmp_path / "model.gguf"
    gguf.touch()
    with pytest.raises(ModelError, match="no k_scale of layer 0"):
        choose_scales("checkpoint", model, ModelFiles("m", str(gguf)), TokenizerFiles(), FP8, tmp_path)


def test_scales_may_be_one(model_folder: Callable[[str], Path]) -> None:
    _, _, [scales] = chosen(model_folder("llama"), "one")
    assert bool((scales.k == 1).all() and (scales.v == 1).all())


@pytest.mark.parametrize(("dtype", "value"), [("int8", "one"), ("int8", "checkpoint"), ("auto", "one"), ("fp8", "0.5")])
def test_a_choice_that_the_type_cannot_use_is_named(dtype: str, value: str) -> None:
    values = {"KVKEEP_EXECUTOR_KV_CACHE_DTYPE": dtype, "KVKEEP_EXECUTOR_KV_SCALES": value}
    with pytest.raises(SettingsError, match="KVKEEP_EXECUTOR_KV_SCALES"):
        load(ExecutorSettings, values)
    assert load(ExecutorSettings, values | {"KVKEEP_EXECUTOR_KV_SCALES": "calibrated"}).kv_scales == "calibrated"
