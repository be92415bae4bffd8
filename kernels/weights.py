"""The weights of a decoder of the Llama family, as the fused layers and the compiled decoder take them."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class LayerWeights:
    """One layer: RMSNorm, attention, RMSNorm, gated SiLU, each half added to what came in.

    input_norm, post_norm: [H]. q_norm, k_norm: [D], per head, before the rotation. qkv: [(Hq + 2 Hkv) D, H], with its
    bias; out: [H, Hq D]; gate_up: [2 I, H], the gate above; down: [H, I]. group: its layer group.
    """

    input_norm: Tensor
    post_norm: Tensor
    qkv: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor
    group: int = 0
    qkv_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None


@dataclass(frozen=True)
class Weights:
    """A model. embedding: [V, H], None when it is the output matrix `head` [V, H]. final_norm: [H].

    frequencies: [D / 2], radians per position; cosine and sine are multiplied with rotary_scale, logits of the
    attention with attention_scale.
    """

    q_heads: int
    kv_heads: int
    head_dim: int
    epsilon: float
    attention_scale: float
    rotary_scale: float
    frequencies: Tensor
    embedding: Tensor | None
    head: Tensor
    final_norm: Tensor
    layers: Sequence[LayerWeights]
