"""What a policy of token eviction is to the executor: it sees attention scores and says which tokens stay."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kernels.scores import ScoreAccumulator, SequenceScores
from protos.kvcommon.eviction import Kind, Policy


@dataclass(frozen=True)
class KvShape:
    """Sizes of a sequence's state: one row per layer and KV head."""

    layers: int
    kv_heads: int
    device: torch.device


@dataclass(frozen=True)
class KvView:
    """What a sequence's T slots hold. positions: [L, Hkv, T] int64, each slot's token by its position in the sequence.

    computed: tokens computed so far, evicted ones included; the newest has the position computed - 1.
    keys: reads the keys, [L, Hkv, T, D] in the cache's dtype, rotated as they are cached.
    """

    positions: Tensor
    computed: int
    keys: Callable[[], Tensor]


def scored_rows(policy: Policy, prompt: int, computed: int, new: int) -> int:
    """Of `new` queries behind `computed` ones, how many last ones a policy scores by; 0 for policies without scores.

    prompt: tokens of the request's prompt.
    """
    if not policy.uses_scores or (policy.kind is Kind.SNAPKV and computed >= prompt):
        return 0
    # TOVA ranks by a chunk's last query alone, and may evict behind every chunk.
    if policy.kind is Kind.TOVA and policy.during_prefill:
        return min(new, 1)
    return min(new, max(0, computed + new - prompt + policy.counted_rows(prompt)))


class Evictor(ABC):
    """The eviction policy of one sequence. Its slots are numbered 0 to T - 1; new tokens come at the end.

    ordered: whether slots stay in the order of their tokens in every layer and head. Otherwise slots that stay do not
    move, and the last ones fill the gaps. uses_squares: whether SequenceScores.squares are wanted.
    """

    ordered: ClassVar[bool] = False
    uses_squares: ClassVar[bool] = False

    def __init__(self, policy: Policy, shape: KvShape) -> None:
        self.policy = policy
        self.shape = shape

    def accumulator(self, slots: int) -> ScoreAccumulator | None:
        """Where a forward pass may add a step's weights up itself. slots: in use after the step."""
        del slots
        return None

    def observe(self, scores: SequenceScores | None, new: int) -> None:
        """After every step of the sequence: `new` of its slots are new. scores: None where no query was scored."""
        del scores, new

    @abstractmethod
    def keep(self, view: KvView, count: int) -> Tensor:
        """[1 or L, 1 or Hkv, count] int64: the slots that stay, in ascending order."""
        ...

    def reindex(self, index: Tensor) -> None:
        """After an eviction: slot i now holds what slot index[..., i] held. index: [L, Hkv, T'] int64."""
        del index

    def kept_mass(self, index: Tensor) -> float | None:
        """Share of the scores that slots `index` have, [.., T'] int64 as `keep` returns them; None without scores."""
        del index
        return None
