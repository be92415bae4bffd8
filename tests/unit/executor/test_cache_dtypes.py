"""Caches of another type than the weights, on every path of a model: scales, accuracy, token eviction, names."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from executor.batch import SequenceState, build_batch
from executor.cache.pool import KvPools, Scales, block_bytes
from executor.errors import ModelError
from executor.eviction.engine import TokenEviction
from executor.models import calibration
from executor.models.calibration import calibrate
from executor.models.files import find
from executor.models.fingerprint import fingerprint
from executor.models.forward import Model
from executor.models.load import CACHE_DTYPES, choose_cache_dtype, load_model
from executor.models.probe import deviation
from executor.models.tokenizer import TokenizerFiles
from executor.step import NewSequence
from kernels.quantization import LARGEST
from tests.kernels.decoder_cases import compiled_decoder
from tests.stack import model_cache
from tests.unit.executor.conftest import PATHS, Driver, load, on_torch
from tests.unit.executor.evicting_sequences import OUTPUT, PROMPT, VARIANTS, EvictingSequence, policy_of, run
from tests.unit.executor.tiny_models import VOCAB

CPU = torch.device("cpu")
EIGHT_BITS = pytest.mark.parametrize("cache", LARGEST, ids=["int8", "fp8"])
# Of the logits of tiny models, whose random weights make much of small differences.
BARS = {torch.int8: 0.1, torch.float8_e4m3fn: 0.25, torch.bfloat16: 0.03}
TOKENS = torch.randint(VOCAB, (61,), generator=torch.Generator().manual_seed(4)).tolist()


@pytest.fixture(scope="module", params=PATHS)
def model(request: pytest.FixtureRequest, model_folder: Callable[[str], Path]) -> Model:
    return PATHS[request.param](model_folder("llama, compiled"))


def pools_of(model: Model, dtype: torch.dtype, blocks: int = 20, block_size: int = 4) -> KvPools:
    return KvPools(model.groups, blocks, block_size, dtype, CPU, calibrate(model, TokenizerFiles(), dtype))


def logits_of(model: Model, pools: KvPools, tokens: Sequence[int] = TOKENS, chunk: int = 7) -> Tensor:
    """Of the last token, computed in chunks and then one by one."""
    table = tuple(range(1, -(-len(tokens) // pools.block_size) + 1))
    sequence = SequenceState.of(NewSequence(0, tuple(tokens), len(tokens), 0, (table,) * len(pools.pools)), 0)
    logits = torch.empty(0)
    while left := len(tokens) - sequence.computed:
        count = chunk if left > 2 * chunk else 1
        last_tokens = torch.zeros(1, dtype=torch.int64)
        with torch.inference_mode():
            batch = build_batch([sequence], [count], last_tokens, pools.block_size, len(pools.pools))
            logits = model.forward.prepare(batch, pools)().logits
        sequence.computed += count
        sequence.kept += count
    return logits.float().clone()


@pytest.mark.parametrize("cache", BARS, ids=str)
def test_every_path_loses_no_more_than_the_cache_does(model: Model, cache: torch.dtype) -> None:
    expected = logits_of(model, pools_of(model, torch.float32))
    found = logits_of(model, pools_of(model, cache))
    assert 1e-6 < deviation(found, expected) < BARS[cache]


def test_torch_keeps_float16_beside_float32(model_folder: Callable[[str], Path]) -> None:
    model = on_torch(model_folder("llama"))
    expected = logits_of(model, pools_of(model, torch.float32))
    assert 1e-6 < deviation(logits_of(model, pools_of(model, torch.float16)), expected) < 0.01


@EIGHT_BITS
def test_all_paths_read_what_any_of_them_stored(model_folder: Callable[[str], Path], cache: torch.dtype) -> None:
    """The last chunk is another path's, so that both must mean the same by the bytes."""
    models = [path(model_folder("llama, compiled")) for path in PATHS.values()]
    scales = calibrate(models[0], TokenizerFiles(), cache)
    expected = None
    for writer in models:
        pools = KvPools(writer.groups, 20, 4, cache, CPU, scales)
        logits_of(writer, pools, TOKENS[:56])
        for reader in models:
            table = (tuple(range(1, 17)),)
            sequence = SequenceState.of(NewSequence(0, tuple(TOKENS), len(TOKENS), 56, table), 0)
            batch = build_batch([sequence], [5], torch.zeros(1, dtype=torch.int64), 4, 1)
            with torch.inference_mode():
                logits = reader.forward.prepare(batch, pools)().logits.float().clone()
            expected = logits if expected is None else expected
            assert deviation(logits, expected) < 0.02


