"""Loads a transformers decoder from a model's folder, with every weight from the checkpoint, or says why it cannot."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import (
    CONFIG_NAME,
    GENERATION_CONFIG_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
    cached_file,
)
from transformers.utils import logging as transformers_logging
from transformers.utils.peft_utils import find_adapter_config_file

from executor.errors import FamilyError, ModelError, first_line
from executor.models import attention
from executor.models.device_errors import is_out_of_memory
from executor.models.files import adapter_instead, check_folder

# Most names of weights that a message repeats.
_SHOWN = 3
# Element types of numeric weights, as safetensors and torch name them; all other types hold codes.
_FLOATS = {"F64", "F32", "F16", "BF16", "float64", "float32", "float16", "bfloat16"}

# Scales of cached keys and values, as compressed-tensors and ModelOpt name them. They are not weights of the model.
_CACHE_SCALE = re.compile(r"\.layers\.([0-9]+)\.self_attn\.(?:[kv]_proj\.)?([kv])_scale$")


def load_decoder(source: str, dtype: Any) -> Any:
    """Returns the decoder of a folder or a hub id, on the CPU. dtype: of torch, or "auto" for the file's own.

    Raises ModelError unless the checkpoint is exactly one decoder. Errors are missing or unused weights, wrong shapes,
    an adapter, an encoder, or a format that transformers cannot read here.
    """
    check_folder(source)
    # The progress bars of transformers are no log lines, and its table of unfitting weights becomes one sentence.
    transformers_logging.disable_progress_bar()
    transformers_logging.get_logger("transformers.modeling_utils").setLevel(transformers_logging.ERROR)
    config = _configuration(source)
    _check_generation_config(source, config)
    try:
        module, info = AutoModelForCausalLM.from_pretrained(
            source,
            dtype=dtype,
            attn_implementation=attention.NAME,
            output_loading_info=True,
            # Otherwise, transformers raises an error that does not name these weights.
            ignore_mismatched_sizes=True,
            # Otherwise, transformers asks at the terminal.
            trust_remote_code=False,
        )
    # Any exception: families and formats bring their own code, whose errors must not end in a traceback.
    except Exception as error:
        if is_out_of_memory(error):
            raise ModelError(f"there is no memory for the model {source}: {first_line(error)}") from error
        raise _unreadable(source, config, error) from error
    if (method := _quantized(module.config)) and getattr(module, "hf_quantizer", None) is None:
        raise ModelError(
            f"the weights of {source} are quantised by {method}, which the installed transformers does not know: "
            "serve the model's unquantised weights"
        )
    _check_weights(source, module, info)
    if not method:
        _check_types(source, module)
    return module


def _configuration(source: str) -> Any:
    """Returns the configuration, if it is that of a decoder. Raises ModelError."""
    said: dict[str, Any] = {}
    try:
        if find_adapter_config_file(source) is not None:
            raise adapter_instead(source)
        said, _ = PretrainedConfig.get_config_dict(source)
        if said.get("auto_map") and said.get("model_type") not in CONFIG_MAPPING:
            raise _own_code(source)
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    except ModelError:
        raise
    except Exception as error:  # As where the weights are read.
        if (unknown := _unknown_value(source, said, error)) is not None:
            raise unknown from error
        raise ModelError(
            f"cannot load the model {source}: {first_line(error)}; check its config.json, "
            "or whether the installed transformers knows the model"
        ) from error
    if getattr(config, "is_encoder_decoder", False):
        raise FamilyError(f"{config.model_type}: the model has an encoder before its decoder")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        if getattr(config, "auto_map", None):
            raise _own_code(source)
        raise FamilyError(f"{config.model_type}: transformers knows no decoder of text alone for this family")
    return config


def _own_code(source: str) -> ModelError:
    return ModelError(
        f"the model {source} brings code of its own (auto_map in config.json), which the executor does not run: "
        "serve a model of a family that the installed transformers knows"
    )


def _check_generation_config(source: str, config: Any) -> None:
    """Raises ModelError unless generation_config.json can be read and what ends an output is a token of the model."""
    vocabulary = getattr(config.get_text_config(decoder=True), "vocab_size", None)
    found = cached_file(source, GENERATION_CONFIG_NAME, _raise_exceptions_for_missing_entries=False)
    said: Any = {}
    if found is not None:
        try:
            said = json.loads(Path(found).read_text())
            if not isinstance(said, dict):
                raise ValueError("it holds no JSON object")
            _check_eos(GENERATION_CONFIG_NAME, source, said.get("eos_token_id"), vocabulary)
            GenerationConfig.from_dict(dict(said))
        except ModelError:
            raise
        except Exception as error:  # As where the weights are read.
            raise ModelError(
                f"cannot read {GENERATION_CONFIG_NAME} of the model {source}: {first_line(error)}; "
                "compare it with its origin, or remove it: then config.json says which tokens end an output"
            ) from error
    if said.get("eos_token_id") is None:
        text = config.get_text_config(decoder=True)
        _check_eos(CONFIG_NAME, source, getattr(text, "eos_token_id", None), vocabulary)


def _check_eos(file: str, source: str, given: Any, vocabulary: int | None) -> None:
    ids = given if isinstance(given, list) else [given]
    # A boolean is an int only in Python.
    if given is not None and not all(type(one) is int and 0 <= one < (vocabulary or one + 1) for one in ids):
        below = f" below {vocabulary}, the size of the vocabulary" if vocabulary else ""
        raise ModelError(
            f"{file} of the model {source}: eos_token_id is {json.dumps(given, default=str)[:80]}, "
            f"which must be a token id from 0{below}: compare it with its origin, or remove the field"
        )


def _unknown_value(source: str, said: Mapping[str, Any], error: Exception) -> ModelError | None:
    """The error for a field of config.json whose value transformers has no entry for; None for other errors."""
    if not isinstance(error, KeyError) or len(error.args) != 1:
        return None
    fields = sorted(_fields_with(said, error.args[0]))
    if not fields:
        return None
    return ModelError(
        f"cannot load the model {source}: config.json has {fields[0]} {error.args[0]!r}, which the installed "
        "transformers does not know: compare it with its origin, or install a transformers that knows it"
    )


def _fields_with(said: Mapping[str, Any], value: object, prefix: str = "") -> Iterator[str]:
    for name, one in said.items():
        if isinstance(one, dict):
            yield from _fields_with(one, value, f"{prefix}{name}.")
        elif isinstance(value, str) and one == value:
            yield prefix + name


def _check_types(source: str, module: Any) -> None:
    """Raises ModelError if weights are codes, which without their scales are wrong numbers."""
    weights = {name for name, _ in module.named_parameters()}
    # Masks and counters are integers, too; a floating-point type of eight bits or fewer is always a code.
    codes = {
        name: kind
        for name, kind in _stored_types(source)
        if kind not in _FLOATS and (name in weights or name.endswith(".weight") or kind.lower().startswith("f"))
    }
    if codes:
        raise ModelError(
            f"the weights of {source} are stored as codes ({', '.join(sorted(set(codes.values())))}), and config.json "
            f"has no quantization_config that says what they mean: {_some(codes)}; serve the model's unquantised "
            "weights, or compare config.json with its origin"
        )


def _stored_types(source: str) -> Iterator[tuple[str, str]]:
    """Yields the names and element types of the tensors in a checkpoint's files."""
    folder = _folder(source)
    if files := _files(folder, SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME):
        for file in files:
            with safe_open(file, "pt") as tensors:
                yield from ((name, str(tensors.get_slice(name).get_dtype())) for name in tensors.keys())  # noqa: SIM118
        return
    for file in _files(folder, WEIGHTS_NAME, WEIGHTS_INDEX_NAME):
        # On "meta", no numbers are read.
        for name, tensor in torch.load(file, map_location="meta", weights_only=True).items():
            if isinstance(tensor, torch.Tensor):
                yield name, str(tensor.dtype).removeprefix("torch.")


