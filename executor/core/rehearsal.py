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


def rehearse(
    model: Model, block_size: int, cache_dtype: torch.dtype, scales: Sequence[Scales], max_batched_tokens: int
) -> None:
    """Runs steps of nearly every kind, then a step of the largest graph, and a step of `max_batched_tokens` tokens.

    These have at most MOST_SEQUENCES sequences, without log-probabilities of prompts. The pools are small, and are
    released. The memory of activations stays with PyTorch, for steps over the real pools. Raises ModelError if there is
    no memory.
    """
    tokens = max_batched_tokens
    try:
        most = min(MOST_TOKENS, model.max_positions - _DECODES)
        layout = Layout(block_size, tuple(group.shape.window for group in model.groups), model.rotary is not None)
        ways: list[Way] = [*((sampling, None, min(_PROMPT, most)) for sampling in _SAMPLINGS), *_policies(layout, most)]
        # Graphs of all sizes are captured, whatever the setting.
        largest = [_lengths(size, model.max_positions) for size in sorted({MOST_TOKENS, max_batched_tokens})]
        longest = max(*(length + _DECODES for _, _, length in ways), *(lengths[0] for lengths in largest))
        # One more, to which a block is copied.
        blocks = -(-longest // block_size) + 1
        runner = Runner(model, KvPools(model.groups, blocks, block_size, cache_dtype, model.device, scales))
        small = (_steps_of(way, blocks, len(model.groups)) for way in ways)
        for steps in (*small, *([_large_step(layout, lengths)] for lengths in largest)):
            for step in steps:
                tokens = sum(step.chunks.values()) or 1
                runner.launch(runner.prepare(replace(step, number=runner.last_step + 1))).result()
            runner.clear()
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


def _steps_of(way: Way, blocks: int, groups: int) -> list[Step]:
    """Returns steps of one sequence, which sample, copy a block and evict tokens.

    blocks: of the pools. groups: number of layer groups.
    """
    sampling, policy, length = way
    tables = (tuple(range(1, blocks)),) * groups
    new = NewSequence(0, (0,) * length, length, 0, tables, sampling, policy)
    copies = tuple(Copy(0, group, 1, blocks) for group in range(groups))
    return [
        Step(0, new_sequences=(new,), chunks={0: length}),
        Step(0, copies=copies, evicting={} if policy is None else {0: ()}),
        Step(0),
    ]


def _lengths(tokens: int, max_positions: int) -> list[int]:
    """Returns the lengths of up to MOST_SEQUENCES prompts, longest first, which have `tokens` tokens together.

    Prompts are no longer than the model allows, so all together may have fewer tokens.
    """
    sequences = min(MOST_SEQUENCES, tokens)
    share, rest = divmod(tokens, sequences)
    return [min(share + (number < rest), max_positions) for number in range(sequences)]


def _large_step(layout: Layout, lengths: Sequence[int]) -> Step:
    """Returns a step in which prompts of these lengths, longest first, are computed, and sample with all parameters."""
    # All store the same, so they share their blocks.
    tables = (tuple(range(1, 1 + -(-lengths[0] // layout.block_size))),) * len(layout.windows)
    joining = tuple(
        NewSequence(sequence, (0,) * length, length, 0, tables, replace(_ALL_PARAMETERS, seed=sequence))
        for sequence, length in enumerate(lengths)
    )
    return Step(0, new_sequences=joining, chunks={one.sequence: len(one.token_ids) for one in joining})
