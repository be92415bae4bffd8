"""What draw_tokens means, one row after the other."""

import torch
from torch import Tensor

# Its product with any sum is less than the sum, however it is rounded.
LARGEST_UNIFORM = 1 - 1e-12


def kept_tokens(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Returns weights, [V] float64, of a row's tokens; 0 for those that top-k, top-p or min-p drop, in this order.

    logits: [V]. Equal logits are kept or dropped together. Top-p (Holtzman et al. 2020, "The Curious Case of Neural
    Text Degeneration", section 3.1) looks at what top-k has left, min-p (Nguyen et al. 2024) at the best token.
    """
    logits = logits.double()
    weights = ((logits - logits.max()) / temperature).exp()
    if 0 < top_k < len(logits):
        weights[logits < logits.sort(descending=True).values[top_k - 1]] = 0
    if top_p < 1:
        _, group = logits.unique(return_inverse=True)  # type: ignore[no-untyped-call]
        mass = torch.zeros(int(group.max()) + 1, dtype=torch.float64).index_add_(0, group, weights)
        above = mass.sum() - mass.cumsum(0)
        # Dropped if the better tokens alone are enough; the best token is never dropped.
        enough = above >= top_p * mass.sum()
        enough[-1] = False
        weights[enough[group]] = 0
    return torch.where(weights >= min_p, weights, 0)


def draw_tokens(logits: Tensor, parameters: Tensor) -> Tensor:
    """logits: [P, V]. parameters: [P, 5]. Returns ids, [P] int64, by inverting each row's cumulative distribution."""
    ids = []
    for row, (temperature, top_k, top_p, min_p, uniform) in zip(logits, parameters.tolist(), strict=True):
        cumulative = kept_tokens(row, temperature, int(top_k), top_p, min_p).cumsum(0)
        ids.append(int((cumulative > min(uniform, LARGEST_UNIFORM) * cumulative[-1]).nonzero()[0]))
    return torch.tensor(ids)
