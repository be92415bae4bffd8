"""What rms_norm means, in the words of transformers' LlamaRMSNorm."""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None) -> Tensor:
    """x [..., N] over its root mean square, times weight [N]; with a residual, x + residual is normed instead.

    The residual becomes the sum, rounded to its dtype. Returns a tensor like x (Zhang and Sennrich 2019, "Root Mean
    Square Layer Normalization", equation 4).
    """
    if residual is not None:
        residual += x
        x = residual
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)
