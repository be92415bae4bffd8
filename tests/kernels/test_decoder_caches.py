"""The compiled decoder over caches of another type than its weights: 8 bits, and the other type of float."""

import ctypes
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.cpu_decoder.launch import Decoder, obstacle
from kernels.cpu_decoder.reference import step
from kernels.quantization import LARGEST, dequantize, quantize
from tests.kernels.decoder_cases import (
    BARS,
    CASES,
    COUNTED,
    EIGHT_BIT_BARS,
    EIGHT_BITS,
    KINDS,
    Case,
    build_world,
    decoder_of,
    error_of,
    first_alone,
    scores_of,
)

CACHES = pytest.mark.parametrize("cache", EIGHT_BITS, ids=["int8", "fp8"])
# Functions that read or write caches in special ways.
SOME = (
    "chunks and single tokens",
    "one row",
    "a prompt of several units",
    "more query heads than fit a unit",
    "9 query heads over 3",
    "head size 96",
    "blocks of two",
    "windowed and full layers",
    "one prefix and many rows",
    "one prefix, equal prompts",
    "output matrix of its own",
    "norms per head",
    "long contexts of several heads",
    "long contexts behind one prefix",
    "slots that are not positions, one prefix",
)
COUNTED_SOME = ("chunks and single tokens, all rows", "several heads", "several units", "a prefix shared beside")


def as_bytes(cache: Tensor) -> Tensor:
    return cache.view(torch.int8).int()


@CACHES
@KINDS
@pytest.mark.parametrize("name", SOME)
def test_error_stays_below_the_bar(
    library: ctypes.CDLL, name: str, dtype: torch.dtype, products: bool, cache: torch.dtype
) -> None:
    # A number that is rounded to a different one of the 256 changes more with each further layer.
    case = replace(CASES[name], layers=2)
    world = build_world(case, cache)
    if reason := obstacle(library, world.weights, dtype):
        pytest.skip(reason)
    before, expected_caches = world.copied_caches(), world.copied_caches()
    expected = step(world.weights, *world.arguments, expected_caches, scales=world.scales)
    logits = decoder_of(library, world, dtype, case.threads, products).step(*world.arguments)
    assert error_of(logits, expected) < EIGHT_BIT_BARS[dtype]
    written = torch.zeros(world.caches[0][0].shape[:2], dtype=torch.bool)
    written.view(-1)[world.arguments[4][0].slots] = True
    for pair, pair_before, pair_expected, scales in zip(
        world.caches, before, expected_caches, world.scales, strict=True
    ):
        for found, old, wanted, scale in zip(pair, pair_before, pair_expected, scales, strict=True):
            assert torch.equal(as_bytes(found)[~written], as_bytes(old)[~written]), "no other slot is written"
            stored, truth = (dequantize(one.float()[written], scale, torch.float64) for one in (found, wanted))
            # A few numbers lie nearer to a different one of the 256.
            assert error_of(stored, truth) < (1e-2 if dtype == torch.float32 else 6e-2)


@CACHES
@KINDS
@pytest.mark.parametrize("name", COUNTED_SOME)
def test_attention_is_counted(
    library: ctypes.CDLL, name: str, dtype: torch.dtype, products: bool, cache: torch.dtype
) -> None:
    case = COUNTED[name]
    world = build_world(case, cache)
    if reason := obstacle(library, world.weights, dtype):
        pytest.skip(reason)
    expected, sums = scores_of(case, torch.float64), scores_of(case, torch.float32)
    step(world.weights, *world.arguments, world.copied_caches(), expected, world.scales)
    decoder_of(library, world, dtype, case.threads, products).step(*world.arguments, sums)
    for one, truth in zip(sums, expected, strict=True):
        assert truth.squares is not None
        assert one.squares is not None
        assert error_of(one.weights, truth.weights) < EIGHT_BIT_BARS[dtype]
        assert error_of(one.squares, truth.squares) < EIGHT_BIT_BARS[dtype]


@CACHES
@pytest.mark.parametrize("size", [1e-4, 1.0, 1e4])
def test_what_is_stored_is_what_every_other_path_stores(library: ctypes.CDLL, cache: torch.dtype, size: float) -> None:
    """Bit for bit, with values that are cut off, below the smallest exponent, and between two values."""
    case = Case((70,), (70,), q_heads=4, kv_heads=4, layers=1, head_dim=128)
    plain, world = build_world(case, torch.float32), build_world(case, cache)
    # From values that are cut off to values of which nothing is left.
    parts = torch.tensor([1.0, 0.25, 0.01, 3e-4, 1.7]).repeat(4 * 128)
    world.scales = [(size * parts[: 4 * 128].view(4, 128) / 4, size * parts[3 : 3 + 4 * 128].view(4, 128))]
    for one in (plain, world):
        [layer] = one.weights.layers
        one.weights = replace(one.weights, layers=[replace(layer, qkv=layer.qkv * size)])
    plain_decoder, decoder = decoder_of(library, plain), decoder_of(library, world)
    plain_decoder.step(*plain.arguments)
    decoder.step(*world.arguments)
    slots = world.arguments[4][0].slots
    for floats, kept, scale in zip(plain.caches[0], world.caches[0], world.scales[0], strict=True):
        wanted = quantize(floats.view(-1, 4, 128)[slots], scale, cache)
        assert torch.equal(as_bytes(kept).view(-1, 4, 128)[slots], as_bytes(wanted))


