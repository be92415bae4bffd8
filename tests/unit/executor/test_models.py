"""Supported models are loaded correctly; unsupported models are refused in one sentence."""

import os
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma2Config, LlamaConfig, MambaConfig, MambaForCausalLM, Phi3Config

from executor.cache.pool import KvPools, LayerShape
from executor.errors import FamilyError, ModelError
from executor.models import files as model_files
from executor.models.attention import paged
from executor.models.files import find, packaged_gguf
from executor.models.fingerprint import fingerprint
from executor.models.layers import Recorder, check_layers
from executor.models.load import choose_device, load_model, refuse_other_kernels
from executor.settings import settings_from
from tests.stack import model_cache
from tests.support.patience import patience
from tests.unit.executor.conftest import load, save_model
from tests.unit.executor.tiny_models import CONFIGS

CPU = torch.device("cpu")


@pytest.mark.parametrize("model", ["/no/such/folder", "./here", "~/there", "name", "a/b/c"])
def test_a_path_that_does_not_exist_is_named(model: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"{model} does not exist"):
        find(model, tmp_path)


def test_a_file_of_another_format_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"0123456789")
    with pytest.raises(ModelError, match=r"no GGUF file: it begins with b'0123'.*name the folder"):
        load_model(find(str(tmp_path / "model.safetensors"), tmp_path), CPU)


def test_an_empty_folder_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot load the model"):
        load_model(find(str(tmp_path), tmp_path), CPU)


def test_a_hub_id_is_passed_to_transformers_as_it_is(tmp_path: Path) -> None:
    files = find("owner/some-model", tmp_path)
    assert (files.name, files.source, files.hub_id) == ("some-model", "owner/some-model", "owner/some-model")


def test_a_model_without_attention_cache_is_refused(tmp_path: Path) -> None:
    MambaForCausalLM(MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2)).save_pretrained(tmp_path / "m")
    with pytest.raises(ModelError, match=r"mamba|Mamba"):
        load(tmp_path / "m")


def test_a_window_that_the_layers_do_not_ask_for_is_refused() -> None:
    config = Gemma2Config(num_hidden_layers=2, sliding_window=8)
    right = {0: LayerShape(8, 1, 8), 1: LayerShape(None, 1, 8)}
    check_layers(right, config)
    with pytest.raises(ModelError, match="window of None tokens, its configuration says 8"):
        check_layers({**right, 0: LayerShape(None, 1, 8)}, config)
    with pytest.raises(ModelError, match=r"layers \[1\] of 2"):
        check_layers({0: right[0]}, config)


def test_rope_that_depends_on_the_batch_is_used_up_to_its_change(tmp_path: Path) -> None:
    base = CONFIGS["phi3"]().to_dict()
    factors = [1.0] * 4
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": factors, "long_factor": factors}
    base |= {"original_max_position_embeddings": 64, "rope_parameters": rope}
    assert load(save_model(Phi3Config(**base), tmp_path / "long")).max_positions == 64


