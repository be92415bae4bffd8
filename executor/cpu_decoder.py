"""Runs decoders of the Llama kind on a CPU in compiled code, in place of transformers' modules."""

import ctypes
import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import structlog
import torch
from torch import Tensor

from executor.batch import Batch, pack
from executor.forward import Forward
from executor.kv_pool import KvPools
from executor.layers import LayerGroup, place_of_layers
from executor.running import RunningSet
from executor.step import Joining
from kernels.decoder import build
from kernels.decoder.launch import Decoder, LayerWeights, TokenGroup, Weights, obstacle

log = structlog.get_logger()

# Families whose layers are those of kernels.decoder; a probe holds each model to it.
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
# Rotations that depend on nothing but the position.
_FIXED_ROTATIONS = ("default", "linear", "llama3", "yarn")
# Largest root mean square error of the probe's logits, relative to theirs.
_TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.1}
_PROBE_LENGTHS = (37, 3)


class CpuDecoder:
    """A model's forward pass over the pools, in compiled code."""

    def __init__(self, decoder: Decoder, groups: Sequence[LayerGroup]) -> None:
        self._decoder = decoder
        self._windows = [group.shape.window for group in groups]
        self._pools: KvPools | None = None

    def logits(self, batch: Batch, pools: KvPools) -> Tensor:
        """Logits of the batch's rows, [R, V] float32; stores keys and values."""
        if pools is not self._pools:
            self._decoder.bind([pools.layer(layer)[1:] for layer in range(len(pools.places))])
            self._pools = pools
        groups = [
            TokenGroup(slots, paged.block_tables, window)
            for slots, paged, window in zip(batch.slot_mappings, batch.paged, self._windows, strict=True)
        ]
        query_start = batch.paged[0].query_start
        return self._decoder.step(batch.token_ids, batch.positions, query_start, groups, batch.rows)


def compiled(forward: Forward, module: Any, groups: Sequence[LayerGroup], folder: Path) -> Forward:
    """What computes the same as `forward`, which runs `module`, in less time; `forward` itself where nothing does.

    folder: where the compiled code is kept.
    """
    config, dtype = module.config.get_text_config(decoder=True), module.dtype
    if config.model_type not in FAMILIES:
        log.info("running on torch", cause=f"no compiled decoder for {config.model_type}")
        return forward
    try:
        library = build.load(folder)
        weights = _weights(module, config, groups)
        reason = obstacle(library, weights, dtype) or _obstacle(module, config)
    except build.BuildError as error:
        reason = str(error)
    if reason:
        log.warning("running on torch, which is slower", cause=reason)
        return forward
    fast = CpuDecoder(Decoder(library, weights, dtype, torch.get_num_threads()), groups)
    expected, computed = (probe(one, groups, config.vocab_size, dtype) for one in (forward, fast))
    deviation = float((computed - expected).square().mean().sqrt() / expected.square().mean().sqrt())
    if not deviation < _TOLERANCES[dtype]:
        log.warning("running on torch, which is slower", cause=f"the compiled decoder is off by {deviation:.2g}")
        return forward
    return fast


def _obstacle(module: Any, config: Any) -> str:
    """What a configuration asks for that the compiled decoder does not know; empty when nothing."""
    rotary = module.model.rotary_emb
    if getattr(rotary, "rope_type", "default") not in _FIXED_ROTATIONS:
        return f"the rotary embedding {rotary.rope_type} changes with the length"
    if 2 * rotary.inv_freq.shape[0] != module.model.layers[0].self_attn.head_dim:
        return "only a part of each head is rotated"
    if config.hidden_act != "silu":
        return f"the activation {config.hidden_act} is not SiLU"
    with_bias = {f"self_attn.{name}_proj.bias" for name in "qkv"}
    names = [name for name, _ in module.model.layers[0].named_parameters() if name.endswith("bias")]
    extra = [name for name in names if name not in with_bias]
    return f"its layers have {', '.join(extra)}" if extra else ""


def _weights(module: Any, config: Any, groups: Sequence[LayerGroup]) -> Weights:
    model, places = module.model, place_of_layers(groups)
    attention = model.layers[0].self_attn
    output, embedding = module.get_output_embeddings().weight, model.embed_tokens.weight
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
        layers=[_layer(layer, places[number][0]) for number, layer in enumerate(model.layers)],
    )


def _layer(layer: Any, group: int) -> LayerWeights:
    attention, mlp = layer.self_attn, layer.mlp
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    biases = [projection.bias for projection in projections]
    norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    return LayerWeights(
        input_norm=layer.input_layernorm.weight,
        post_norm=layer.post_attention_layernorm.weight,
        qkv=torch.cat([projection.weight for projection in projections]),
        out=attention.o_proj.weight,
        gate=mlp.gate_proj.weight,
        up=mlp.up_proj.weight,
        down=mlp.down_proj.weight,
        group=group,
        qkv_bias=None if biases[0] is None else torch.cat(biases),
        q_norm=None if norms[0] is None else norms[0].weight,
        k_norm=None if norms[1] is None else norms[1].weight,
    )


def probe(forward: Forward, groups: Sequence[LayerGroup], vocab_size: int, dtype: torch.dtype) -> Tensor:
    """Logits of a few sequences' last tokens over small pools of their own."""
    block_size = 16
    blocks = [-(-length // block_size) for length in _PROBE_LENGTHS]
    pools = KvPools(groups, sum(blocks), block_size, dtype, torch.device("cpu"))
    running, first = RunningSet(), 1
    for number, (length, count) in enumerate(zip(_PROBE_LENGTHS, blocks, strict=True)):
        tokens = tuple((number + 7 * place) % vocab_size for place in range(length))
        table = tuple(range(first, first + count))
        running.add(Joining(number, tokens, length, 0, (table,) * len(groups)))
        first += count
    batch = pack(list(running), _PROBE_LENGTHS, torch.zeros(len(running), dtype=torch.int64), block_size, len(groups))
    return forward.logits(batch, pools)


def release_unused_memory() -> None:
    """Gives back what transformers' modules held, once nothing refers to them any more."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