def test_halves_between_two_codes_go_to_the_even_one(library: ctypes.CDLL) -> None:
    """Values that no product makes by chance: a bias alone decides the stored value."""
    case = Case((1,), (1,), q_heads=1, kv_heads=1, layers=1, head_dim=128, bias=True)
    for cache in EIGHT_BITS:
        world = build_world(case, cache)
        halves = (torch.arange(128) - 64).float() + 0.5 if cache == torch.int8 else _between_codes()
        [layer] = world.weights.layers
        bias = torch.cat([torch.zeros(256), halves]).double()
        layer = replace(layer, qkv=torch.zeros_like(layer.qkv), qkv_bias=bias)
        world.weights = replace(world.weights, layers=[layer])
        one = torch.ones(1, 128)
        world.scales = [(one, one)]
        decoder_of(library, world).step(*world.arguments)
        kept = world.caches[0][1].view(-1, 128)[world.arguments[4][0].slots[0]]
        assert torch.equal(as_bytes(kept), as_bytes(quantize(halves[None], one, cache)[0]))


def _between_codes() -> Tensor:
    codes = torch.arange(0, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (codes[:-1] + codes[1:]) / 2
    return torch.cat([middles, torch.tensor([465.0, 1e9])]) * torch.tensor([1.0, -1.0]).repeat(64)


@CACHES
def test_every_code_is_read_as_what_it_stands_for(library: ctypes.CDLL, cache: torch.dtype) -> None:
    case = Case((1, 30), (270, 60), q_heads=2, kv_heads=2)
    world = build_world(case, cache)
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[codes.view(cache).float().isfinite()]
    for pair in world.caches:
        for one in pair:
            flat = one.view(torch.uint8).view(-1)
            flat.copy_(codes[torch.randint(len(codes), flat.shape)])
    k_scale, v_scale = (torch.full([2, case.head_dim], most / LARGEST[cache][1]) for most in (1, 2))
    world.scales = [(k_scale, v_scale)] * case.layers
    expected = step(world.weights, *world.arguments, world.copied_caches(), scales=world.scales)
    assert error_of(decoder_of(library, world).step(*world.arguments), expected) < EIGHT_BIT_BARS[torch.float32]


@pytest.mark.parametrize("name", ["chunks and single tokens", "a prompt of several units", "output matrix of its own"])
@pytest.mark.parametrize(("dtype", "cache"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_caches_may_be_of_the_other_float_type(
    library: ctypes.CDLL, name: str, dtype: torch.dtype, cache: torch.dtype
) -> None:
    world = build_world(CASES[name], cache)
    expected = step(world.weights, *world.arguments, world.copied_caches(torch.float64))
    logits = decoder_of(library, world, dtype).step(*world.arguments)
    assert error_of(logits, expected) < BARS[torch.bfloat16]


@CACHES
@KINDS
def test_a_row_depends_on_nothing_beside_it_where_that_is_asked_for(
    library: ctypes.CDLL, dtype: torch.dtype, products: bool, cache: torch.dtype
) -> None:
    case = Case((1, 1, 30), (90, 81, 100), shared=5)
    whole = build_world(case, cache)
    decoder = decoder_of(library, whole, dtype, 2, products)
    decoder.invariant = True
    together = decoder.step(*whole.arguments)
    assert torch.equal(first_alone(decoder, whole), together[0])


def test_wrong_scales_are_named(library: ctypes.CDLL) -> None:
    world = build_world(Case(), torch.int8)
    decoder = Decoder(library, world.weights, torch.float32, 1)
    for words, caches, scales in (
        ("k_scale: expected scales", world.caches, []),
        (r"v_scale: expected \[Hkv, D\]", world.caches, [(k, v[:0]) for k, v in world.scales]),
        ("k_scale: only int8 and float8_e4m3fn", build_world(Case(), torch.float32).caches, world.scales),
        (r"k_cache.*float16", build_world(Case(), torch.float16).caches, []),
    ):
        with pytest.raises(ValueError, match=words):
            decoder.bind(caches, scales)
