"""What a GGUF file says about its model, as a transformers configuration."""

import math
from collections.abc import Callable
from typing import Any

from transformers import LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from executor.errors import ModelError
from executor.models.gguf.file import GgufFile

# Architectures by llama.cpp's names; Mistral's models are `llama` there.
_FAMILIES: dict[str, Callable[..., PretrainedConfig]] = {
    "llama": LlamaConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
}
# Fields that do not affect what is computed here.
_SILENT = {"vocab_size", "tensor_data_layout", "rope.scaling.finetuned", "rope.scaling.original_context_length"}
# Tokens that end an output: ends of a text, of a turn, of a message that a tool answers.
_ENDS = ("eos", "eot", "eom")
# The remedy for a model that the executor may serve in another form than GGUF.
_INSTEAD = "serve the model's safetensors instead"


def configuration(file: GgufFile) -> PretrainedConfig:
    """Returns the configuration of a file's model.

    Raises ModelError for an architecture or feature that is not served, and for missing or damaged fields.
    """
    architecture = file.metadata.get("general.architecture")
    if architecture is None:
        raise ModelError(f"the GGUF file {file.path} has no general.architecture in its metadata")
    if architecture not in _FAMILIES:
        raise ModelError(
            f"the GGUF file {file.path} is of the architecture {architecture}, and the executor serves GGUF files of "
            f"{', '.join(_FAMILIES)}: {_INSTEAD}"
        )
    fields = _Fields(file, architecture)
    heads = fields.whole("attention.head_count")
    head_dim = fields.whole("attention.key_length", fields.whole("embedding_length") // heads)
    same = {"attention.value_length": head_dim, "rope.dimension_count": head_dim, "expert_count": 0}
    for name, value in {**same, "expert_used_count": 0, "attention.causal": True}.items():
        fields.only(name, value)
    if "token_embd.weight" not in file.kinds:
        raise ModelError(f"the GGUF file {file.path} lacks the tensor token_embd.weight")
    vocabulary = file.shape("token_embd.weight")[0]
    layers = fields.whole("block_count")
    if (last := f"blk.{layers - 1}.attn_norm.weight") not in file.kinds:
        raise ModelError(
            f"the GGUF file {file.path} lacks the tensors {last} and others: its metadata say {layers} layers"
        )
    config = _FAMILIES[architecture](
        vocab_size=vocabulary,
        hidden_size=fields.whole("embedding_length"),
        intermediate_size=fields.whole("feed_forward_length"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=fields.whole("attention.head_count_kv", heads),
        head_dim=head_dim,
        max_position_embeddings=fields.whole("context_length"),
        rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        rope_parameters=_rope(fields),
        tie_word_embeddings="output.weight" not in file.kinds,
        **({"attention_bias": "blk.0.attn_q.bias" in file.kinds} if architecture == "llama" else {}),
        # transformers' defaults belong to some other model.
        bos_token_id=_token(file, "bos", vocabulary),
        eos_token_id=[one for name in _ENDS if (one := _token(file, name, vocabulary)) is not None] or None,
        pad_token_id=_token(file, "padding", vocabulary),
    )
    fields.refuse_others()
    return config


class _Fields:
    """Fields of an architecture, with a record of which were asked for."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self._file = file
        self._prefix = f"{architecture}."
        self._asked: set[str] = set()

    def whole(self, name: str, otherwise: int | None = None) -> int:
        """Returns a whole number from 1. Raises ModelError."""
        value = self._value(name, otherwise)
        if type(value) is not int or value < 1:
            raise self._damaged(name, value, "a whole number from 1, the same for all layers")
        return value

    def number(self, name: str, otherwise: float | None = None) -> float:
        """Returns a number above zero. Raises ModelError."""
        value = self._value(name, otherwise)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise self._damaged(name, value, "a number above zero")
        return float(value)

    def text(self, name: str, otherwise: str) -> str:
        return str(self._value(name, otherwise))

    def only(self, name: str, value: object) -> None:
        """Raises ModelError for any value except the only served one."""
        if (found := self._value(name, value)) != value:
            raise self.refused(name, found, repr(value))

    def refused(self, name: str, value: object, served: str) -> ModelError:
        """Returns the error for a value that is not served."""
        return ModelError(
            f"{self._prefix}{name} of the GGUF file {self._file.path} is {value!r}, and the executor serves {served} "
            f"only: {_INSTEAD}"
        )

    def refuse_others(self) -> None:
        """Raises ModelError for fields that were not asked for, because they may change what has to be computed."""
        names = {name.removeprefix(self._prefix) for name in self._file.metadata if name.startswith(self._prefix)}
        if others := sorted(names - self._asked - _SILENT):
            raise ModelError(
                f"the GGUF file {self._file.path} has {self._prefix}{others[0]}, whose meaning the executor does not "
                f"know: {_INSTEAD}"
            )

    def _value(self, name: str, otherwise: Any) -> Any:
        self._asked.add(name)
        value = self._file.metadata.get(self._prefix + name, otherwise)
        if value is None:
            raise ModelError(f"the GGUF file {self._file.path} has no {self._prefix}{name} in its metadata")
        return value

    def _damaged(self, name: str, value: object, wanted: str) -> ModelError:
        shown = "a list" if isinstance(value, list) else repr(value)
        return ModelError(f"the GGUF file {self._file.path} has {self._prefix}{name} {shown}, which must be {wanted}")


def _rope(fields: _Fields) -> dict[str, Any]:
    """Returns the rotary embedding's parameters, without the divisors that a tensor of the file may hold."""
    theta = fields.number("rope.freq_base", 10000.0)
    # A file with only a factor means linear scaling.
    kind, factor = fields.text("rope.scaling.type", "linear"), fields.number("rope.scaling.factor", 1.0)
    if kind not in ("none", "linear"):
        raise fields.refused("rope.scaling.type", kind, "none or linear")
    if kind == "none" or factor == 1:
        return {"rope_type": "default", "rope_theta": theta}
    return {"rope_type": "linear", "rope_theta": theta, "factor": factor}


def _token(file: GgufFile, name: str, vocabulary: int) -> int | None:
    field = f"tokenizer.ggml.{name}_token_id"
    value = file.metadata.get(field)
    if value is not None and not (type(value) is int and 0 <= value < vocabulary):
        raise ModelError(
            f"the GGUF file {file.path} has {field} {value!r}, which must be a token id from 0 below {vocabulary}"
        )
    return value
