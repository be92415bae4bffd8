"""The weights of a Llama-family decoder, in the form that the fused layers and the compiled decoder take."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic

from torch import Tensor
from typing_extensions import TypeVar

from kernels.stored import Matrix

# Type of the matrices: tensors in memory by default, or matrices in a file's stored form.
M_co = TypeVar("M_co", bound=Matrix, covariant=True, default=Tensor)


@dataclass(frozen=True)
class LayerWeights(Generic[M_co]):
    """One layer: RMSNorm and attention, RMSNorm and gated SiLU, with a residual connection around each pair.

    input_norm, post_norm: [H]. q_norm, k_norm: [D], per head, before the rotation. qkv: [(Hq + 2 Hkv) D, H]; qkv_bias:
    [(Hq + 2 Hkv) D]; out: [H, Hq D]; gate_up: [2 I, H], rows of the gate first; down: [H, I]. group: index of the layer
    group. None: the layer has no such bias or norm.
    """

    input_norm: Tensor
    post_norm: Tensor
    qkv: M_co
    out: M_co
    gate_up: M_co
    down: M_co
    group: int = 0
    qkv_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None


@dataclass(frozen=True)
class LowRank:
    """What an adapter adds to a product x W^T of one projection: scale * (x a^T) b^T. a: [R, K]. b: [N, R]."""

    a: Tensor
    b: Tensor
    scale: float


@dataclass(frozen=True)
class LayerAdapter:
    """What an adapter adds to a layer, by the projections that LayerWeights joins; None where it adds nothing."""

    qkv: Sequence[LowRank | None] = (None, None, None)
    out: Sequence[LowRank | None] = (None,)
    gate_up: Sequence[LowRank | None] = (None, None)
    down: Sequence[LowRank | None] = (None,)


@dataclass(frozen=True)
class Weights(Generic[M_co]):
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
    embedding: M_co | None
    head: M_co
    final_norm: Tensor
    layers: Sequence[LayerWeights[M_co]]
