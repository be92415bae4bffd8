"""What pooled_add means, entry by entry."""

from torch import Tensor


def pooled_add(weights: Tensor, sums: Tensor, first: int, width: int) -> None:
    """sums [L, S] += the largest of each `width` neighbours, this one first, of weights [L, H, T] summed over heads.

    Entries before `first` are neither looked at nor added to.
    """
    for layer, heads in enumerate(weights.sum(1)):
        tracked = heads[first:].tolist()
        for place in range(len(tracked)):
            sums[layer, first + place] += max(tracked[place : place + width])
