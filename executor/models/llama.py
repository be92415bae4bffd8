"""Decoders of the Llama family: which models belong to it, their weights, and the probe of a faster forward pass."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import structlog
import torch
from torch import Tensor

from executor.cache.pool import LayerGroup
from executor.errors import AdapterError, ModelError, UnsuitableError, first_line
from executor.models.device_errors import check_device, is_out_of_memory
from executor.models.forward import Forward
from executor.models.gguf.module import stored_matrix
from executor.models.probe import TOLERANCES, deviation, run
from kernels.stored import Matrix, joined
from kernels.weights import LayerAdapter, LayerWeights, LowRank, Weights

log = structlog.get_logger()

# Model types whose layers the fused layers and the compiled decoder compute; a probe checks each model.
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
# Rotary embeddings that depend only on the position.
_FIXED_ROTATIONS = ("default", "linear", "llama3", "yarn")
# Of these, the embeddings that do nothing but rotate.
_PLAIN_ROTATIONS = ("default", "linear", "llama3")
_PROBE_LENGTHS = (37, 3)


def rope_frequencies(module: Any, config: Any) -> Tensor | None:
    """Returns radians per position, [D / 2] float32, if keys can be rotated again; None for other models."""
    if not _is_known(module, config):
        return None
    rotary, attention = module.model.rotary_emb, module.model.layers[0].self_attn
    plain = getattr(rotary, "rope_type", "default") in _PLAIN_ROTATIONS
    whole = 2 * rotary.inv_freq.shape[0] == attention.head_dim
    return rotary.inv_freq.float() if plain and whole else None


# Projections of a layer, by the matrix in which they are joined.
_PROJECTIONS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "out": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}


def layer_adapters(modules: Mapping[str, LowRank], layers: int) -> list[LayerAdapter]:
    """Returns an adapter layer by layer, from what it adds to modules by their names. Raises AdapterError."""
    left = dict(modules)
    found = [
        LayerAdapter(
            **{
                matrix: tuple(left.pop(f"model.layers.{number}.{name}", None) for name in names)
                for matrix, names in _PROJECTIONS.items()
            }
        )
        for number in range(layers)
    ]
    if left:
        said = f"target_modules names {min(left)}, which is no projection of a layer"
        raise AdapterError(said, fields={"path": said})
    return found


def with_fallback(
    forward: Forward, module: Any, groups: Sequence[LayerGroup], build: Callable[[Weights[Matrix]], Forward], name: str
) -> Forward:
    """Returns the forward pass that `build` makes of the model if its logits are near `forward`'s, else `forward`.

    Logs why the faster pass is not used. `forward` runs `module`. name: of the faster pass, for the log. Raises
    ModelError if the device has failed or lacks memory.
    """
    config = module.config.get_text_config(decoder=True)
    if not _is_known(module, config):
        log.info("running on torch", cause=f"no {name} for {module.config.model_type}")
        return forward
    try:
        _check(module, config)
        fast = build(_weights(module, config, groups))
        expected, computed = (
            probe(each, groups, config.vocab_size, module.dtype, module.device) for each in (forward, fast)
        )
        error = deviation(computed, expected)
        if not error < TOLERANCES[module.dtype]:
            raise UnsuitableError(f"the {name} is off by {error:.2g}")
    except UnsuitableError as error:
        log.warning("running on torch, which is slower", cause=str(error))
        return forward
    except Exception as error:
        # The pools would have too little memory, too: a slow executor would hide the cause.
        if is_out_of_memory(error):
            said = f"there is no memory for the {name} of this model on {module.device}: {first_line(error)}"
            raise ModelError(said) from error
        check_device(module.device)
        # Whatever else prevents the faster pass, torch still runs the model.
        log.warning("running on torch, which is slower", cause=f"the {name} fails: {error}", exc_info=error)
        return forward
    return fast


def _is_known(module: Any, config: Any) -> bool:
    """Returns whether the whole module is of a known family; a multimodal model has its text layers elsewhere."""
    return module.config is config and config.model_type in FAMILIES


def _check(module: Any, config: Any) -> None:
    """Raises UnsuitableError for what a configuration asks for beyond its family's usual layers."""
    rotary = module.model.rotary_emb
    if module.dtype not in TOLERANCES:
        raise UnsuitableError(f"no faster forward pass computes in {module.dtype}")
    if getattr(rotary, "rope_type", "default") not in _FIXED_ROTATIONS:
        raise UnsuitableError(f"the rotary embedding {rotary.rope_type} changes with the length")
    if 2 * rotary.inv_freq.shape[0] != module.model.layers[0].self_attn.head_dim:
        raise UnsuitableError("only a part of each head is rotated")
    if config.hidden_act != "silu":
        raise UnsuitableError(f"the activation {config.hidden_act} is not SiLU")
    with_bias = {f"self_attn.{name}_proj.bias" for name in "qkv"}
    names = [name for name, _ in module.model.layers[0].named_parameters() if name.endswith("bias")]
    if extra := [name for name in names if name not in with_bias]:
        raise UnsuitableError(f"its layers have {', '.join(extra)}")


def _weights(module: Any, config: Any, groups: Sequence[LayerGroup]) -> Weights[Matrix]:
    model, group_of = module.model, {layer: number for number, group in enumerate(groups) for layer in group.layers}
    attention = model.layers[0].self_attn
    output, embedding = _matrix(module.get_output_embeddings()), _matrix(model.embed_tokens)
    return Weights(
        q_heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=attention.head_dim,
        epsilon=config.rms_norm_eps,
        attention_scale=attention.scaling,
        rotary_scale=getattr(model.rotary_emb, "attention_scaling", 1.0),
        frequencies=model.rotary_emb.inv_freq,
        embedding=None if output is embedding else embedding,
        head=output,
        final_norm=model.norm.weight,
        layers=[_layer(layer, group_of[number]) for number, layer in enumerate(model.layers)],
    )


def _layer(layer: Any, group: int) -> LayerWeights[Matrix]:
    attention, mlp = layer.self_attn, layer.mlp
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    biases = [projection.bias for projection in projections]
    norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    return LayerWeights(
        input_norm=layer.input_layernorm.weight,
        post_norm=layer.post_attention_layernorm.weight,
        qkv=_joined(projections),
        out=_matrix(attention.o_proj),
        gate_up=_joined((mlp.gate_proj, mlp.up_proj)),
        down=_matrix(mlp.down_proj),
        group=group,
        qkv_bias=None if biases[0] is None else torch.cat(biases),
        q_norm=None if norms[0] is None else norms[0].weight,
        k_norm=None if norms[1] is None else norms[1].weight,
    )


def _matrix(layer: Any) -> Matrix:
    stored = stored_matrix(layer)
    return layer.weight if stored is None else stored


def _joined(linears: Sequence[Any]) -> Matrix:
    """Joins the matrices of several linear layers, one below the other; the layers keep views, not second copies."""
    if stored := [matrix for linear in linears if (matrix := stored_matrix(linear)) is not None]:
        return joined(stored)
    merged = torch.cat([linear.weight.detach() for linear in linears])
    heights = [linear.out_features for linear in linears]
    for linear, part in zip(linears, torch.split(merged, heights), strict=True):
        linear.weight.data = part
    return merged


def probe(
    forward: Forward, groups: Sequence[LayerGroup], vocab_size: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Returns the logits of a few sequences' last tokens and of one more token each: float32."""
    steps = _PROBE_LENGTHS, (1,) * len(_PROBE_LENGTHS)
    return torch.cat(run(forward, groups, vocab_size, dtype, device, range(2), *steps, evicting=True))
