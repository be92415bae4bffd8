"""What silu_mul means, in the words of transformers' LlamaMLP."""

import torch.nn.functional as F
from torch import Tensor


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up: [T, 2 I], the gate before up. Returns SiLU(gate) * up, [T, I] (Shazeer 2020, "GLU Variants Improve
    Transformer", section 2: SwiGLU without its matrices)."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up
