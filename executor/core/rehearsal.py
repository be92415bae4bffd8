"""Steps of every kind, before the pools are sized: a GPU compiles kernels and allocates memory at their first use."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from executor.cache.pool import KvPools, Scales
from executor.core.runner import Runner
from executor.errors import ModelError, first_line
from executor.models.cuda import MOST_SEQUENCES, MOST_TOKENS
from executor.models.device_errors import is_out_of_memory
from executor.models.forward import Model
from executor.step import Copy, NewSequence, Sampling, Step
from protos.errors import InvalidField
from protos.kvcommon.eviction import Layout, Policy, parse
from protos.kvcommon.v1 import kvcommon_pb2 as common

# Blocks of each sequence that computes a step of every kind: its prompt's, and one for its output.
_PROMPT_BLOCKS, _BLOCKS = 4, 5
# Without penalties: logits keep the model's type, which the kernel that draws tokens is compiled for.
_SAMPLINGS = (Sampling(), Sampling(temperature=1.0, num_logprobs=5), Sampling(num_prompt_logprobs=5))
_ALL_PARAMETERS = Sampling(temperature=1.0, top_k=50, top_p=0.9, min_p=0.01, repetition_penalty=1.1)
_COMPACTED = common.EVICTION_POSITIONS_COMPACTED


def rehearse(model: Model, block_size: int, cache_dtype: torch.dtype, scales: Sequence[Scales]) -> None:
    """Runs steps of every kind, then the largest step: MOST_TOKENS tokens in MOST_SEQUENCES sequences.

    The pools are small, and are released. The graph of the largest step keeps the memory of its activations until the
    graphs over the real pools are captured. Raises ModelError if there is no memory.
    """
    try:
        blocks = (len(_SAMPLINGS) + len(_policies(Layout(block_size, (None,), True)))) * _BLOCKS
        runner = Runner(model, KvPools(model.groups, blocks, block_size, cache_dtype, model.device, scales))
        for step in _steps_of_every_kind(runner.layout):
            runner.launch(runner.prepare(step)).result()
        runner.clear()
        runner.launch(runner.prepare(_largest_step(runner.last_step + 1, runner.layout))).result()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise ModelError(
            f"there is no memory for a step of {MOST_TOKENS} tokens beside the weights on {model.device}: "
            f"{first_line(error)}"
        ) from error


def _policies(layout: Layout) -> list[Policy]:
    """Returns policies that score, move and rotate keys, as far as the model can have them."""
    size, found = layout.block_size, []
    for message in (
        common.EvictionPolicy(
            kind=common.EVICTION_KIND_NORM_SUM,
            start_tokens=size,
            recent_tokens=size,
            max_cache_tokens=(_PROMPT_BLOCKS - 1) * size,
        ),
        common.EvictionPolicy(kind=common.EVICTION_KIND_H2O, max_cache_tokens=2 * size),
        common.EvictionPolicy(
            kind=common.EVICTION_KIND_SLIDING_WINDOW, recent_tokens=size, period_tokens=1, positions=_COMPACTED
        ),
    ):
        with contextlib.suppress(InvalidField):
            policy = parse(message, layout)
            assert policy is not None
            found.append(policy)
    return found


def _steps_of_every_kind(layout: Layout) -> Iterator[Step]:
    """Yields steps that compute, sample in all ways, copy blocks and evict tokens."""
    length, groups = _PROMPT_BLOCKS * layout.block_size, len(layout.windows)
    ways = [*((sampling, None) for sampling in _SAMPLINGS), *((Sampling(), policy) for policy in _policies(layout))]
    joining = []
    for handle, (sampling, policy) in enumerate(ways):
        table = tuple(range(1 + handle * _BLOCKS, 1 + (handle + 1) * _BLOCKS))
        joining.append(NewSequence(handle, (0,) * length, length, 0, (table,) * groups, sampling, policy))
    yield Step(1, new_sequences=tuple(joining), chunks={one.sequence: length for one in joining})
    # The last block of the first sequence becomes a copy of its first block.
    copies = [Copy(0, group, 1, _BLOCKS) for group in range(groups)]
    evicting = {one.sequence: () for one in joining if one.policy is not None}
    yield Step(2, copies=tuple(copies), evicting=evicting)
    yield Step(3)


def _largest_step(number: int, layout: Layout) -> Step:
    """Returns a step in which all sequences sample with all parameters."""
    length = MOST_TOKENS // MOST_SEQUENCES
    # What they store is not read, so they share their blocks.
    tables = (tuple(range(1, 1 + -(-length // layout.block_size))),) * len(layout.windows)
    joining = tuple(
        NewSequence(sequence, (0,) * length, length, 0, tables, replace(_ALL_PARAMETERS, seed=sequence))
        for sequence in range(MOST_SEQUENCES)
    )
    return Step(number, new_sequences=joining, chunks={one.sequence: length for one in joining})
