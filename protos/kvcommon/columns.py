"""Messages in columns: entries of different lengths lie one behind the other in one of them."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


def cut(values: Sequence[T], counts: Iterable[int]) -> Iterator[Sequence[T]]:
    """The values of each entry in turn, as many as its count says."""
    start = 0
    for count in counts:
        yield values[start : start + count]
        start += count
