"""GGUF files of transformers' models, with llama.cpp's names and its order of rows."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, quants

from bench.gguf_file import Values, write

ARCHITECTURES = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3}


def write_model(
    module: Any, path: Path, kind_of: Callable[[str], str], metadata: Mapping[str, Any] = {}, **extra: Values
) -> None:
    """Writes a model's weights in the types by `kind_of` for their names in the file, and rounds the model accordingly.

    metadata: in addition to the configuration's; None removes a field. extra: tensors in addition to the model's.
    """
    config = module.config
    names = gguf.get_tensor_name_map(ARCHITECTURES[config.model_type], config.num_hidden_layers)
    tensors: dict[str, Values] = {}
    torch.manual_seed(2)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            known = names.get_name(name, try_suffixes=(".weight", ".bias"))
            assert known is not None
            kind = kind_of(known) if parameter.dim() == 2 else "F32"
            stored = _stored(parameter.numpy(), kind)
            floats = quants.dequantize(stored, GGMLQuantizationType[kind])
            parameter.copy_(torch.from_numpy(np.asarray(floats).reshape(parameter.shape)))
            if config.model_type == "llama" and (".attn_q." in known or ".attn_k." in known):
                heads = config.num_attention_heads if ".attn_q." in known else config.num_key_value_heads
                stored = _side_by_side(stored, heads)
            tensors[known] = stored, kind
    write(path, {k: v for k, v in {**described(config), **metadata}.items() if v is not None}, {**tensors, **extra})


def described(config: Any) -> dict[str, Any]:
    """A configuration's metadata, without a tokenizer."""
    fields = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.dimension_count": config.head_dim,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "vocab_size": config.vocab_size,
    }
    kind = config.model_type
    return {"general.architecture": kind, **{f"{kind}.{name}": value for name, value in fields.items()}}


def _stored(values: np.ndarray, kind: str) -> np.ndarray:
    """Weights as in a file. The library cannot quantize to Q6_K: these are codes of some other matrix."""
    if kind != "Q6_K":
        stored = quants.quantize(values, GGMLQuantizationType[kind])
        return stored.view(np.uint8) if values.ndim == 2 else stored
    blocks = torch.randint(256, (len(values), values.shape[1] // 256 * 210), dtype=torch.uint8)
    blocks.view(len(values), -1, 210)[..., 208:] = torch.tensor([1e-4], dtype=torch.float16).view(torch.uint8)
    return blocks.numpy()


def _side_by_side(rows: np.ndarray, heads: int) -> np.ndarray:
    """The two rows of a head that are rotated together become neighbours."""
    halves = rows.reshape(heads, 2, len(rows) // heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows.shape))
