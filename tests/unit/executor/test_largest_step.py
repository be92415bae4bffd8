"""The largest step: what it computes, and that a device without memory for it is refused in words."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from executor.batch import HostBatch
from executor.core.largest_step import run_largest_step
from executor.errors import ModelError
from executor.models.cuda import MOST_SEQUENCES, MOST_TOKENS
from executor.models.forward import Model
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
    """A forward pass on a device without free memory."""

    def prepare(self, batch: HostBatch, pools: Any) -> Any:
        def run() -> Any:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.\nAll of it.")

        return run


@pytest.mark.parametrize("path", PATHS)
def test_the_largest_step_computes_and_samples_as_much_as_a_step_can(
    path: str, model_folder: Callable[[str], Path]
) -> None:
    model = PATHS[path](model_folder("llama, compiled"))
    noting = Noting(model.forward)
    run_largest_step(replace(model, forward=noting), BLOCK_SIZE, torch.float32, ())
    [batch] = noting.batches
    assert (batch.num_tokens, batch.num_sequences, len(batch.rows)) == (MOST_TOKENS, MOST_SEQUENCES, MOST_SEQUENCES)


def test_a_device_without_memory_for_the_largest_step_is_refused(tiny: Model) -> None:
    with pytest.raises(ModelError, match=f"^there is no memory for a step of {MOST_TOKENS} tokens beside the weights "):
        run_largest_step(replace(tiny, forward=Full(tiny.forward)), BLOCK_SIZE, torch.float32, ())
