"""Adapters against PEFT: greedy ids are equal, on every path, whatever else is in the batch."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from executor.core.drafts import Drafter
from executor.errors import AdapterError, InvalidStepError
from executor.models.adapters import CONFIG, WEIGHTS, Adapter, read_adapter
from executor.models.files import find
from executor.models.forward import Model
from executor.step import StepOutput
from tests.stack import model_cache
from tests.support.adapters import generated, save_adapter
from tests.unit.executor.conftest import PATHS, Driver, FreeDrafts, on_torch

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8], [1, 6, 1, 8, 0, 3, 3, 9, 8, 8, 7], [5] * 20]
COUNT = 12
# As PEFT takes them; ranks that are no multiples of anything among them.
OPTIONS: dict[str, dict[str, Any]] = {
    "all": {"r": 8},
    "some": {"r": 3, "lora_alpha": 7, "target_modules": ["q_proj", "v_proj"], "use_rslora": True},
    "patterns": {
        "r": 4,
        "target_modules": r".*\.(down_proj|up_proj|o_proj)",
        "rank_pattern": {"down_proj": 5, r"layers\.1\.mlp\.up_proj": 2},
        "alpha_pattern": {"o_proj": 3},
    },
    "layers": {"r": 16, "layers_to_transform": [1, 3]},
}


@pytest.fixture(scope="session")
def adapter_folder(model_folder: Callable[[str], Path], tmp_path_factory: Any) -> Callable[[str, str], Path]:
    """Folder of an adapter of a tiny model, by its name in OPTIONS."""
    folders: dict[tuple[str, str], Path] = {}

    def folder(model: str, name: str) -> Path:
        if (model, name) not in folders:
            target = tmp_path_factory.mktemp("adapters") / name
            seed = 1 + list(OPTIONS).index(name)
            folders[model, name] = save_adapter(model_folder(model), target, seed, **OPTIONS[name])
        return folders[model, name]

    return folder


def read(model: Model, folder: Path, largest_rank: int = 64) -> Adapter:
    return read_adapter(folder, model.linears, largest_rank)


def add(driver: Driver, folder: Path) -> int:
    """Loads an adapter into a runner; returns its id."""
    adapter = read(driver.model, folder)
    driver.runner.adapters[adapter.adapter_id] = driver.model.forward.adapter(adapter.modules)
    return adapter.adapter_id


def generate_together(driver: Driver, adapters: list[int | None], chunk: int = 1000) -> list[list[int]]:
    """Greedy ids of each prompt with the adapter beside it, all in one batch. chunk: tokens of a prompt per step."""
    new = tuple(
        replace(driver.new_sequence(number, PROMPTS[number % len(PROMPTS)]), adapter_id=adapter)
        for number, adapter in enumerate(adapters)
    )
    left = {one.sequence: len(one.token_ids) for one in new}
    sampled: dict[int, list[int]] = {one.sequence: [] for one in new}
    while min(map(len, sampled.values())) < COUNT:
        granted = {number: min(chunk, count) for number, count in left.items() if count > 0}
        output = driver.step(new_sequences=new, chunks=granted)
        new, left = (), {number: count - chunk for number, count in left.items()}
        for one in output.sampled:
            sampled[one.sequence].append(one.token_id)
    driver.step(removed=tuple(sampled))
    return [ids[:COUNT] for ids in sampled.values()]


@pytest.mark.parametrize("chunk", [1000, 3])
@pytest.mark.parametrize("path", PATHS)
def test_sequences_of_several_adapters_and_none_in_one_batch_get_what_peft_generates(
    model_folder: Callable[[str], Path], adapter_folder: Callable[[str, str], Path], path: str, chunk: int
) -> None:
    source = model_folder("llama, compiled")
    folders = {name: adapter_folder("llama, compiled", name) for name in OPTIONS}
    driver = Driver(PATHS[path](source))
    ids = {name: add(driver, folder) for name, folder in folders.items()}
    # Two sequences of an adapter do not follow each other.
    chosen = ["all", None, "some", "patterns", "all", "layers", None, "some"]
    together = generate_together(driver, [None if name is None else ids[name] for name in chosen], chunk)
    expected = {name: generated(source, name and folders[name], PROMPTS, COUNT) for name in set(chosen)}
    for number, (name, computed) in enumerate(zip(chosen, together, strict=True)):
        assert computed == expected[name][number % len(PROMPTS)], f"{number}: {name}"


@pytest.mark.model
@pytest.mark.parametrize("path", ["compiled", "torch"])
def test_adapters_of_the_default_model_get_what_peft_generates(tmp_path: Path, path: str) -> None:
    source = Path(find("", model_cache()).source)
    options = {"large": {"r": 16}, "small": {"r": 4, "target_modules": ["q_proj", "v_proj"], "use_rslora": True}}
    # So large that the output changes, and so small that the output is text of some kind.
    folders = {
        name: save_adapter(source, tmp_path / name, seed, size=0.04, **chosen)
        for seed, (name, chosen) in enumerate(options.items())
    }
    driver = Driver(PATHS[path](source))
    ids = {name: add(driver, folder) for name, folder in folders.items()}
    chosen = ["large", None, "small", "large"]
    together = generate_together(driver, [name and ids[name] for name in chosen])
    expected = {name: generated(source, name and folders[name], PROMPTS, COUNT) for name in set(chosen)}
    assert together == [expected[name][number] for number, name in enumerate(chosen)]
    assert expected["large"] != expected[None] != expected["small"]


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "mistral", "gemma2", "phi3"])
def test_other_families_run_adapters_on_torch(model_folder: Callable[[str], Path], tmp_path: Path, family: str) -> None:
    source, fused = model_folder(family), family == "phi3"
    targets = ["qkv_proj", "gate_up_proj"] if fused else ["q_proj", "o_proj", "down_proj"]
    folder = save_adapter(source, tmp_path / "adapter", 7, target_modules=targets)
    driver = Driver(on_torch(source))
    adapter = add(driver, folder)
    computed = generate_together(driver, [adapter, None])
    assert computed == [
        *generated(source, folder, PROMPTS[:1], COUNT),
        *generated(source, None, PROMPTS[1:2], COUNT),
    ]


def test_a_running_sequence_keeps_an_adapter_that_is_unloaded(
    model_folder: Callable[[str], Path], adapter_folder: Callable[[str, str], Path]
) -> None:
    source, folder = model_folder("llama, compiled"), adapter_folder("llama, compiled", "all")
    driver = Driver(PATHS["compiled"](source))
    adapter = add(driver, folder)
    new = replace(driver.new_sequence(1, PROMPTS[0]), adapter_id=adapter)
    sampled = list(driver.step(new_sequences=(new,), chunks={1: len(PROMPTS[0])}).sampled)
    del driver.runner.adapters[adapter]
    while len(sampled) < COUNT:
        sampled += driver.step().sampled
    assert [[one.token_id for one in sampled]] == generated(source, folder, PROMPTS[:1], COUNT)
    with pytest.raises(InvalidStepError, match=r"new_sequences.adapter_id names no loaded adapter"):
        driver.step(new_sequences=(replace(driver.new_sequence(2, PROMPTS[1]), adapter_id=adapter),))


@pytest.mark.parametrize("cache", [torch.float32, torch.int8], ids=["float32", "int8"])
@pytest.mark.parametrize("ahead", [False, True], ids=["text", "draft model"])
def test_drafts_change_no_output_of_an_adapter(
    model_folder: Callable[[str], Path], adapter_folder: Callable[[str, str], Path], cache: torch.dtype, ahead: bool
) -> None:
    model, folder = PATHS["compiled"](model_folder("llama, compiled")), adapter_folder("llama, compiled", "all")

    def outputs(driver: Driver) -> list[StepOutput]:
        new = replace(driver.new_sequence(1, PROMPTS[0] * 3), adapter_id=add(driver, folder))
        found = [driver.step(new_sequences=(new,), chunks={1: len(new.token_ids)})]
        while sum(len(output.sampled) for output in found) < 40:
            wanted = found[-1].wanted_drafts.get(1, 0)
            found.append(driver.step(drafts={1: wanted} if wanted else {}))
        return found

    def ids_of(found: list[StepOutput]) -> list[int]:
        return [token.token_id for output in found for token in output.sampled][:40]

    # The draft model is the base model, which says other things than the adapter.
    kind: dict[str, Any] = {"drafter": Drafter(6, costs=FreeDrafts)}
    if ahead:
        kind = {"draft": PATHS["compiled"](model_folder("llama, compiled"))}
    drafted = outputs(Driver(model, cache=cache, **kind))
    assert ids_of(drafted) == ids_of(outputs(Driver(model, cache=cache)))
    assert sum(output.num_drafts for output in drafted) > 0


def test_the_identity_is_that_of_the_content(
    model_folder: Callable[[str], Path], adapter_folder: Callable[[str, str], Path], tmp_path: Path
) -> None:
    model, folder = on_torch(model_folder("llama, compiled")), adapter_folder("llama, compiled", "all")
    first = read(model, folder).adapter_id
    copy = copied(folder, tmp_path / "elsewhere")
    assert read(model, copy).adapter_id == first
    changed(copy, lora_alpha=17)
    assert read(model, copy).adapter_id not in (first, 0)
    other = copied(folder, tmp_path / "weights")
    tensors = load_file(other / WEIGHTS)
    tensors[min(tensors)][0, 0] += 1
    save_file(tensors, other / WEIGHTS)
    assert read(model, other).adapter_id != first


def copied(folder: Path, target: Path) -> Path:
    target.mkdir()
    for name in (CONFIG, WEIGHTS):
        (target / name).write_bytes((folder / name).read_bytes())
    return target


def changed(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | fields))


def renamed(folder: Path, old: str, new: str) -> None:
    """Replaces a part of the tensors' names; None drops these tensors."""
    tensors = load_file(folder / WEIGHTS)
    save_file({name.replace(old, new): tensor for name, tensor in tensors.items()}, folder / WEIGHTS)


