"""Low-rank adapters (LoRA) as PEFT saves them: a folder with a configuration and a safetensors file."""

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from torch import Tensor

from executor.errors import AdapterError, first_line
from kernels.weights import LowRank

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_MOST_CONFIG_BYTES = 1 << 20
# What PEFT puts before and after the names of a model's modules.
_PREFIX = "base_model.model."
_TENSOR = re.compile(r"(?P<module>.+)\.lora_(?P<part>[AB])\.weight")
# Fields that are read here, and fields that do not change what is computed.
_READ = {"r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules", "exclude_modules"} | {
    "layers_to_transform",
    "layers_pattern",
}
_IGNORED = {"auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "lora_dropout", "peft_version"} | {
    "loftq_config",
    "eva_config",
    "corda_config",
    "lora_ga_config",
    "megatron_config",
    "megatron_core",
    "runtime_config",
    "qalora_group_size",
    "ensure_weight_tying",
}
# Values of fields that ask only for what is computed here. Training may use any initial matrices as long as it leaves
# the model's weights alone, which other initialisations do not.
_ALLOWED: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "task_type": (None, "CAUSAL_LM"),
    "bias": ("none",),
    "init_lora_weights": (None, True, False, "gaussian", "eva", "orthogonal"),
}


@dataclass(frozen=True)
class Adapter:
    """The contents of an adapter's files. modules: float32, by the name of the linear module that they add to.

    adapter_id: identifies the content, the first 64 bits of a SHA-256 over both files. rank: its modules' largest.
    """

    adapter_id: int
    rank: int
    modules: Mapping[str, LowRank]


def read_adapter(folder: Path, linears: Mapping[str, tuple[int, int]], largest_rank: int) -> Adapter:
    """Reads both files once. linears: outputs and inputs of the model's linear modules that adapters may add to.

    Raises AdapterError, which names the file and the field, for everything that this model cannot compute.
    """
    most = sum(largest_rank * (outputs + inputs) * 4 for outputs, inputs in linears.values()) + _MOST_CONFIG_BYTES
    config_bytes, weight_bytes = _read(folder / CONFIG, _MOST_CONFIG_BYTES), _read(folder / WEIGHTS, most)
    config = _parse(config_bytes)
    _check(config)
    tensors = _tensors(weight_bytes)
    targets = _targets(config, linears)
    if missing := sorted(targets - tensors.keys()):
        raise _invalid(WEIGHTS, missing[0], "has no matrices, and target_modules names it")
    modules = {}
    for name, (a, b) in sorted(tensors.items()):
        if name not in linears:
            raise _invalid(WEIGHTS, name, "is no linear module of this model that an adapter can add to")
        if name not in targets:
            raise _invalid(CONFIG, "target_modules", f"does not name {name}, for which {WEIGHTS} has matrices")
        modules[name] = _module(config, name, a, b, linears[name], largest_rank)
    digest = hashlib.sha256(b"kvkeep/adapter/1\0" + len(config_bytes).to_bytes(8, "little") + config_bytes)
    digest.update(weight_bytes)
    return Adapter(
        int.from_bytes(digest.digest()[:8], "little"), max(len(module.a) for module in modules.values()), modules
    )


