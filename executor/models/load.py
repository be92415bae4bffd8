"""Loads a decoder, checks that the executor can run it, and chooses its forward pass."""

import ctypes
import gc
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, cast

import torch

from executor.cache.pool import LayerGroup
from executor.errors import FamilyError, ModelError, first_line
from executor.models.checkpoint import load_decoder
from executor.models.cpu import CpuModel, build_cpu_model
from executor.models.cuda import CudaGraphRunner
from executor.models.device_errors import is_out_of_memory
from executor.models.files import ModelFiles
from executor.models.forward import Forward, Model
from executor.models.gguf.module import StoredLinear, load_gguf, to_floats
from executor.models.layers import Recorder, check_layers, group_layers
from executor.models.llama import rope_frequencies, with_fallback
from executor.models.probe import check_packing
from executor.models.torch import TorchForward
from kernels.quantization import float8_obstacle
from kernels.stored import Matrix
from kernels.weights import Weights

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CACHE_DTYPES = DTYPES | {"fp8": torch.float8_e4m3fn, "int8": torch.int8}


def choose_device(name: str) -> torch.device:
    """Returns the device of a setting; "auto" takes a GPU if there is one. Raises ModelError."""
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= (found := torch.cuda.device_count()):
        raise ModelError(
            f"KVKEEP_EXECUTOR_DEVICE: there is no device {name}: torch finds {found} GPUs; choose another, auto or cpu"
        )
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def choose_cache_dtype(name: str, model: Model) -> torch.dtype:
    """Returns the element type of the pools by its setting. Raises ModelError if the model cannot use it here."""
    dtype = model.dtype if name == "auto" else CACHE_DTYPES[name]
    reason = float8_obstacle(model.device) if dtype == torch.float8_e4m3fn else ""
    if isinstance(model.forward, CpuModel) and dtype not in model.forward.decoder.cache_dtypes:
        reason = f"compiled code keeps no keys and values in {name}; take bfloat16"
    if reason:
        raise ModelError(f"KVKEEP_EXECUTOR_KV_CACHE_DTYPE: {reason}")
    return dtype


def load_model(
    files: ModelFiles, device: torch.device, dtype: str = "auto", *, compiled_folder: Path | None = None
) -> Model:
    """Loads and probes a model; compiled_folder as in `model_of`. Raises ModelError if it cannot run here."""
    refuse_other_kernels()
    chosen = _choose_dtype(dtype, device)
    if files.is_gguf:
        module = load_gguf(Path(files.source), None if chosen == "auto" else chosen)
    else:
        module = load_decoder(files.source, chosen)
    try:
        if device.type != "cpu":
            to_floats(module, device)
        module = module.to(device)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise ModelError(f"there is no memory for the model {files.source} on {device}: {first_line(error)}") from error
    return model_of(module, files.name, compiled_folder)


def model_of(module: Any, name: str, compiled_folder: Path | None = None) -> Model:
    """Prepares a transformers decoder, on its device, to be run by the executor. Raises ModelError if it cannot.

    Faster code replaces torch if possible: fused kernels on a GPU, compiled code kept in `compiled_folder` on a CPU. If
    this folder is None, a CPU keeps to torch.
    """
    module.eval().requires_grad_(False)
    device = module.device
    if device.type == "cuda":
        # Triton launches on this device.
        torch.cuda.set_device(device)
    config = module.config.get_text_config(decoder=True)
    groups = _probe(module, config, device)
    on_torch = TorchForward(module)
    forward: Forward = on_torch
    # Before a faster pass takes over the weights.
    linears = _linears(module)
    if device.type == "cuda" or compiled_folder is not None:
        forward = _faster(on_torch, module, groups, _max_positions(config), compiled_folder)
    if forward is on_torch:
        to_floats(module, device)
    check_packing(forward, config, groups, module.dtype, device)
    return Model(
        name=name,
        forward=forward,
        config=config,
        device=device,
        dtype=module.dtype,
        vocab_size=int(config.vocab_size),
        max_positions=_max_positions(config),
        eos_token_ids=_eos_token_ids(module.generation_config, config),
        groups=groups,
        rotary=rope_frequencies(module, config),
        linears=linears,
    )


def _linears(module: Any) -> dict[str, tuple[int, int]]:
    """Returns outputs and inputs of linear modules by name, without the output matrix, which has different rows."""
    output = module.get_output_embeddings()
    return {
        name: (one.out_features, one.in_features)
        for name, one in module.named_modules()
        if isinstance(one, torch.nn.Linear | StoredLinear) and one is not output
    }


def _faster(
    forward: Forward, module: Any, groups: Sequence[LayerGroup], positions: int, compiled_folder: Path | None
) -> Forward:
    def build(weights: Weights[Matrix]) -> Forward:
        if module.device.type == "cuda":
            # On a GPU all weights are floats.
            return CudaGraphRunner(cast(Weights, weights), groups, positions)
        assert compiled_folder is not None
        return build_cpu_model(weights, groups, module.dtype, compiled_folder)

    name = "fused decoder" if module.device.type == "cuda" else "compiled decoder"
    return with_fallback(forward, module, groups, build, name)


def release_unused_memory() -> None:
    """Releases the memory of transformers' modules that are no longer referenced."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _choose_dtype(name: str, device: torch.device) -> Any:
    if name != "auto":
        return DTYPES[name]
    if device.type == "cuda":
        return "auto"
    return torch.bfloat16 if multiplies_bfloat16() else torch.float32


def multiplies_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Returns whether the processor has instructions for bfloat16, without which the fallback torch is slow."""
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    flags = next((line for line in lines if line.startswith("flags")), "").split()
    return "avx512_bf16" in flags


def refuse_other_kernels() -> None:
    """Raises ModelError if a distribution `kernels` is installed: transformers would mistake our folder for it."""
    try:
        version = metadata.version("kernels")
    except metadata.PackageNotFoundError:
        return
    raise ModelError(
        f"the Python package kernels {version} is installed, and its name is that of a folder of this project: "
        "transformers cannot distinguish them; uninstall it"
    )


def _probe(module: Any, config: Any, device: torch.device) -> tuple[LayerGroup, ...]:
    recorder = Recorder()
    one = torch.zeros(1, 1, dtype=torch.int64, device=device)
    try:
        with torch.inference_mode():
            module(input_ids=one, position_ids=one, use_cache=False, kvkeep_layers=recorder)
    except ModelError:
        raise
    except Exception as error:  # Each family has its own code.
        raise FamilyError(
            f"{config.model_type}: the model does not take packed tokens with positions through transformers' "
            f"attention interface ({first_line(error)})"
        ) from error
    check_layers(recorder.shapes, config)
    return group_layers(recorder.shapes)


def _max_positions(config: Any) -> int:
    """Returns the longest sequence, in tokens. Raises ModelError.

    For RoPE that changes with a batch's longest sequence, only the positions before the change count.
    """
    longest = getattr(config, "max_position_embeddings", None)
    if not isinstance(longest, int) or longest < 1:
        raise ModelError(
            f"{config.model_type}: config.json has max_position_embeddings {longest!r}, which must be a number of "
            "tokens from 1: compare it with its origin"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if parameters.get("rope_type") == "longrope":
            original: Any = parameters.get("original_max_position_embeddings")
            longest = min(longest, int(original or getattr(config, "original_max_position_embeddings", longest)))
    return longest


def _eos_token_ids(generation_config: Any, config: Any) -> tuple[int, ...]:
    ids = getattr(generation_config, "eos_token_id", None)
    if ids is None:
        ids = getattr(config, "eos_token_id", None)
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list | tuple) else (int(ids),)
