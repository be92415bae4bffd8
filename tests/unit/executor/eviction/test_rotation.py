"""Keys that turn to the positions that their tokens have among the kept ones."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from executor.eviction.engine import rotation_deltas
from executor.models.forward import Model
from tests.support.rotary import frequencies


@given(st.lists(st.integers(0, 500), unique=True, max_size=60))
def test_positions_are_counted_in_the_order_of_the_tokens(angles: list[int]) -> None:
    after, places = rotation_deltas(torch.tensor(angles, dtype=torch.int64))
    assert after.tolist() == [sorted(angles).index(angle) for angle in angles]
    assert (after + places).tolist() == angles


def test_layers_and_heads_turn_by_themselves() -> None:
    after, places = rotation_deltas(torch.tensor([[[0, 3, 5], [4, 1, 2]]]))
    assert after.tolist() == [[[0, 1, 2], [2, 0, 1]]]
    assert places.tolist() == [[[0, 2, 3], [2, 1, 1]]]


def test_frequencies_are_those_of_the_model(tiny: Model) -> None:
    torch.testing.assert_close(tiny.rotary, frequencies(8, 1e4))
    assert frequencies(4, 100.0).tolist() == pytest.approx([1.0, 0.1])
    assert frequencies(64, 1e5).dtype == torch.float32