def dropped(folder: Path, part: str) -> None:
    tensors = load_file(folder / WEIGHTS)
    save_file({name: tensor for name, tensor in tensors.items() if part not in name}, folder / WEIGHTS)


def spoiled(folder: Path, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensors = load_file(folder / WEIGHTS)
    first = min(tensors)
    tensors[first] = change(tensors[first]).contiguous()
    save_file(tensors, folder / WEIGHTS)


K_PROJ = r"model\.layers\.0\.self_attn\.k_proj"
REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "another method": (lambda f: changed(f, peft_type="IA3"), r"adapter_config.json: peft_type is 'IA3'"),
    "DoRA": (lambda f: changed(f, use_dora=True), r"use_dora is set, which is not supported"),
    "whole modules": (lambda f: changed(f, modules_to_save=["lm_head"]), r"modules_to_save is set"),
    "biases": (lambda f: changed(f, bias="lora_only"), r"bias is 'lora_only'"),
    "biases of its matrices": (lambda f: changed(f, lora_bias=True), r"lora_bias is set"),
    "a classifier": (lambda f: changed(f, task_type="SEQ_CLS"), r"task_type is 'SEQ_CLS'"),
    "a changed base": (
        lambda f: changed(f, init_lora_weights="pissa_niter_4"),
        r"init_lora_weights is 'pissa_niter_4'",
    ),
    "a field of the future": (lambda f: changed(f, use_magic=True), r"use_magic is set"),
    "no targets": (lambda f: changed(f, target_modules=None), r"target_modules must name modules"),
    "other targets": (
        lambda f: changed(f, target_modules=["q_proj"]),
        r"target_modules does not name model\.layers\.0\.",
    ),
    "no expression": (lambda f: changed(f, target_modules="(q_proj"), r"target_modules is no regular expression"),
    "too large a rank": (lambda f: changed(f, r=65), r"r is 65 for .*; it must be from 1 to 64"),
    "another rank": (lambda f: changed(f, r=4), r"has matrices of the shapes \[8, 96\].*with r 4"),
    "no alpha": (lambda f: changed(f, lora_alpha="much"), r"lora_alpha is no number"),
    "no configuration": (lambda f: (f / CONFIG).unlink(), r"adapter_config.json is missing in"),
    "no JSON": (lambda f: (f / CONFIG).write_text("{"), r"adapter_config.json is no JSON"),
    "a list": (lambda f: (f / CONFIG).write_text("[]"), r"adapter_config.json must be a JSON object"),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), r"adapter_model.safetensors is missing in"),
    "half the weights": (
        lambda f: (f / WEIGHTS).write_bytes((f / WEIGHTS).read_bytes()[:999]),
        r"adapter_model.safetensors cannot be read",
    ),
    "too many bytes": (
        lambda f: (f / WEIGHTS).write_bytes(bytes(1 << 24)),
        r"an adapter of this model has \d+ at most",
    ),
    "embeddings": (
        lambda f: renamed(f, "layers.0.self_attn.k_proj.lora_A.weight", "embed_tokens.lora_embedding_A"),
        r"lora_embedding_A is not supported",
    ),
    "an unknown module": (lambda f: renamed(f, "layers.3.", "layers.4."), r"layers\.3\..* has no matrices"),
    "one matrix": (lambda f: dropped(f, "layers.0.self_attn.k_proj.lora_B"), rf"{K_PROJ} has only the matrix A"),
    "no matrices of a module": (lambda f: dropped(f, "layers.0.self_attn.k_proj"), rf"{K_PROJ} has no matrices"),
    "no numbers": (lambda f: spoiled(f, lambda t: t * torch.inf), r"has values that are no numbers"),
    "whole numbers": (lambda f: spoiled(f, torch.Tensor.int), r"is of type torch.int32"),
}


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_not_supported_is_refused_by_its_field(
    model_folder: Callable[[str], Path],
    adapter_folder: Callable[[str, str], Path],
    tmp_path: Path,
    change: Callable[[Path], object],
    message: str,
) -> None:
    model = on_torch(model_folder("llama, compiled"))
    folder = copied(adapter_folder("llama, compiled", "all"), tmp_path / "adapter")
    read(model, folder)
    change(folder)
    with pytest.raises(AdapterError, match=message):
        read(model, folder)
