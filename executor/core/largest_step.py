"""Memory of steps: a device allocates what the largest step needs before the pools take the rest."""

from collections.abc import Sequence

import torch

from executor.cache.pool import KvPools, Scales
from executor.core.runner import Runner
from executor.errors import ModelError, first_line
from executor.models.cuda import MOST_SEQUENCES, MOST_TOKENS
from executor.models.device_errors import is_out_of_memory
from executor.models.forward import Model
from executor.step import NewSequence, Sampling, Step


def run_largest_step(model: Model, block_size: int, cache_dtype: torch.dtype, scales: Sequence[Scales]) -> None:
    """Runs a step of MOST_TOKENS tokens in MOST_SEQUENCES sequences, which all sample, over pools of its own.

    The graph of the step keeps the memory of its activations until the graphs over the real pools are captured. Raises
    ModelError if there is no memory for the step.
    """
    length = MOST_TOKENS // MOST_SEQUENCES
    # No reader of the results: all sequences share their blocks.
    blocks = -(-length // block_size)
    tables = (tuple(range(1, 1 + blocks)),) * len(model.groups)
    try:
        pools = KvPools(model.groups, blocks, block_size, cache_dtype, model.device, scales)
        runner = Runner(model, pools)
        joining = tuple(
            NewSequence(
                sequence,
                (0,) * length,
                length,
                0,
                tables,
                Sampling(temperature=1.0, top_k=50, top_p=0.9, min_p=0.01, repetition_penalty=1.1, seed=sequence),
            )
            for sequence in range(MOST_SEQUENCES)
        )
        step = Step(1, new_sequences=joining, chunks={one.sequence: length for one in joining})
        runner.launch(runner.prepare(step)).result()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise ModelError(
            f"there is no memory for a step of {MOST_TOKENS} tokens beside the weights on {model.device}: "
            f"{first_line(error)}"
        ) from error
