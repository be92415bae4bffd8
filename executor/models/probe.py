"""Runs a few short sequences through a forward pass, over separate small pools, to check what a model computes before
it is served."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from executor.batch import SequenceState, build_batch
from executor.cache.pool import KvPools, LayerGroup
from executor.errors import FamilyError, ModelError
from executor.models.forward import Forward
from executor.step import NewSequence

# Largest root mean square error of a probe's logits, relative to the logits.
TOLERANCES = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}
_BLOCK_SIZE = 16
# For the packed probe: tokens of each sequence, and how many of them its second step computes.
_LENGTHS, _LAST = (4, 13, 7), (1, 4, 2)


def run(
    forward: Forward,
    groups: Sequence[LayerGroup],
    vocab_size: int,
    dtype: torch.dtype,
    device: torch.device,
    prompts: Sequence[int],
    *steps: Sequence[int],
    evicting: bool = False,
) -> list[Tensor]:
    """Returns, for each step, the logits of the last computed token of each sequence, float32 [sequences, V].

    prompts: a number per sequence that distinguishes its tokens. steps: tokens of each sequence that a step computes.
    evicting: as if one token had been evicted after each step, so that later tokens' slots differ from their positions.
    """
    totals = [sum(counts) for counts in zip(*steps, strict=True)]
    blocks = [-(-total // _BLOCK_SIZE) for total in totals]
    pools = KvPools(groups, sum(blocks), _BLOCK_SIZE, dtype, device)
    sequences, first = [], 1
    for number, (prompt, total, count) in enumerate(zip(prompts, totals, blocks, strict=True)):
        tokens = tuple((prompt + 7 * place) % vocab_size for place in range(total))
        table = tuple(range(first, first + count))
        sequences.append(SequenceState.of(NewSequence(number, tokens, total, 0, (table,) * len(groups)), number))
        first += count
    logits, last_tokens = [], torch.zeros(len(sequences), dtype=torch.int64, device=device)
    for counts in steps:
        for sequence, count in zip(sequences, counts, strict=True):
            # Otherwise, the logits of these tokens would not be requested.
            sequence.known = sequence.computed + count
        output = forward.prepare(build_batch(sequences, counts, last_tokens, _BLOCK_SIZE, len(groups)), pools)()
        logits.append(output.logits.float().clone())
        for sequence, count in zip(sequences, counts, strict=True):
            sequence.computed += count
            sequence.kept += count - evicting
    return logits


def deviation(computed: Tensor, expected: Tensor) -> float:
    """Returns the root mean square error, relative to the expected values."""
    # Squares of floats may be too large for floats.
    error, size = (one.double().square().mean().sqrt() for one in (computed - expected, expected))
    return float(error / size.clamp(min=1e-30))


def check_packing(
    forward: Forward, config: Any, groups: Sequence[LayerGroup], dtype: torch.dtype, device: torch.device
) -> None:
    """Raises FamilyError unless sequences at different positions that share a step get the same results as alone.

    Raises ModelError if outputs are not numbers.
    """
    vocab_size, sequences = int(config.vocab_size), range(len(_LENGTHS))
    chunks = [length - last for length, last in zip(_LENGTHS, _LAST, strict=True)]
    with _Counting((sum(chunks), sum(_LAST))) as counting:
        packed = run(forward, groups, vocab_size, dtype, device, sequences, chunks, _LAST)[-1]
    if counting.counted:
        raise FamilyError(f"{config.model_type}: a layer counts the tokens of a step and takes that for positions")
    alone = [
        run(forward, groups, vocab_size, dtype, device, [prompt], [length])[0]
        for prompt, length in zip(sequences, _LENGTHS, strict=True)
    ]
    # A family may mask a token with negative infinity.
    if any((own.isnan() | own.isposinf()).any() for [own] in alone):
        kind = str(dtype).removeprefix("torch.")
        raise ModelError(
            f"{config.model_type}: the model computes values that are no numbers in {kind}: its weights are damaged, "
            "or too large for this type: compare them with their origin, or set KVKEEP_EXECUTOR_DTYPE to float32"
        )
    pairs = [(row, own[0]) for row, own in zip(packed, alone, strict=True) if own.isfinite().all()]
    errors = sorted(deviation(row, own) for row, own in pairs)
    # The median: if the choice of an expert is close, rounding may change it for a token.
    middle = errors[len(errors) // 2] if errors else 0.0
    if not middle < TOLERANCES.get(dtype, 0.1):
        raise FamilyError(
            f"{config.model_type}: sequences that share a step change each other's output (by {middle:.2g})"
        )


class _Counting(TorchFunctionMode):
    """Notices numbers from 0 for each token of a step, which are not the positions of packed tokens.

    For the short sequences of a probe, such numbers may be nearly right, but for long ones wrong.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        """sizes: numbers of tokens of the steps."""
        super().__init__()
        self.counted = False
        self._sizes = sizes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.arange and out.numel() in self._sizes:
            self.counted = True
        return out
