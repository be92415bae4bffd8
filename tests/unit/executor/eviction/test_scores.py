"""Sums that grow with a sequence and follow its evictions."""

import torch

from executor.eviction.base import KvShape
from executor.eviction.scoring import SlotScores
from tests.unit.executor.eviction.driving import CPU


def test_sums_stay_while_a_sequence_grows() -> None:
    sums, expected = SlotScores(KvShape(2, 3, CPU), 3), torch.zeros(2, 3, 1000)
    for slots in (1, 63, 64, 65, 200, 1000):
        step = torch.rand(2, 3, slots)
        sums.add(step)
        expected[..., :slots] += step
    assert torch.allclose(sums.values(1000), expected)


def test_slots_behind_those_that_stayed_begin_anew() -> None:
    sums = SlotScores(KvShape(1, 1, CPU), 1)
    sums.add(torch.tensor([[[1.0, 2.0, 3.0, 4.0]]]))
    sums.reindex(torch.tensor([[[0, 3]]]))
    sums.add(torch.tensor([[[0.5, 0.5, 0.5]]]))
    assert sums.values(5).tolist() == [[[1.5, 4.5, 0.5, 0.0, 0.0]]]


def test_shares_are_of_everything_that_was_gathered() -> None:
    sums = SlotScores(KvShape(2, 1, CPU), 1)
    assert sums.share(torch.tensor([[[0]]])).isnan()
    sums.add(torch.tensor([[[1.0, 2.0, 1.0]], [[0.0, 3.0, 1.0]]]))
    assert sums.share(torch.tensor([[[0, 1]]])) == 0.75
    assert sums.share(torch.tensor([[[0, 1]], [[0, 2]]])) == 0.5