def cache_scales(source: str) -> dict[tuple[str, int], torch.Tensor]:
    """Scales of cached keys and values in a checkpoint of safetensors, by "k" or "v" and the number of the layer."""
    scales = {}
    for file in _files(_folder(source), SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                if found := _CACHE_SCALE.search(name):
                    scales[found[2], int(found[1])] = tensors.get_tensor(name)
    return scales


def _folder(source: str) -> Path:
    """Returns where the files of a folder or a hub id are."""
    return Path(str(cached_file(source, CONFIG_NAME))).parent


def _files(folder: Path, whole: str, index: str) -> list[Path]:
    """Returns the files to load: one with all weights, or those that an index names."""
    if (folder / whole).is_file():
        return [folder / whole]
    if (folder / index).is_file():
        return [folder / name for name in sorted(set(json.loads((folder / index).read_text())["weight_map"].values()))]
    return []


def _unreadable(source: str, config: Any, error: Exception) -> ModelError:
    if isinstance(error, KeyError) and error.args == (attention.NAME,):
        return FamilyError(f"{config.model_type}: its attention does not go through transformers' attention interface")
    if (unknown := _unknown_value(source, config.to_dict(), error)) is not None:
        return unknown
    if method := _quantized(config):
        return ModelError(
            f"cannot load the model {source}, whose weights are quantised ({method}): {first_line(error)}; "
            "install what that asks for, or serve the model's unquantised weights"
        )
    return ModelError(
        f"cannot load the model {source}: {first_line(error)}; "
        "the files may be incomplete or damaged: compare them with their origin, or download them again"
    )


def _quantized(config: Any) -> str:
    """Returns the method by which a checkpoint is quantised; empty if it is not."""
    found = getattr(config, "quantization_config", None)
    if not found:
        return ""
    return str((found if isinstance(found, dict) else vars(found)).get("quant_method", "an unknown method"))


def _check_weights(source: str, module: Any, info: dict[str, Any]) -> None:
    """Raises ModelError unless each weight of the model has a value in the checkpoint, and each value is used."""
    unexpected = [name for name in info["unexpected_keys"] if not _CACHE_SCALE.search(name)]
    faults = [
        (info["missing_keys"], "lacks", "these would be random numbers"),
        ([name for name, *_ in info["mismatched_keys"]], "has other shapes of", "config.json describes another model"),
        (unexpected, "has weights that the model does not use", "config.json describes another model"),
    ]
    for names, fault, meaning in faults:
        if names:
            raise ModelError(
                f"the checkpoint {source} does not fit {type(module).__name__}: it {fault}: {_some(names)}; {meaning}: "
                f"serve a complete checkpoint of a language model{_saved_as(module)}"
            )
    if messages := info.get("error_msgs"):
        raise ModelError(f"cannot load the model {source}: {str(messages[0]).splitlines()[0]}; download it again")


def _some(names: Iterable[str]) -> str:
    listed = sorted(names)
    more = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    return ", ".join(listed[:_SHOWN]) + more


def _saved_as(module: Any) -> str:
    saved = [name for name in module.config.architectures or () if name != type(module).__name__]
    return f" (this is saved as {', '.join(saved)})" if saved else ""
