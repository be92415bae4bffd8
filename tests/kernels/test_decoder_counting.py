"""Attention that the compiled decoder counts, and its sums, against the float64 reference."""

import ctypes
from dataclasses import replace

import pytest
import torch

from kernels.cpu_decoder.launch import obstacle
from kernels.cpu_decoder.reference import step
from kernels.scores import ScoreAccumulator
from tests.kernels.decoder_cases import BARS, COUNTED, KINDS, Case, build_world, decoder_of, error_of, scores_of


@KINDS
@pytest.mark.parametrize("case", COUNTED.values(), ids=COUNTED.keys())
def test_attention_is_counted(library: ctypes.CDLL, case: Case, dtype: torch.dtype, products: bool) -> None:
    world = build_world(case, dtype)
    if reason := obstacle(library, world.weights, dtype):
        pytest.skip(reason)
    expected, sums = scores_of(case, torch.float64), scores_of(case, torch.float32)
    logits = step(world.weights, *world.arguments, [(k.double(), v.double()) for k, v in world.caches], expected)
    decoder = decoder_of(library, world, dtype, case.threads, products)
    assert error_of(decoder.step(*world.arguments, sums), logits) < BARS[dtype]
    for one, truth in zip(sums, expected, strict=True):
        assert truth.squares is not None
        assert one.squares is not None
        assert error_of(one.weights, truth.weights) < BARS[dtype]
        assert error_of(one.squares, truth.squares) < BARS[dtype]
        group = case.q_heads / case.kv_heads
        torch.testing.assert_close(one.weights.sum(2), torch.full((case.layers, case.kv_heads), group * one.rows))


@pytest.mark.parametrize("case", COUNTED.values(), ids=COUNTED.keys())
def test_counting_changes_nothing_else_and_is_the_same_every_time(library: ctypes.CDLL, case: Case) -> None:
    case = replace(case, shared=0)
    world, sums = build_world(case, torch.float32), scores_of(case, torch.float32)
    decoder = decoder_of(library, world, torch.float32, case.threads)
    uncounted = decoder.step(*world.arguments)
    assert torch.equal(decoder.step(*world.arguments, sums), uncounted)
    for _ in range(20):
        again = [replace(one, squares=None) for one in scores_of(case, torch.float32)]
        decoder.step(*world.arguments, again)
        assert all(torch.equal(one.weights, other.weights) for one, other in zip(again, sums, strict=True))


def test_counting_a_long_context_changes_no_more_than_rounding(library: ctypes.CDLL) -> None:
    """Its keys are divided among threads, unless they are counted."""
    case = Case((1, 2), (1200, 900), counted=(1, 0), threads=5)
    world, sums = build_world(case, torch.float32), scores_of(case, torch.float32)
    decoder = decoder_of(library, world, torch.float32, case.threads)
    uncounted = decoder.step(*world.arguments)
    counted = decoder.step(*world.arguments, sums)
    assert error_of(counted, uncounted.double()) < BARS[torch.float32]
    torch.testing.assert_close(sums[0].weights.sum(2), torch.full((2, 1), 3.0))


@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize(("first", "width"), [(0, 1), (3, 7), (0, 2), (1000, 7)])
@pytest.mark.parametrize("case", COUNTED.values(), ids=COUNTED.keys())
def test_what_is_counted_is_added_up_where_that_is_wanted(
    library: ctypes.CDLL, case: Case, first: int, width: int, alike: bool
) -> None:
    world, sums = build_world(case, torch.float32), scores_of(case, torch.float32)
    before = [torch.rand(case.layers, 1 if alike else case.kv_heads, one.weights.shape[2] + 5) for one in sums]
    totals = [one.clone() for one in before]
    # One of them only looks.
    wanting = [ScoreAccumulator(one, first, width) if number else None for number, one in enumerate(totals)]
    decoder = decoder_of(library, world, torch.float32, case.threads)
    decoder.step(*world.arguments, [replace(one, accumulator=to) for one, to in zip(sums, wanting, strict=True)])
    for one, total, old, to in zip(sums, totals, before, wanting, strict=True):
        expected = old.clone()
        weights = one.weights.sum(1, keepdim=True) if alike else one.weights
        for place in range(first, weights.shape[2] if to else 0):
            expected[..., place] += weights[..., place : place + width].amax(-1)
        torch.testing.assert_close(total, expected)


def test_wrong_totals_are_named(library: ctypes.CDLL) -> None:
    case = next(iter(COUNTED.values()))
    world, (one, *_) = build_world(case, torch.float32), scores_of(case, torch.float32)
    decoder = decoder_of(library, world, torch.float32, 1)
    slots = one.weights.shape[2]
    for accumulator in (
        ScoreAccumulator(torch.zeros(case.layers, 1, slots - 1)),
        ScoreAccumulator(torch.zeros(case.layers, case.kv_heads + 1, slots)),
        ScoreAccumulator(torch.zeros(case.layers + 1, 1, slots)),
        ScoreAccumulator(torch.zeros(case.layers, 1, slots, dtype=torch.float64)),
        ScoreAccumulator(torch.zeros(case.layers, 1, 2 * slots)[..., :slots]),
        ScoreAccumulator(torch.zeros(case.layers, 1, slots), first=-1),
        ScoreAccumulator(torch.zeros(case.layers, 1, slots), width=0),
    ):
        with pytest.raises(ValueError, match="accumulator"):
            decoder.step(*world.arguments, [replace(one, accumulator=accumulator)])
