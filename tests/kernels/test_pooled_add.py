"""Pooled sums of attention: torch and compiled code against the definition."""

from collections.abc import Callable

import pytest
import torch

from kernels.decoder import build
from kernels.pooled_add import reference
from kernels.pooled_add.launch import add_compiled, add_with_torch, pooled_add
from tests.stack import model_cache

# Layers, heads, slots, first, width.
SHAPES = [(1, 1, 1, 0, 7), (3, 3, 150, 32, 7), (2, 1, 40, 39, 7), (2, 2, 33, 0, 1), (4, 3, 99, 5, 2), (1, 2, 20, 3, 40)]


def compiled(*arguments: object) -> None:
    add_compiled(build.load(model_cache() / "compiled"), *arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("add", [add_with_torch, compiled, pooled_add])
@pytest.mark.parametrize(("layers", "heads", "slots", "first", "width"), SHAPES)
def test_sums_are_those_of_the_definition(
    add: Callable[..., None], layers: int, heads: int, slots: int, first: int, width: int
) -> None:
    generator = torch.Generator().manual_seed(slots)
    # A part of a larger one, as forwards return it; and longer sums than there are slots.
    weights = torch.rand(layers, heads, slots + 9, generator=generator)[..., :slots]
    sums = torch.rand(layers, slots + 5, generator=generator)
    expected = sums.clone()
    reference.pooled_add(weights, expected, first, width)
    add(weights, sums, first, width)
    torch.testing.assert_close(sums, expected, rtol=1e-6, atol=1e-6)
    assert not first or torch.equal(sums[:, :first], expected[:, :first])


def test_nothing_behind_the_first_is_nothing_to_add() -> None:
    sums = torch.rand(2, 8)
    before = sums.clone()
    pooled_add(torch.rand(2, 3, 8), sums, 8, 7)
    assert torch.equal(sums, before)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"weights": torch.rand(2, 8)}, "weights"),
        ({"weights": torch.rand(2, 3, 8, dtype=torch.float64)}, "weights"),
        ({"sums": torch.rand(1, 8)}, "sums"),
        ({"sums": torch.rand(2, 7)}, "sums"),
        ({"sums": torch.rand(2, 8, dtype=torch.float64)}, "sums"),
        ({"first": -1}, "first"),
        ({"width": 0}, "width"),
    ],
)
def test_wrong_arguments_are_named(changes: dict[str, object], name: str) -> None:
    arguments = {"weights": torch.rand(2, 3, 8), "sums": torch.rand(2, 8), "first": 0, "width": 7} | changes
    with pytest.raises(ValueError, match=name):
        pooled_add(**arguments)  # type: ignore[arg-type]
