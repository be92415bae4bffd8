"""A transformers decoder over the matrices of a GGUF file, which keep their stored form."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import gguf
import structlog
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from executor.errors import ModelError, first_line
from executor.models import attention
from executor.models.gguf.config import configuration
from executor.models.gguf.file import GgufFile
from kernels.stored import FLOATS, StoredMatrix

log = structlog.get_logger()

# Most names that a message repeats.
_SHOWN = 3
# Divisors of a rotation's frequencies, in models without a plain rotary embedding.
_FACTORS = "rope_freqs.weight"
_EMBEDDING = "token_embd.weight"
_ROTATED = re.compile(r"blk\.\d+\.attn_[qk]\.(weight|bias)")
_ARCHITECTURES = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3}


class StoredLinear(nn.Module):
    """A linear layer whose weights become floats for each call and are dropped afterwards."""

    def __init__(self, matrix: StoredMatrix, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.matrix = matrix
        self.bias = bias
        self.out_features, self.in_features = matrix.shape

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.matrix.floats(x.dtype), self.bias)


class StoredEmbedding(nn.Module):
    """An embedding in which only the rows that a call asks for become floats."""

    def __init__(self, matrix: StoredMatrix, dtype: torch.dtype) -> None:
        super().__init__()
        self.matrix = matrix
        self._dtype = dtype

    def forward(self, ids: Tensor) -> Tensor:
        return self.matrix.rows(ids.flatten(), self._dtype).view(*ids.shape, -1)


def load_gguf(path: Path, dtype: torch.dtype | None) -> Any:
    """Returns the decoder of a GGUF file on the CPU. dtype: None for the file's own.

    Raises ModelError for a file that is damaged, incomplete, or of a kind that is not served.
    """
    file = GgufFile(path)
    dtype = dtype or _own_dtype(file)
    try:
        config = configuration(file)
        # On "meta", weights take no memory: they come from the file.
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention.NAME)
        module.model.rotary_emb = type(module.model.rotary_emb)(config)
    except ModelError:
        raise
    # Any exception: transformers checks only some sizes, and others fail where they are used.
    except Exception as error:
        raise ModelError(
            f"the metadata of the GGUF file {path} describe no model that can be built: {first_line(error)}"
        ) from error
    tied = config.tie_word_embeddings
    names = _names(file, module)
    _check_names(file, names, tied)
    if _FACTORS in file.kinds:
        frequencies = module.model.rotary_emb.inv_freq
        frequencies /= _vector(file, config, _FACTORS, tuple(frequencies.shape))
    embedding = _stored(file, config, _EMBEDDING, (config.vocab_size, config.hidden_size))
    for name, child in [*module.named_modules()]:
        for own, parameter in [*child.named_parameters(recurse=False)]:
            if parameter.dim() == 1:
                vector = _vector(file, config, names[f"{name}.{own}"], tuple(parameter.shape))
                setattr(child, own, nn.Parameter(vector.to(dtype), requires_grad=False))
        if isinstance(child, nn.Embedding):
            module.set_submodule(name, StoredEmbedding(embedding, dtype))
        elif isinstance(child, nn.Linear):
            shared = tied and child is module.get_output_embeddings()
            shape = child.out_features, child.in_features
            matrix = embedding if shared else _stored(file, config, names[f"{name}.weight"], shape)
            module.set_submodule(name, StoredLinear(matrix, child.bias))
    kinds = Counter(kind for name, kind in file.kinds.items() if len(file.shape(name)) > 1)
    log.info("reading a GGUF file", matrices=dict(kinds), dtype=str(dtype))
    return module


def to_floats(module: Any, device: torch.device) -> None:
    """Replaces stored matrices by floats on a device, one by one; does nothing to a module without stored matrices."""
    tied: dict[int, nn.Parameter] = {}
    for name, child in [*module.named_modules()]:
        if not isinstance(child, StoredLinear | StoredEmbedding):
            continue
        matrix = child.matrix
        if id(matrix) not in tied:
            tied[id(matrix)] = nn.Parameter(matrix.floats(module.dtype, device), requires_grad=False)
        layer: Any
        if isinstance(child, StoredLinear):
            layer = nn.Linear(child.in_features, child.out_features, child.bias is not None, device="meta")
            layer.bias = child.bias
        else:
            layer = nn.Embedding(*matrix.shape, device="meta")
        layer.weight = tied[id(matrix)]
        module.set_submodule(name, layer)
    if tied:
        log.info("weights of the GGUF file are dequantised", dtype=str(module.dtype), matrices=len(tied))


def stored_matrix(layer: Any) -> StoredMatrix | None:
    """Returns the matrix of a layer if it is in a file's stored form, otherwise None."""
    return layer.matrix if isinstance(layer, StoredLinear | StoredEmbedding) else None


def _own_dtype(file: GgufFile) -> torch.dtype:
    """Returns the type of all matrices if they are floats of one type; else bfloat16, whose range no model exceeds."""
    kinds = {kind for name, kind in file.kinds.items() if len(file.shape(name)) > 1}
    return FLOATS[kinds.pop()] if len(kinds) == 1 and kinds <= set(FLOATS) else torch.bfloat16


def _names(file: GgufFile, module: Any) -> dict[str, str]:
    """Returns the file's name of every parameter that the module needs, by transformers' name."""
    architecture = _ARCHITECTURES[file.metadata["general.architecture"]]
    of = gguf.get_tensor_name_map(architecture, module.config.num_hidden_layers)
    return {
        name: str(of.get_name(name, try_suffixes=(".weight", ".bias")))
        for name, _ in module.named_parameters(remove_duplicate=False)
    }


def _check_names(file: GgufFile, names: dict[str, str], tied: bool) -> None:
    """Raises ModelError unless the file has what the module needs, and nothing else."""
    needed = set(names.values()) - ({"output.weight"} if tied else set())
    for found, fault in (
        (needed - set(file.kinds), "lacks the tensors"),
        (set(file.kinds) - needed - {_FACTORS}, "has tensors that its architecture does not use:"),
    ):
        if found:
            listed = sorted(found)
            more = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
            raise ModelError(f"the GGUF file {file.path} {fault} {', '.join(listed[:_SHOWN])}{more}")


def _stored(file: GgufFile, config: Any, name: str, shape: tuple[int, ...]) -> StoredMatrix:
    if file.shape(name) != shape:
        raise _misshapen(file, name, shape)
    return file.matrix(name, _order(config, name, shape[0]))


def _vector(file: GgufFile, config: Any, name: str, shape: tuple[int, ...]) -> Tensor:
    if file.shape(name) != shape:
        raise _misshapen(file, name, shape)
    vector, order = file.vector(name), _order(config, name, shape[0])
    return vector if order is None else vector[order]


def _misshapen(file: GgufFile, name: str, shape: tuple[int, ...]) -> ModelError:
    return ModelError(
        f"the GGUF file {file.path} has {name} of the shape {list(file.shape(name))}, and its metadata describe "
        f"{list(shape)}: the file is damaged"
    )


def _order(config: Any, name: str, rows: int) -> Tensor | None:
    """Returns which stored row is row i of a query or key projection; None if rows are in transformers' order.

    For the architecture `llama`, llama.cpp stores the two elements of a head that are rotated together side by side.
    transformers has them half a head apart.
    """
    if config.model_type != "llama" or not _ROTATED.fullmatch(name):
        return None
    return torch.arange(rows).view(-1, config.head_dim // 2, 2).transpose(1, 2).flatten()
