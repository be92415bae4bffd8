"""Tests of products are thinned out, and no pair of values is lost."""

from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace

from tests.support.pairwise import pairs_of, thinned


@dataclass(frozen=True)
class Item:
    """A test with the numbers of its parameters' values."""

    values: tuple[int, ...]

    @property
    def callspec(self) -> SimpleNamespace:
        return SimpleNamespace(indices={f"p{place}": value for place, value in enumerate(self.values)})


def items(*sizes: int) -> list[Item]:
    return [Item(values) for values in product(*map(range, sizes))]


def covered(tests: list[Item]) -> set[object]:
    return {pair for test in tests for pair in pairs_of(test.callspec.indices)}


def test_every_pair_of_values_is_left_in_fewer_tests() -> None:
    whole = items(4, 3, 2, 2)
    some = thinned(whole)
    assert covered(some) == covered(whole)
    assert 12 <= len(some) <= 16 < len(whole)


def test_a_product_of_two_stays_whole() -> None:
    assert thinned(items(3, 4)) == items(3, 4)


def test_pairs_that_no_test_has_are_not_wanted() -> None:
    whole = [item for item in items(3, 3, 2) if item.values[0] != item.values[1]]
    assert covered(thinned(whole)) == covered(whole)


def test_the_same_tests_are_chosen_every_time() -> None:
    assert thinned(items(5, 3, 2)) == thinned(items(5, 3, 2))
