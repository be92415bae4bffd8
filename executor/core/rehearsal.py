"""Steps of nearly every kind before the pools are sized: a GPU compiles kernels and allocates memory at first use."""

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
from protos.kvcommon.v1 import kvcommon_pb2 as pb

# Tokens of a prompt, and steps that decode after the prompt.
_PROMPT, _DECODES = 64, 2
# Without penalties: logits keep the model's type, which the kernel that draws tokens is compiled for.
_SAMPLINGS = (Sampling(), Sampling(temperature=1.0, num_logprobs=5), Sampling(num_prompt_logprobs=5))
_ALL_PARAMETERS = Sampling(temperature=1.0, top_k=50, top_p=0.9, min_p=0.01, repetition_penalty=1.1)

# How a sequence samples, its token eviction, and the tokens of its prompt.
Way = tuple[Sampling, Policy | None, int]


def rehearse(model: Model, block_size: int, cache_dtype: torch.dtype, scales: Sequence[Scales]) -> None:
    """Runs steps of nearly every kind, then the largest step: MOST_TOKENS tokens in MOST_SEQUENCES sequences.

    The pools are small, and are released. The graph of the largest step keeps the memory of its activations until the
    graphs over the real pools are captured. Raises ModelError if there is no memory.
    """
    tokens = 0
    try:
        most = min(MOST_TOKENS, model.max_positions - _DECODES)
        layout = Layout(block_size, tuple(group.shape.window for group in model.groups), model.rotary is not None)
        ways: list[Way] = [*((sampling, None, min(_PROMPT, most)) for sampling in _SAMPLINGS), *_policies(layout, most)]
        longest = max(length for _, _, length in ways) + _DECODES
        # One more, to which a block is copied.
        blocks = -(-longest // block_size) + 1
        runner = Runner(model, KvPools(model.groups, blocks, block_size, cache_dtype, model.device, scales))
        for step in (*_steps_of_every_kind(ways, blocks, len(model.groups)), _largest_step(layout)):
            tokens = sum(step.chunks.values()) or 1
            runner.launch(runner.prepare(replace(step, number=runner.last_step + 1))).result()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        said = f"there is no memory for a step of {tokens} tokens beside the weights on {model.device}"
        raise ModelError(f"{said}: {first_line(error)}") from error


def _policies(layout: Layout, most: int) -> Iterator[Way]:
    """Yields policies that score, move and rotate keys, each with a prompt of which the policy evicts tokens.

    most: tokens of a prompt. Policies that would need more, or that the model cannot have, are left out.
    """
    size, half = layout.block_size, _PROMPT // 2
    areas = pb.EvictionPolicy(
        kind=pb.EVICTION_KIND_NORM_SUM, start_tokens=size, recent_tokens=size, max_cache_tokens=3 * size
    )
    scored = pb.EvictionPolicy(kind=pb.EVICTION_KIND_H2O, max_cache_tokens=half, period_tokens=1)
    squared = pb.EvictionPolicy(kind=pb.EVICTION_KIND_ROCO, max_cache_tokens=half, recent_tokens=4, period_tokens=1)
    rotated = pb.EvictionPolicy(
        kind=pb.EVICTION_KIND_SLIDING_WINDOW,
        recent_tokens=half,
        period_tokens=1,
        positions=pb.EVICTION_POSITIONS_COMPACTED,
    )
    for message, length in ((areas, 4 * size), (scored, _PROMPT), (squared, _PROMPT), (rotated, _PROMPT)):
        with contextlib.suppress(InvalidField):
            policy = parse(message, layout)
            if length <= most:
                yield Sampling(), policy, length


def _steps_of_every_kind(ways: Sequence[Way], blocks: int, groups: int) -> Iterator[Step]:
    """Yields steps of one sequence after the other, which sample, copy a block and evict tokens.

    blocks: of the pools. groups: number of layer groups.
    """
    tables, removed = (tuple(range(1, blocks)),) * groups, tuple[int, ...]()
    for handle, (sampling, policy, length) in enumerate(ways):
        new = NewSequence(handle, (0,) * length, length, 0, tables, sampling, policy)
        yield Step(0, removed=removed, new_sequences=(new,), chunks={handle: length})
        copies = tuple(Copy(0, group, 1, blocks) for group in range(groups))
        yield Step(0, copies=copies, evicting={} if policy is None else {handle: ()})
        yield Step(0)
        removed = (handle,)
    yield Step(0, removed=removed)


def _largest_step(layout: Layout) -> Step:
    """Returns a step in which all sequences sample with all parameters."""
    length = MOST_TOKENS // MOST_SEQUENCES
    # All store the same, so they share their blocks.
    tables = (tuple(range(1, 1 + -(-length // layout.block_size))),) * len(layout.windows)
    joining = tuple(
        NewSequence(sequence, (0,) * length, length, 0, tables, replace(_ALL_PARAMETERS, seed=sequence))
        for sequence in range(MOST_SEQUENCES)
    )
    return Step(0, new_sequences=joining, chunks={one.sequence: length for one in joining})