def _module(
    config: Mapping[str, Any], name: str, a: Tensor, b: Tensor, shape: tuple[int, int], largest_rank: int
) -> LowRank:
    rank = _by_pattern(config, "rank_pattern", name, "r")
    alpha = _by_pattern(config, "alpha_pattern", name, "lora_alpha")
    if not isinstance(rank, int) or not 1 <= rank <= largest_rank:
        raise _invalid(CONFIG, "r", f"is {rank} for {name}; it must be from 1 to {largest_rank}")
    if not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise _invalid(CONFIG, "lora_alpha", f"is no number for {name}")
    outputs, inputs = shape
    if list(a.shape) != [rank, inputs] or list(b.shape) != [outputs, rank]:
        raise _invalid(
            WEIGHTS,
            name,
            f"has matrices of the shapes {list(a.shape)} and {list(b.shape)}; "
            f"with r {rank} this model needs [{rank}, {inputs}] and [{outputs}, {rank}]",
        )
    if not (a.isfinite().all() and b.isfinite().all()):
        raise _invalid(WEIGHTS, name, "has values that are no numbers")
    return LowRank(a.float(), b.float(), alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def _read(path: Path, most: int) -> bytes:
    try:
        if not path.is_file():
            raise _invalid(path.name, "", f"is missing in {path.parent.name}: give a folder that PEFT has saved")
        if (size := path.stat().st_size) > most:
            raise _invalid(path.name, "", f"has {size} bytes; an adapter of this model has {most} at most")
        return path.read_bytes()
    except OSError as error:
        raise _invalid(path.name, "", f"cannot be read: {error.strerror}") from error


def _parse(config: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(config)
    except ValueError as error:
        raise _invalid(CONFIG, "", f"is no JSON: {first_line(error)}") from error
    if not isinstance(parsed, dict):
        raise _invalid(CONFIG, "", "must be a JSON object")
    return parsed


def _check(config: Mapping[str, Any]) -> None:
    """Raises AdapterError for a field that asks for something that is not computed."""
    for name, allowed in _ALLOWED.items():
        if config.get(name, allowed[0]) not in allowed:
            raise _invalid(CONFIG, name, f"is {config[name]!r}, which is not supported; it may be {allowed[-1]!r}")
    for name in sorted(config.keys() - _READ - _IGNORED - _ALLOWED.keys()):
        if config[name]:
            raise _invalid(CONFIG, name, "is set, which is not supported")
    for name in ("rank_pattern", "alpha_pattern"):
        if not isinstance(config.get(name) or {}, dict):
            raise _invalid(CONFIG, name, "must be an object")


def _tensors(weights: bytes) -> dict[str, tuple[Tensor, Tensor]]:
    """Returns A and B by the name of their module."""
    try:
        tensors = load_tensors(weights)
    except (SafetensorError, ValueError, KeyError) as error:
        raise _invalid(WEIGHTS, "", f"cannot be read: {first_line(error)}") from error
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        found = _TENSOR.fullmatch(name.removeprefix(_PREFIX))
        if found is None or not name.startswith(_PREFIX):
            raise _invalid(WEIGHTS, name, "is not supported: only lora_A.weight and lora_B.weight are")
        if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise _invalid(WEIGHTS, name, f"is of type {tensor.dtype}; it must be float32, float16 or bfloat16")
        parts.setdefault(found["module"], {})[found["part"]] = tensor
    for name, both in parts.items():
        if len(both) < 2:
            raise _invalid(WEIGHTS, name, f"has only the matrix {min(both)}")
    if not parts:
        raise _invalid(WEIGHTS, "", "has no matrices")
    return {name: (both["A"], both["B"]) for name, both in parts.items()}


def _targets(config: Mapping[str, Any], linears: Iterable[str]) -> set[str]:
    """Returns the modules that a configuration names, by the rules of PEFT."""
    target = config.get("target_modules")
    if not target:
        raise _invalid(CONFIG, "target_modules", "must name modules")
    targeted = _matcher("target_modules", target, every=target == "all-linear")
    exclude = config.get("exclude_modules")
    excluded = _matcher("exclude_modules", exclude) if exclude else lambda _: False
    chosen = {name for name in linears if targeted(name) and not excluded(name)}
    layers = config.get("layers_to_transform")
    if layers is None or layers == [] or isinstance(target, str):
        return chosen
    numbers = [layers] if isinstance(layers, int) else layers
    patterns = config.get("layers_pattern") or [r"[^.]*"]
    patterns = [patterns] if isinstance(patterns, str) else patterns

    def layer(name: str) -> int | None:
        found = (_match("layers_pattern", rf"(?:^|.*?\.){pattern}\.(\d+)\.", name, re.match) for pattern in patterns)
        return next((int(match[1]) for match in found if match), None)

    return {name for name in chosen if layer(name) in numbers}


def _matcher(field: str, names: Any, *, every: bool = False) -> Callable[[str], bool]:
    """Returns a function that tells if a module is meant, by a regular expression, or by names or their last parts."""
    if every:
        return lambda _: True
    if isinstance(names, str):
        return lambda name: _match(field, names, name, re.fullmatch) is not None
    if not isinstance(names, list) or not all(isinstance(one, str) for one in names):
        raise _invalid(CONFIG, field, "must be a list of names, or one regular expression")
    return lambda name: any(name == one or name.endswith(f".{one}") for one in names)


def _by_pattern(config: Mapping[str, Any], field: str, name: str, default: str) -> Any:
    """Returns a module's value, by the first pattern that matches its name, or else the default."""
    for pattern, value in (config.get(field) or {}).items():
        if _match(field, rf"(.*\.)?({pattern})$", name, re.match):
            return value
    return config.get(default)


def _match(
    field: str, pattern: str, name: str, match: Callable[[str, str], re.Match[str] | None]
) -> re.Match[str] | None:
    try:
        return match(pattern, name)
    except re.error as error:
        raise _invalid(CONFIG, field, f"is no regular expression: {first_line(error)}") from error


def _invalid(file: str, field: str, description: str) -> AdapterError:
    said = f"{file}: {field} {description}" if field else f"{file} {description}"
    return AdapterError(said, fields={"path": said})
