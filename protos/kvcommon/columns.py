"""Messages in columns, in which entries of different lengths follow each other."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


def cut(values: Sequence[T], counts: Iterable[int]) -> Iterator[Sequence[T]]:
    """Yields the values of each entry in turn; the counts give the numbers of values."""
    start = 0
    for count in counts:
        yield values[start : start + count]
        start += count
