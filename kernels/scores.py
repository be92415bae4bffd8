"""Attention scores of one sequence: the softmax weights that its slots got in a step, and where these are summed."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class ScoreAccumulator:
    """Where weights are summed: [L, 1 or Hkv, S] float32 contiguous, S at least the sequence's slots after the step.

    A step adds to each slot from `first` on the maximum weight of this slot and the `width` - 1 slots after it. Earlier
    slots do not change. With one row per layer, the weights are summed over KV heads before the maximum.
    """

    sums: Tensor
    first: int = 0
    width: int = 1


@dataclass(frozen=True)
class SequenceScores:
    """The softmax weights of a sequence's last `rows` queries of a step, over all T slots in use after the step.

    weights: [L, Hkv, T] float32, summed over these queries and over the query heads of a KV head. squares: the
    sums of the squared weights, like `weights`; None if no policy needs them. sequence: its index in the batch.
    accumulator: where the forward pass sums the weights itself; None if it does not.
    """

    weights: Tensor
    squares: Tensor | None
    rows: int
    sequence: int = 0
    accumulator: ScoreAccumulator | None = None
