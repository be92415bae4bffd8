"""Any tokens: what every other policy must do better than."""

from __future__ import annotations

import torch
from torch import Tensor

from executor.core.sampler import uniform
from executor.eviction.policy import Contents
from executor.eviction.ranked import Ranked
from protos.kvcommon.eviction import Policy


class AnyTokens(Ranked):
    """Evicts tokens that are drawn, in each KV head others."""

    def scores(self, contents: Contents) -> Tensor:
        """[L, Hkv, T] float32; a token's number does not depend on its slot."""
        drawn = torch.rand(contents.positions.shape, generator=source(self.policy, contents.computed))
        ranks = contents.positions.argsort(-1).argsort(-1)
        return drawn.to(ranks.device).gather(-1, ranks)


def source(policy: Policy, computed: int) -> torch.Generator:
    """What to draw from on the CPU after so many tokens: the same whenever the policy's seed is."""
    # The generator uses 32 bits of a seed; all of the policy's 64 shall count.
    return torch.Generator().manual_seed(int(uniform(policy.seed, computed) * (1 << 32)))
