"""Tests of a product of three or more parameters: CI runs a selection that has every pair of two values.

A fault of a kernel usually needs one value, or a pair of values: a dtype on a backend, a shape in a layout.
`make nightly` and `make test-all` run the whole products. Tests that need a device always run if there is one.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

import pytest

# Beginnings of node ids of tests that are thinned out.
FOLDERS = ("tests/kernels/", "tests/unit/executor/test_token_eviction.py", "tests/unit/executor/test_exactness.py")
# Two parameters, each with its name and a value's identity, as not all values can be compared.
Pair = tuple[tuple[str, int], tuple[str, int]]


class Pairwise:
    """Plug-in that deselects the other tests. folders: beginnings of node ids of tests that are thinned out."""

    def __init__(self, folders: tuple[str, ...] = FOLDERS) -> None:
        self._folders = folders

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        products: dict[str, list[pytest.Function]] = defaultdict(list)
        for item in items:
            if isinstance(item, pytest.Function) and item.nodeid.startswith(self._folders) and is_product(item):
                products[item.nodeid.partition("[")[0]].append(item)
        left_out = {item for product in products.values() for item in set(product) - set(thinned(product))}
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


def is_product(item: pytest.Function) -> bool:
    """Whether a test is one of a product, and runs here."""
    values = getattr(item, "callspec", None)
    return values is not None and len(values.params) > 2 and "cuda" not in map(str, values.params.values())


def thinned(product: Sequence[Any]) -> list[Any]:
    """Some tests of a product, always the same: every pair of values of any test is in one of them."""
    pairs = {item: set(pairs_of(item.callspec.params)) for item in product}
    missing = set[Pair]().union(*pairs.values())
    chosen = []
    while missing:
        best = max(product, key=lambda item: len(pairs[item] & missing))
        chosen.append(best)
        missing -= pairs[best]
    return chosen


def pairs_of(params: Mapping[str, object]) -> Iterator[Pair]:
    """All pairs of values of one test."""
    return combinations(sorted((name, id(value)) for name, value in params.items()), 2)
