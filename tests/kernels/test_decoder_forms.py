"""Which matrices the compiled decoder keeps plain: those that are faster this way on the machine at hand."""

import ctypes
from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest
import torch

from kernels.cpu_decoder import forms
from kernels.cpu_decoder.forms import faster_plain
from kernels.cpu_decoder.launch import MATRICES, PHASES, Decoder
from tests.kernels.decoder_cases import COMPUTED, Case, World, build_world, changed, quantized, stored

# Nine million weights in layers, as many as are timed at least.
LARGE = Case(hidden=512, intermediate=2048, q_heads=8, kv_heads=8, layers=2, vocabulary=300)


def published(world: World, way: str = "") -> World:
    """With the weights of a model in bfloat16, or of one that was quantized."""
    return changed(
        world, lambda matrix: quantized(matrix, way).to(matrix.dtype) if way else matrix.bfloat16().to(matrix.dtype)
    )


@pytest.mark.parametrize("way", ["", "Q4_1"])
@pytest.mark.parametrize(("dtype", "products"), COMPUTED.values(), ids=COMPUTED.keys())
def test_logits_are_the_same_however_weights_are_kept(
    library: ctypes.CDLL, dtype: torch.dtype, products: bool, way: str
) -> None:
    world = published(build_world(Case((1, 5, 1, 20), (40, 5, 33, 70), hidden=192, intermediate=480), dtype), way)
    found, sizes = [], []
    for plain in ((), ("down",), ("gate_up", "head"), tuple(MATRICES)):
        decoder = Decoder(library, world.weights, dtype, 2, products=products, plain=plain)
        caches = [(k.clone(), v.clone()) for k, v in world.caches]
        decoder.bind(caches)
        found.append(decoder.step(*world.arguments))
        sizes.append(decoder.weight_bytes)
    assert all(torch.equal(logits, found[0]) for logits in found)
    assert sizes[0] < sizes[1] < sizes[2] < sizes[3] or not (way or library.decoder_can_squeeze())


class Times:
    """Seconds that phases are said to take: of one row and of a batch, in the small form and plain."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *rounds: Mapping[str, tuple[float, float, float, float]]
    ) -> None:
        self._all = self._said(rounds)
        monkeypatch.setattr(forms._Timed, "step", lambda _: next(self._all))

    def _said(self, rounds: tuple[Mapping[str, tuple[float, float, float, float]], ...]) -> Iterator[dict[str, float]]:
        for number in range(forms._ROUNDS):
            said = rounds[min(number, len(rounds) - 1)]
            for at in range(4):
                yield dict.fromkeys(PHASES, 1.0) | {MATRICES[name]: times[at] for name, times in said.items()}


@pytest.fixture(scope="module")
def large() -> World:
    return published(build_world(LARGE, torch.bfloat16), "Q4_1")


def test_a_matrix_is_plain_where_that_is_clearly_faster(
    library: ctypes.CDLL, large: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = {
        "qkv": (1.0, 0.8, 1.0, 0.8),
        # Slower with one row, and faster by more in a batch.
        "out": (1.0, 1.1, 1.0, 0.5),
        "gate_up": (1.0, 1.1, 1.0, 0.9),
        "down": (1.0, 0.97, 1.0, 0.97),
        # A phase that was not seen.
        "head": (0.0, 0.5, 1.0, 0.5),
    }
    Times(monkeypatch, said)
    assert faster_plain(library, large.weights, torch.bfloat16, 2) == {"qkv", "out"}


def test_one_round_that_says_otherwise_leaves_a_matrix_small(
    library: ctypes.CDLL, large: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    faster = dict.fromkeys(MATRICES, (1.0, 0.5, 1.0, 0.5))
    Times(monkeypatch, faster, faster | {"down": (1.0, 1.2, 1.0, 1.0)}, faster)
    assert faster_plain(library, large.weights, torch.bfloat16, 2) == set(MATRICES) - {"down"}


def test_real_steps_are_timed(library: ctypes.CDLL, large: World) -> None:
    assert faster_plain(library, large.weights, torch.float32, 2) <= set(MATRICES)


def test_nothing_is_timed_without_a_choice(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a small model, of a file's codes, and of weights that take as many bytes in any form."""
    monkeypatch.setattr(forms._Timed, "step", lambda _: pytest.fail("a step was timed"))
    small = published(build_world(Case(), torch.float32))
    assert faster_plain(library, small.weights, torch.float32, 1) == set()
    monkeypatch.setattr(forms, "_FEW_WEIGHTS", 0)
    layers = [replace(one, gate_up=stored(one.gate_up, "Q4_0")) for one in small.weights.layers]
    assert faster_plain(library, replace(small.weights, layers=layers), torch.float32, 1) == set()
    world = build_world(Case(), torch.float32)
    scattered = changed(world, lambda matrix: matrix * 2.0 ** torch.randint(-90, 9, matrix.shape))
    assert faster_plain(library, scattered.weights, torch.float32, 1) == set()
