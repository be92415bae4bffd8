"""Writes GGUF files for llama.cpp from a model's folder, with the same weights."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any


def written(model: Path, dtype: str, folder: Path) -> Path:
    """The GGUF file of a model of the Llama family, its matrices in float32 or bfloat16; made if it is not there.

    Its tokens have no texts: prompts are token ids, and no token ends an output. Raises ValueError for other models.
    """
    target = folder / f"{model.name}-{dtype}.gguf"
    if target.exists():
        return target
    config = json.loads((model / "config.json").read_text())
    rope = config.get("rope_parameters") or {"rope_theta": config.get("rope_theta", 10_000.0)}
    if config["model_type"] != "llama" or rope.get("rope_type", "default") != "default":
        raise ValueError(f"only plain models of the Llama family are converted, {model.name} is not one")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".writing-", dir=folder) as scratch:
        file = Path(scratch, target.name)
        _write(model, config, float(rope["rope_theta"]), dtype, file)
        return file.rename(target)


def _write(model: Path, config: dict[str, Any], theta: float, dtype: str, file: Path) -> None:
    # Imported here: a process that only measures does without torch.
    import gguf
    from safetensors.torch import load_file

    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or hidden // heads
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH.LLAMA])
    writer.add_block_count(layers)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(theta)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    # A tokenizer whose texts are numbers.
    writer.add_tokenizer_model("test")
    writer.add_token_list([f"{token:x}" for token in range(config["vocab_size"])])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, layers)
    kept = {"float32": gguf.GGMLQuantizationType.F32, "bfloat16": gguf.GGMLQuantizationType.BF16}[dtype]
    tensors = load_file(model / "model.safetensors")
    if config.get("tie_word_embeddings"):
        # llama.cpp uses the embedding if there is no output matrix.
        tensors.pop("lm_head.weight", None)
    for name, tensor in tensors.items():
        values = tensor.float().numpy()
        for part, count in (("q_proj", heads), ("k_proj", kv_heads)):
            if f".{part}." in name:
                # The rows that are rotated together lie half a head apart in the folder, side by side in the file.
                pairs = values.reshape(count, 2, head_dim // 2, *values.shape[1:])
                values = pairs.swapaxes(1, 2).reshape(values.shape)
        # Norms and biases are floats there in any case.
        kind = kept if values.ndim > 1 else gguf.GGMLQuantizationType.F32
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if target is None:
            raise ValueError(f"{name} has no name in a GGUF file")
        writer.add_tensor(target, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def step_bytes(file: Path) -> int:
    """Bytes of weights that every step reads: all matrices, but the embedding only if it is the output matrix, too."""
    from gguf import GGUFReader

    matrices = {tensor.name: int(tensor.n_bytes) for tensor in GGUFReader(file).tensors if len(tensor.shape) > 1}
    if "output.weight" in matrices:
        del matrices["token_embd.weight"]
    return sum(matrices.values())
