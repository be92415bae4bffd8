"""Batch-invariant computation: log-probabilities are bitwise equal however a prompt came to its tokens."""

from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch

from executor.cache.pool import KvPools
from executor.core.runner import Runner
from executor.models.calibration import calibrate
from executor.models.cpu import CpuModel
from executor.models.files import find
from executor.models.forward import Model
from executor.models.load import choose_cache_dtype, load_model
from executor.models.tokenizer import TokenizerFiles
from executor.step import Logprobs, NewSequence, Sampling, Step
from tests.kernels.decoder_cases import compiled_decoder
from tests.stack import model_cache
from tests.unit.executor.tiny_models import COMPILED_CONFIGS, VOCAB

FOLDER = model_cache() / "compiled"
BLOCK, OUTPUT = 4, 12
# Long enough that prefixes are shared and contexts divided where that may be.
SHARED = torch.randint(VOCAB, (96,), generator=torch.Generator().manual_seed(5)).tolist()
PROMPTS = [SHARED + [7 + number] * (1 + 3 * number) for number in range(6)]
SAMPLING = Sampling(num_logprobs=1)
Output = list[tuple[int, Logprobs | None]]


@pytest.fixture(scope="session", autouse=True)
def _compiler() -> None:
    compiled_decoder(FOLDER)


class Engine:
    """Runs prompts over one pool, in blocks that it hands out."""

    def __init__(self, model: Model, cache: str = "auto") -> None:
        dtype = choose_cache_dtype(cache, model)
        scales = calibrate(model, TokenizerFiles(), dtype)
        self._runner = Runner(model, KvPools(model.groups, 400, BLOCK, dtype, torch.device("cpu"), scales))
        self._free = list(range(1, 401))
        self._groups = len(model.groups)

    def _joining(self, handle: int, prompt: list[int], cached: tuple[int, ...] = ()) -> NewSequence:
        count = -(-(len(prompt) + OUTPUT) // BLOCK) - len(cached)
        table, self._free = cached + tuple(self._free[:count]), self._free[count:]
        return NewSequence(handle, tuple(prompt), len(prompt), len(cached) * BLOCK, (table,) * self._groups, SAMPLING)

    def run(self, prompts: list[list[int]], chunk: int = 1000, cached: tuple[int, ...] = ()) -> list[Output]:
        """All together, the first blocks of each being these."""
        joining = tuple(self._joining(handle, prompt, cached) for handle, prompt in enumerate(prompts))
        left = {handle: len(prompt) - len(cached) * BLOCK for handle, prompt in enumerate(prompts)}
        self.table = joining[0].tables[0]
        outputs: list[Output] = [[] for _ in prompts]
        while any(len(output) < OUTPUT for output in outputs):
            chunks = {handle: min(chunk, count) for handle, count in left.items() if count > 0}
            idle = frozenset(i for i, output in enumerate(outputs) if len(output) == OUTPUT)
            step = Step(self._runner.last_step + 1, new_sequences=joining, chunks=chunks, idle=idle)
            for sampled in self._runner.launch(self._runner.prepare(step)).result().sampled:
                outputs[sampled.sequence].append((sampled.token_id, sampled.logprobs))
            joining = ()
            left = {handle: count - chunk for handle, count in left.items()}
        removal = Step(self._runner.last_step + 1, removed=tuple(range(len(prompts))))
        self._runner.launch(self._runner.prepare(removal)).result()
        return outputs


def load(folder: Path, dtype: str, threads: int) -> Model:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        model = load_model(find(str(folder), folder), torch.device("cpu"), dtype, compiled_folder=FOLDER)
    finally:
        torch.set_num_threads(before)
    assert isinstance(model.forward, CpuModel)
    model.forward.decoder.invariant = True
    return model


@pytest.mark.parametrize(
    ("name", "dtype", "cache"),
    [
        *product(sorted(COMPILED_CONFIGS), ["float32", "bfloat16"], ["auto"]),
        # A chunk sees its own keys as the cache has them: else they would depend on where chunks begin.
        *product(["llama, compiled", "qwen2, compiled"], ["float32", "bfloat16"], ["int8", "fp8"]),
    ],
)
def test_what_a_row_is_depends_on_nothing_beside_it(
    name: str, dtype: str, cache: str, model_folder: Callable[[str], Path]
) -> None:
    folder = model_folder(name)
    alone = load(folder, dtype, 1)
    expected = [Engine(alone, cache).run([prompt])[0] for prompt in PROMPTS]
    model = load(folder, dtype, 3)
    assert Engine(model, cache).run(PROMPTS) == expected
    assert Engine(model, cache).run(PROMPTS, chunk=5) == expected
    engine = Engine(model, cache)
    assert engine.run(PROMPTS[:1]) == expected[:1]
    # All sequences share the blocks that the first one computed.
    assert engine.run(PROMPTS, cached=engine.table[: len(SHARED) // BLOCK]) == expected