@EIGHT_BITS
@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "mistral", "phi3"])
def test_soft_caps_sinks_and_windows_work_with_8_bits(
    model_folder: Callable[[str], Path], name: str, cache: torch.dtype
) -> None:
    model = on_torch(model_folder(name))
    expected = logits_of(model, pools_of(model, torch.float32))
    assert 1e-6 < deviation(logits_of(model, pools_of(model, cache)), expected) < 2 * BARS[cache]


@pytest.mark.parametrize(
    ("cache", "name"),
    [
        *((torch.int8, name) for name in VARIANTS),
        *((torch.float8_e4m3fn, name) for name in ("sliding_window", "tova", "keydiff", "compacted heads")),
    ],
    ids=str,
)
def test_token_eviction_works_with_8_bits(model: Model, cache: torch.dtype, name: str) -> None:
    chosen = policy_of(model, VARIANTS[name])
    (stayed, evicted), (moved, expected) = (
        run(model, {1: PROMPT}, {1: chosen}, cache=cache, stays=one) for one in (True, False)
    )
    assert sum(one.tokens for one in evicted) > 0
    if chosen.bounds is None:
        # The attention decides how long a window that adapts is, and in other slots sums round differently.
        assert [one.tokens for one in evicted] == [one.tokens for one in expected]
    assert len(stayed[1]) == len(moved[1]) == OUTPUT


@EIGHT_BITS
@pytest.mark.parametrize("name", ["sliding_window", "window in periods", "compacted window", "last", "random"])
def test_policies_that_look_at_no_numbers_keep_the_same_tokens_in_8_bits(
    model: Model, name: str, cache: torch.dtype
) -> None:
    kept = {}
    for dtype in (torch.float32, cache):
        driver, client = (
            Driver(model, num_blocks=400, cache=dtype),
            EvictingSequence(1, policy_of(model, VARIANTS[name])),
        )
        kept[dtype] = []
        while client.computed < len(PROMPT) + OUTPUT:
            client.step(driver)
            [sequence] = driver.runner._sequences
            kept[dtype].append(driver.runner._eviction.positions(sequence).tolist())
    assert client.evicted > 0
    assert kept[cache] == kept[torch.float32]


@EIGHT_BITS
def test_policies_see_keys_and_not_their_bytes(model_folder: Callable[[str], Path], cache: torch.dtype) -> None:
    model = load(model_folder("llama, compiled"))
    keys = []
    for dtype in (torch.float32, cache):
        pools = pools_of(model, dtype)
        logits_of(model, pools)
        table = (tuple(range(1, 17)),)
        sequence = SequenceState.of(NewSequence(0, tuple(TOKENS), len(TOKENS), len(TOKENS), table), 0)
        keys.append(TokenEviction(pools, model.rotary, CPU)._keys(sequence))
    assert keys[0].shape == keys[1].shape
    assert deviation(keys[1], keys[0]) < BARS[cache]


