"""The steps before the pools are sized: what they compute, and that lack of memory for them is said in words."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from executor.batch import HostBatch
from executor.core import runner, sampler
from executor.core.rehearsal import rehearse
from executor.errors import ModelError
from executor.eviction import engine
from executor.models.cuda import MOST_SEQUENCES, MOST_TOKENS
from executor.models.files import find
from executor.models.forward import Model
from executor.models.load import load_model
from tests.unit.executor.conftest import BLOCK_SIZE, PATHS


class Noting:
    """A forward pass that notes its batches."""

    def __init__(self, forward: Any) -> None:
        self._forward = forward
        self.batches: list[HostBatch] = []

    def prepare(self, batch: HostBatch, pools: Any) -> Any:
        self.batches.append(batch)
        return self._forward.prepare(batch, pools)


class Full(Noting):
    """A forward pass on a device that has no memory for the largest step."""

    def prepare(self, batch: HostBatch, pools: Any) -> Any:
        def run() -> Any:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.\nAll of it.")

        return run if batch.num_tokens == MOST_TOKENS else super().prepare(batch, pools)


@pytest.mark.parametrize("path", PATHS)
def test_the_last_step_computes_and_samples_as_much_as_a_step_can(
    path: str, model_folder: Callable[[str], Path]
) -> None:
    model = PATHS[path](model_folder("llama, compiled"))
    noting = Noting(model.forward)
    rehearse(replace(model, forward=noting), BLOCK_SIZE, torch.float32, (), MOST_TOKENS)
    *kinds, largest = noting.batches
    assert (largest.num_tokens, largest.num_sequences) == (MOST_TOKENS, MOST_SEQUENCES)
    assert len(largest.rows) == MOST_SEQUENCES
    # Prompts and decodes, with attention scores, with their squares, and without scores; scored prompts.
    assert {(batch.num_tokens > 1, scored_by(batch)) for batch in kinds} == {
        (is_prompt, scores) for is_prompt in (True, False) for scores in ("", "sums", "squares")
    }
    assert any(batch.prompts for batch in kinds)


def scored_by(batch: HostBatch) -> str:
    [entry] = batch.scored or [None]
    return "" if entry is None else "squares" if entry.squares else "sums"


@pytest.mark.parametrize(("block_size", "positions"), [(2, 256), (1024, 256), (16, 40)])
def test_blocks_of_any_size_and_few_positions_are_no_obstacle(block_size: int, positions: int, tiny: Model) -> None:
    noting = Noting(tiny.forward)
    rehearse(replace(tiny, forward=noting, max_positions=positions), block_size, torch.float32, (), MOST_TOKENS)
    *kinds, largest = noting.batches
    assert largest.num_tokens == MOST_TOKENS
    assert max(batch.num_tokens for batch in kinds) <= positions


# By the most tokens of a step: tokens and sequences of the last steps.
SIZES = {8: [(8, 8), (2048, 256)], 2048: [(2048, 256)], 5000: [(2048, 256), (5000, 256)]}


@pytest.mark.parametrize(("most", "expected"), SIZES.items())
def test_the_largest_graph_and_the_largest_step_are_run(
    most: int, expected: list[tuple[int, int]], tiny: Model
) -> None:
    noting = Noting(tiny.forward)
    rehearse(replace(tiny, forward=noting), BLOCK_SIZE, torch.float32, (), most)
    found = [(batch.num_tokens, batch.num_sequences) for batch in noting.batches]
    assert found[-len(expected) :] == expected
    assert found.count((2048, 256)) == 1


def test_the_largest_step_has_no_sequence_that_the_model_cannot_have(tiny: Model) -> None:
    noting = Noting(tiny.forward)
    rehearse(replace(tiny, forward=noting, max_positions=12), BLOCK_SIZE, torch.float32, (), 5000)
    assert noting.batches[-1].seq_lens.tolist() == [12] * MOST_SEQUENCES


KERNELS = [(runner, "copy_blocks"), (engine, "compact_kv"), (engine, "rotate_keys"), (sampler, "draw_tokens")]


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_a_kernel_for_every_kind_of_step_is_called(
    name: str, model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    called: dict[str, set[torch.dtype]] = {}

    def noting(kernel: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **keywords: Any) -> Any:
            called.setdefault(kernel, set()).add(args[0].dtype)
            return call(*args, **keywords)

        return noted

    for module, kernel in KERNELS:
        monkeypatch.setattr(module, kernel, noting(kernel, getattr(module, kernel)))
    folder = model_folder(name)
    model = load_model(find(str(folder), folder), torch.device("cpu"), "bfloat16")
    rehearse(model, BLOCK_SIZE, torch.bfloat16, (), MOST_TOKENS)
    bf16, both = {torch.bfloat16}, {torch.bfloat16, torch.float32}
    expected = {"copy_blocks": bf16, "draw_tokens": both}
    # Models with windows evict no tokens.
    if name == "llama":
        expected |= {"compact_kv": bf16, "rotate_keys": bf16}
    assert called == expected


def test_a_device_without_memory_for_the_largest_step_is_refused(tiny: Model) -> None:
    with pytest.raises(ModelError, match=f"^there is no memory for a step of {MOST_TOKENS} tokens beside the weights "):
        rehearse(replace(tiny, forward=Full(tiny.forward)), BLOCK_SIZE, torch.float32, (), MOST_TOKENS)
