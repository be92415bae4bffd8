"""The executor's interface to token eviction policies, which see attention scores and say which tokens stay."""

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
    """Returns how many of a step's `new` queries, counted from the last, a policy scores by; 0 for none.

    prompt: tokens of the request's prompt. computed: tokens computed before the step.
    """
    if not policy.uses_scores or (policy.kind is Kind.SNAPKV and computed >= prompt):
        return 0
    # TOVA ranks only by a chunk's last query, and may evict after every chunk.
    if policy.kind is Kind.TOVA and policy.during_prefill:
        return min(new, 1)
    return min(new, max(0, computed + new - prompt + policy.counted_rows(prompt)))


class Evictor(ABC):
    """The eviction policy of one sequence. Its slots are numbered 0 to T - 1; new tokens come at the end.

    ordered: whether slots stay in the order of their tokens in every layer and head. Otherwise, kept slots do not move,
    except that the last kept slots fill the gaps. uses_squares: whether SequenceScores.squares are wanted. on_host:
    whether `keep` only looks at positions: then these are on the host, and no choice waits for the device.
    """

    ordered: ClassVar[bool] = False
    uses_squares: ClassVar[bool] = False
    on_host: ClassVar[bool] = False

    def __init__(self, policy: Policy, shape: KvShape) -> None:
        self.policy = policy
        self.shape = shape

    def accumulator(self, slots: int) -> ScoreAccumulator | None:
        """Returns the buffer into which a forward pass may sum a step's attention weights; None if `observe` gets them.

        slots: in use after the step.
        """
        del slots
        return None

    def observe(self, scores: SequenceScores | None, new: int) -> None:
        """Called after every step of the sequence, which added `new` slots. scores: None if no query was scored."""
        del scores, new

    @abstractmethod
    def keep(self, view: KvView, count: int) -> Tensor:
        """[1 or L, 1 or Hkv, count] int64: the slots that stay, in ascending order."""
        ...

    def reindex(self, index: Tensor) -> None:
        """Called after an eviction: slot i now holds what slot index[..., i] held. index: [L, Hkv, T'] int64."""
        del index

    def kept_mass(self, index: Tensor) -> Tensor | None:
        """[] float64: the share of all scores that the slots `index` have, NaN if all are 0; None without scores.

        index: [.., T'] int64, as `keep` returns.
        """
        del index
        return None