@pytest.mark.parametrize("theta", [0.0, -1e4])
def test_rotary_embeddings_without_angles_are_refused(theta: float, tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": theta}
    folder = save_model(LlamaConfig(**CONFIGS["llama"]().to_dict() | {"rope_parameters": rope}), tmp_path / "odd")
    with pytest.raises(ModelError, match=r"no numbers in float32.*compare"):
        load(folder)


def test_a_package_named_kernels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_other_kernels()
    monkeypatch.setattr(metadata, "version", lambda name: {"kernels": "0.18.1"}[name])
    with pytest.raises(ModelError, match=r"kernels 0\.18\.1 is installed"):
        refuse_other_kernels()


def test_a_device_that_is_not_there_is_named() -> None:
    with pytest.raises(ModelError, match="KVKEEP_EXECUTOR_DEVICE: there is no device cuda:99"):
        choose_device("cuda:99")


@pytest.mark.parametrize("device", ["tpu", "mps", "cuda:", "cuda:-1", "cuda:100", ""])
def test_a_device_of_another_kind_is_refused(device: str) -> None:
    with pytest.raises(SystemExit, match="KVKEEP_EXECUTOR_DEVICE: must be auto, cpu, cuda or cuda:N"):
        settings_from({"KVKEEP_EXECUTOR_DEVICE": device})


def test_the_fingerprint_distinguishes_weights_and_layout(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    folder = model_folder("llama")
    other = save_model(CONFIGS["llama"](), tmp_path / "llama", seed=2)
    prints = [
        fingerprint(load(path), find(str(path), path), KvPools(load(path).groups, 1, block_size, torch.float32, CPU))
        for path, block_size in ((folder, 4), (folder, 4), (folder, 8), (other, 4))
    ]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3
    assert {len(one) for one in prints} == {32}


def test_the_cache_folder_follows_xdg_unless_it_is_set() -> None:
    assert settings_from({"XDG_CACHE_HOME": "/x"}).cache_dir == Path("/x/kvkeep")
    assert settings_from({"XDG_CACHE_HOME": "/x", "KVKEEP_EXECUTOR_CACHE_DIR": "/y"}).cache_dir == Path("/y")


def test_sizes_of_tiers_may_have_units_and_the_disk_is_in_the_cache_folder() -> None:
    nothing = settings_from({"XDG_CACHE_HOME": "/x", "KVKEEP_EXECUTOR_DISK_CACHE_DIR": ""})
    assert (nothing.host_cache_size, nothing.disk_cache_size, nothing.disk_dir) == (0, 0, Path("/x/kvkeep/blocks"))
    some = settings_from(
        {
            "KVKEEP_EXECUTOR_HOST_CACHE_SIZE": "1048576",
            "KVKEEP_EXECUTOR_DISK_CACHE_SIZE": "2 GiB",
            "KVKEEP_EXECUTOR_DISK_CACHE_DIR": "/disk",
            "KVKEEP_EXECUTOR_CACHE_CHECKSUMS": "0",
        }
    )
    assert (some.host_cache_size, some.disk_cache_size, some.disk_dir) == (1 << 20, 2 << 30, Path("/disk"))
    assert not some.cache_checksums
    for wrong in ("-1", "much"):
        with pytest.raises(SystemExit, match="KVKEEP_EXECUTOR_HOST_CACHE_SIZE"):
            settings_from({"KVKEEP_EXECUTOR_HOST_CACHE_SIZE": wrong})


@pytest.mark.parametrize("value", ["3", "1", "24"])
def test_a_block_size_that_is_no_power_of_two_is_refused(value: str) -> None:
    with pytest.raises(SystemExit, match="KVKEEP_EXECUTOR_BLOCK_SIZE"):
        settings_from({"KVKEEP_EXECUTOR_BLOCK_SIZE": value})


def last_line(home: Path, **settings: object) -> str:
    """What an executor that cannot start with these settings says last, without a traceback."""
    given = {f"KVKEEP_EXECUTOR_{name.upper()}": str(value) for name, value in settings.items()}
    ended = subprocess.run(
        [sys.executable, "-m", "executor"],
        env=given | {"KVKEEP_LOG_LEVEL": "error", "HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=patience(60),
    )
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    return ended.stderr.strip().splitlines()[-1]


def test_a_wrong_model_ends_the_process_with_one_line(tmp_path: Path) -> None:
    said = last_line(tmp_path, model="/no/such/model")
    assert said.startswith("executor: KVKEEP_EXECUTOR_MODEL: the model /no/such/model does not exist")


def test_a_tier_without_space_ends_the_process_with_one_line(
    tmp_path: Path, model_folder: Callable[[str], Path]
) -> None:
    folder = tmp_path / "memory"
    tier = {"max_tokens": 1024, "host_cache_dir": folder, "host_cache_size": "100TiB"}
    said = last_line(tmp_path, model=model_folder("llama"), device="cpu", **tier)
    assert said.startswith("executor: KVKEEP_EXECUTOR_HOST_CACHE_SIZE: no space for ")


def test_a_draft_model_with_another_vocabulary_ends_the_process_with_one_line(
    tmp_path: Path, model_folder: Callable[[str], Path]
) -> None:
    config = CONFIGS["llama"]()
    config.vocab_size = 96
    draft = {"max_drafts": 4, "draft_model": save_model(config, tmp_path / "draft"), "cache_dir": model_cache()}
    said = last_line(tmp_path, model=model_folder("llama"), device="cpu", max_tokens=1024, **draft)
    assert said.startswith(
        "executor: KVKEEP_EXECUTOR_DRAFT_MODEL: draft and llama have different vocabularies (96 and 97 tokens)"
    )


def test_a_converted_model_is_kept_apart_from_what_other_code_or_versions_made(monkeypatch: pytest.MonkeyPatch) -> None:
    known = [model_files._conversion(packaged_gguf())]
    monkeypatch.setattr(model_files, "_CONVERTER", ("files.py", "gguf/file.py"))
    known.append(model_files._conversion(packaged_gguf()))
    monkeypatch.setattr(model_files, "_PACKAGES", ("torch",))
    known.append(model_files._conversion(packaged_gguf()))
    assert len(set(known)) == 3


def test_models_that_others_converted_are_removed_after_a_month(tmp_path: Path) -> None:
    kept, young, old = (tmp_path / f"{model_files.DEFAULT_NAME}-{name}" for name in ("kept", "young", "old"))
    for folder in (kept, young, old, tmp_path / "mine"):
        folder.mkdir()
    for folder in (kept, old, tmp_path / "mine"):
        os.utime(folder, (0, 0))
    model_files._remove_old(tmp_path, kept)
    assert {path.name for path in tmp_path.iterdir()} == {kept.name, young.name, "mine"}


def test_a_cache_folder_that_cannot_be_made_is_named_with_its_setting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="KVKEEP_EXECUTOR_CACHE_DIR"):
        find("", tmp_path / "file" / "cache")


@pytest.mark.parametrize("asked", [{"position_bias": torch.zeros(1)}, {"indices": torch.zeros(1)}, {"sinks": 1.0}])
def test_attention_that_asks_for_more_is_refused_by_name(asked: dict[str, Any]) -> None:
    heads = torch.zeros(1, 2, 3, 8)
    module = torch.nn.Identity()
    module.layer_idx = 0  # type: ignore[assignment]
    given: dict[str, Any] = {"dropout": 0.0, "position_ids": torch.zeros(1, 3), "use_cache": False, "labels": None}
    paged(module, heads, heads, heads, None, kvkeep_layers=Recorder(), **given)
    with pytest.raises(FamilyError, match=f"^Identity asks attention for {next(iter(asked))},"):
        paged(module, heads, heads, heads, None, kvkeep_layers=Recorder(), **given, **asked)