@EIGHT_BITS
def test_scales_hold_what_the_text_makes_and_leave_rotated_pairs_alike(
    model_folder: Callable[[str], Path], cache: torch.dtype
) -> None:
    model = load(model_folder("llama, compiled"))
    [scales], [again] = (calibrate(model, TokenizerFiles(), cache) for _ in range(2))
    assert torch.equal(scales.k, again.k)
    assert torch.equal(scales.v, again.v)
    half = scales.k.shape[-1] // 2
    assert torch.equal(scales.k[..., :half], scales.k[..., half:])
    assert scales.v.unique().numel() <= scales.v.shape[0] * scales.v.shape[1], "one for each head"
    powers = torch.cat([scales.k.flatten(), scales.v.flatten()]).double().log2() / calibration.GRID
    assert torch.allclose(powers, powers.round(), atol=1e-5)
    pools = pools_of(model, torch.float32, blocks=64)
    logits_of(model, pools, [number * VOCAB // 256 for number in range(256)], chunk=256)
    for floats, scale in ((pools.pools[0].k, scales.k), (pools.pools[0].v, scales.v)):
        most = floats[:, 1:].flatten(1, 2).abs().amax(1) / scale
        assert float(most.max()) <= LARGEST[cache][1]
        assert float(most.amax((1, 2)).min()) > LARGEST[cache][1] / 4


def test_other_types_have_no_scales(tiny: Model) -> None:
    assert all(not calibrate(tiny, TokenizerFiles(), dtype) for dtype in (torch.float32, torch.bfloat16))


def test_keys_that_are_no_numbers_cannot_be_scaled(tiny: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = replace(tiny, forward=Broken())
    with pytest.raises(ModelError, match="no numbers"):
        calibrate(broken, TokenizerFiles(), torch.int8)


class Broken:
    """Leaves infinity in the cache."""

    def warmup(self, pools: KvPools, last_tokens: Tensor) -> None: ...

    def prepare(self, batch: object, pools: KvPools) -> Callable[[], object]:
        return lambda: pools.pools[0].k.fill_(torch.inf)


def test_types_and_scales_are_part_of_the_fingerprint(tiny: Model, model_folder: Callable[[str], Path]) -> None:
    folder = model_folder("llama")
    files = find(str(folder), folder)
    made = [pools_of(tiny, dtype) for dtype in (torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn)]
    [scales] = calibrate(tiny, TokenizerFiles(), torch.int8)
    others = Scales(scales.k * 2, scales.v), Scales(scales.k, scales.v * 2)
    made += [KvPools(tiny.groups, 20, 4, torch.int8, CPU, [other]) for other in others]
    prints = [fingerprint(tiny, files, pools) for pools in made]
    assert len(set(prints)) == len(prints)
    assert fingerprint(tiny, files, pools_of(tiny, torch.int8, blocks=30)) == prints[2], "but not how many blocks"


def test_blocks_of_8_bits_take_half_of_bfloat16(tiny: Model) -> None:
    sizes = {dtype: block_bytes(tiny.groups, 16, dtype) for dtype in CACHE_DTYPES.values()}
    assert 2 * sizes[torch.int8][0] == 2 * sizes[torch.float8_e4m3fn][0] == sizes[torch.bfloat16][0]
    assert pools_of(tiny, torch.int8, block_size=16).pools[0].block_bytes == sizes[torch.int8][0]


def test_the_type_of_a_setting(tiny: Model) -> None:
    assert choose_cache_dtype("auto", tiny) == tiny.dtype
    assert choose_cache_dtype("fp8", tiny) == torch.float8_e4m3fn


def test_a_type_that_a_model_cannot_use_is_named(
    model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled_decoder(model_cache() / "compiled")
    folder = model_folder("llama, compiled")
    with pytest.raises(ModelError, match=r"KVKEEP_EXECUTOR_KV_CACHE_DTYPE: compiled code .* float16; take bfloat16"):
        choose_cache_dtype("float16", load(folder))
    old = replace(load_model(find(str(folder), folder), CPU, "float32"), device=torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 6))
    with pytest.raises(ModelError, match=r"KVKEEP_EXECUTOR_KV_CACHE_DTYPE: .* 8\.6 .* int8 works"):
        choose_cache_dtype("fp8", old)
    assert choose_cache_dtype("int8", old) == torch.int8
