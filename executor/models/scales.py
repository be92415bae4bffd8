"""The choice of scales for 8-bit caches: calibrated scales, which are kept; those of the checkpoint; or 1.0."""

import hashlib
import tempfile
from collections.abc import Callable
from pathlib import Path

import structlog
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from executor.cache.pool import LayerShape, Scales
from executor.errors import ModelError
from executor.models import calibration
from executor.models.checkpoint import cache_scales
from executor.models.files import ModelFiles
from executor.models.fingerprint import model_digest
from executor.models.forward import Model
from executor.models.tokenizer import TokenizerFiles
from kernels.quantization import LARGEST

log = structlog.get_logger()

_SETTING = "KVKEEP_EXECUTOR_KV_SCALES"


def choose_scales(
    choice: str, model: Model, files: ModelFiles, tokenizer: TokenizerFiles, dtype: torch.dtype, folder: Path
) -> list[Scales]:
    """Returns the scales of each layer group for pools of `dtype`; none unless it has 8 bits.

    choice: the setting. folder: where calibrated scales are kept. Raises ModelError if the chosen scales do not exist.
    """
    if dtype not in LARGEST:
        return []
    if choice == "one":
        return _of_layers(model, lambda _name, _layer, _shape: torch.ones(1))
    if choice == "checkpoint":
        return _of_checkpoint(model, files)
    return _calibrated(model, files, tokenizer, dtype, folder)


def _of_layers(model: Model, scale: Callable[[str, int, LayerShape], Tensor]) -> list[Scales]:
    """Returns scales made from those of "k" and "v" of each layer: one number, or one for each KV head."""

    def stacked(name: str, layers: tuple[int, ...], shape: LayerShape) -> Tensor:
        every = [scale(name, layer, shape).float().reshape(-1, 1) for layer in layers]
        return torch.stack([one.expand(shape.kv_heads, shape.head_dim) for one in every]).to(model.device)

    return [Scales(*(stacked(name, group.layers, group.shape) for name in "kv")) for group in model.groups]


def _of_checkpoint(model: Model, files: ModelFiles) -> list[Scales]:
    found = {} if files.is_gguf else cache_scales(files.source)

    def scale(name: str, layer: int, shape: LayerShape) -> Tensor:
        given = found.get((name, layer))
        if given is None:
            raise ModelError(
                f"{_SETTING}: the checkpoint {files.source} has no {name}_scale of layer {layer}: take calibrated"
            )
        numbers = given.float()
        if given.numel() not in (1, shape.kv_heads) or not bool((numbers.isfinite() & (numbers > 0)).all()):
            raise ModelError(
                f"{_SETTING}: {name}_scale of layer {layer} in {files.source} must be a number above 0, or one for "
                f"each of {shape.kv_heads} KV heads: compare the file with its origin, or take calibrated"
            )
        return given

    return _of_layers(model, scale)


def _calibrated(
    model: Model, files: ModelFiles, tokenizer: TokenizerFiles, dtype: torch.dtype, folder: Path
) -> list[Scales]:
    """Returns scales that the first start calibrates and later starts reuse."""
    # With different threads or on a different processor, a scale could round differently, and no stored block fit.
    text = [hashlib.sha256(tokenizer.json).hexdigest(), *calibration.TEXTS, calibration.MARGIN, calibration.GRID]
    kept = folder / f"{model_digest(model, files, str(dtype), *text).hex()[:32]}.safetensors"
    try:
        return _read(kept, model)
    except FileNotFoundError:
        pass
    except (OSError, SafetensorError, KeyError) as error:
        log.warning("kept scales cannot be read and are calibrated again", file=str(kept), cause=str(error))
    scales = calibration.calibrate(model, tokenizer, dtype)
    try:
        _write(kept, scales)
    except (OSError, SafetensorError) as error:
        log.warning("calibrated scales are not kept", file=str(kept), cause=str(error))
    return scales


def _read(file: Path, model: Model) -> list[Scales]:
    """Reads scales. Raises OSError, SafetensorError or KeyError."""
    tensors = load_file(file)
    return [
        Scales(*(tensors[f"{group}.{name}"].to(model.device) for name in "kv")) for group in range(len(model.groups))
    ]


def _write(file: Path, scales: list[Scales]) -> None:
    """Writes scales. Raises OSError or SafetensorError."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    tensors = {
        f"{group}.{name}": tensor.contiguous().cpu()
        for group, one in enumerate(scales)
        for name, tensor in (("k", one.k), ("v", one.v))
    }
    with tempfile.TemporaryDirectory(prefix=".making-", dir=file.parent) as scratch:
        made = Path(scratch, file.name)
        save_file(tensors, made)
        # In one move: another process may be reading it.
        made.replace(file)
