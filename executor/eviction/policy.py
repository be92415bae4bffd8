"""What a policy of token eviction is to the executor: it watches attention and says which tokens stay."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kernels.cpu_decoder.launch import Totals
from protos.kvcommon.eviction import Kind, Policy


@dataclass(frozen=True)
class Space:
    """Where a sequence's state lives: one row per layer and KV head."""

    layers: int
    kv_heads: int
    device: torch.device


@dataclass(frozen=True)
class Attention:
    """What one step's attention told of a sequence, over all slots that it uses, the step's own tokens included.

    weights: [L, Hkv, T] float32, softmax weights summed over the counted queries and over the query heads of a KV head;
    squares: the same of their squares, only for who asks. rows: counted queries, the last ones of the step.
    added: whether the weights were added to the totals that the policy named.
    """

    weights: Tensor
    squares: Tensor | None
    rows: int
    added: bool = False


@dataclass(frozen=True)
class Contents:
    """What a sequence's slots hold. positions: [L, Hkv, T] int64, each slot's token by its place in the whole sequence.

    computed: tokens computed so far, those evicted included; the newest has the position computed - 1.
    keys: reads the keys, [L, Hkv, T, D] of the cache's dtype, rotated as they are.
    """

    positions: Tensor
    computed: int
    keys: Callable[[], Tensor]


def counted_rows(policy: Policy, prompt: int, computed: int, new: int) -> int:
    """Of the `new` queries behind `computed` ones, how many last ones a policy looks at; 0 for those without scores.

    prompt: tokens of the request's prompt.
    """
    if not policy.uses_scores or (policy.kind is Kind.SNAPKV and computed >= prompt):
        return 0
    # It knows a chunk's last query only, and may evict behind every chunk.
    if policy.kind is Kind.TOVA and policy.during_prefill:
        return min(new, 1)
    return min(new, max(0, computed + new - prompt + policy.counted_rows(prompt)))


class Evictor(ABC):
    """One sequence's policy. Slots are numbered 0 to T - 1, new tokens come at the end.

    `ordered`: whether slots stand in the order of their tokens in every layer and head. Where they need not, those that
    stay do not move, and the last ones fill the gaps.
    """

    ordered: ClassVar[bool] = False
    # Whether Attention.squares is wanted.
    uses_squares: ClassVar[bool] = False

    def __init__(self, policy: Policy, space: Space) -> None:
        self.policy = policy
        self.space = space

    def totals(self, slots: int) -> Totals | None:
        """Where a forward may add a step's weights itself, sparing `observe` that; slots: in use after the step."""
        del slots
        return None

    def observe(self, attention: Attention | None, new: int) -> None:
        """After every step of the sequence: `new` of its slots are new; attention is None where nothing was counted."""
        del attention, new

    @abstractmethod
    def keep(self, contents: Contents, count: int) -> Tensor:
        """[1 or L, 1 or Hkv, count] int64: the slots that stay, in ascending order."""
        ...

    def follow(self, index: Tensor) -> None:
        """After an eviction: slot i now holds what slot index[..., i] held; [L, Hkv, T'] int64."""
        del index

    def mass(self, index: Tensor) -> float | None:
        """Share of the scores that these slots have, [.., T'] as `keep` returns them; None without scores."""
        del index
        return None
