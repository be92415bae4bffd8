"""Chooses the next tokens, all rows at once, on the device.

A row's choice is a function of its logits, its parameters, and one number derived from seed and output position. So
neither the rest of the batch nor a recomputation after a preemption changes the choice.

Order and meaning follow transformers. Logits are changed by restrictions and biases, repetition penalty (prompt and
output), then frequency and presence (output). Log-probabilities are taken from these logits. Then follow temperature,
top-k, top-p over what top-k left, and min-p relative to the best token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from executor.core.restrictions import RowRestrictions, unpacked
from executor.core.token_counts import TokenCounts
from executor.step import Sampling, uniforms
from executor.transfer import to_device, to_host
from kernels.draw_tokens.launch import draw_tokens

# Lower temperatures change nothing, and a temperature that is 0 in float32 would divide 0 by 0.
_LEAST_TEMPERATURE = 1e-30


class SamplingRow(NamedTuple):
    """One row to sample: output_position counts generated tokens from 0.

    restrictions: allowed tokens and biases applied to the logits; None for none. counted: the handle of the row's
    sequence in the TokenCounts, None if the parameters do not penalise. drafted: tokens of the output that are not in
    these counts.
    """

    sampling: Sampling
    output_position: int
    restrictions: RowRestrictions | None = None
    counted: int | None = None
    drafted: Sequence[int] = ()


@dataclass(frozen=True)
class SampleResult:
    """ids: [R] int64. For rows that asked for log-probabilities (their indices in `logprob_rows`): logprobs [L],
    top_ids and top_logprobs [L, N] with N the largest number asked for."""

    ids: Tensor
    logprob_rows: tuple[int, ...] = ()
    logprobs: Tensor | None = None
    top_ids: Tensor | None = None
    top_logprobs: Tensor | None = None

    def on_host(self) -> "SampleResult":
        """Returns a copy on the host, readable once the device has come this far."""
        if self.logprobs is None or self.top_ids is None or self.top_logprobs is None:
            return SampleResult(to_host(self.ids))
        columns = map(to_host, (self.ids, self.logprobs, self.top_ids, self.top_logprobs))
        ids, logprobs, top_ids, top_logprobs = columns
        return SampleResult(ids, self.logprob_rows, logprobs, top_ids, top_logprobs)


def sample(
    logits: Tensor, rows: Sequence[SamplingRow], best: Tensor | None = None, counts: TokenCounts | None = None
) -> SampleResult:
    """Samples a token per row. logits: [R, V] of any float dtype, one row per entry of `rows`; may be overwritten.

    best: [R] int64, the ids of the largest logits, if known. counts: of the rows that are counted.
    """
    restricted = [index for index, row in enumerate(rows) if row.restrictions is not None]
    penalised = [index for index, row in enumerate(rows) if row.counted is not None]
    random = [index for index, row in enumerate(rows) if row.sampling.temperature > 0]
    asked = tuple(index for index, row in enumerate(rows) if row.sampling.num_logprobs is not None)
    if restricted or penalised:
        logits = logits.float()
    if restricted:
        places = to_device(restricted, logits.device)
        logits[places] = _restrict(logits[places], [rows[index].restrictions for index in restricted])
    if penalised:
        assert counts is not None
        places = to_device(penalised, logits.device)
        logits[places] = _penalise(logits[places], [rows[index] for index in penalised], counts)
    changed = range(len(rows)) if best is None else sorted({*restricted, *penalised})
    ids = torch.zeros(len(rows), dtype=torch.int64, device=logits.device) if best is None else best
    if greedy := [index for index in changed if rows[index].sampling.temperature == 0]:
        places = to_device(greedy, logits.device)
        ids = ids.index_copy(0, places, _best(logits if len(greedy) == len(rows) else logits[places]))
    if random:
        places = to_device(random, logits.device)
        ids = ids.index_copy(0, places, draw_tokens(logits, places, _parameters([rows[i] for i in random], logits)))
    if not asked:
        return SampleResult(ids)
    places = to_device(asked, logits.device)
    logprobs = logits[places].float().log_softmax(-1)
    top = logprobs.topk(max(rows[index].sampling.num_logprobs or 0 for index in asked), -1)
    chosen = logprobs.gather(1, ids[places][:, None])[:, 0]
    return SampleResult(ids, asked, chosen, top.indices, top.values)


def _restrict(logits: Tensor, rows: Sequence[RowRestrictions | None]) -> Tensor:
    """logits: [P, V]. Returns the logits of allowed tokens, with biases; all others are minus infinity."""
    found = [row for row in rows if row is not None]
    vocab = logits.shape[1]
    every = np.ones(vocab, dtype=bool)
    allowed = np.stack([every if row.allowed is None else unpacked(row.allowed, vocab) for row in found])
    logits = logits.masked_fill(~to_device(allowed, logits.device), -torch.inf)
    biases = [(index, *bias) for index, row in enumerate(found) for bias in row.bias]
    if biases:
        places, ids, values = zip(*biases, strict=True)
        where = to_device(places, logits.device), to_device(ids, logits.device)
        logits.index_put_(where, to_device(values, logits.device).to(logits.dtype), accumulate=True)
    return logits


def score(logits: Tensor, ids: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes log-probabilities of prompt tokens. logits: [N, V] of any float dtype. ids: [N] int64.

    Returns those of the ids, [N] float32, their ranks, [N] int64, and the `count` best, [N, count] int64 and float32.
    """
    logprobs = logits.float().log_softmax(-1)
    chosen = logprobs.gather(1, ids[:, None])
    ranks = (logprobs >= chosen).sum(-1)
    top = logprobs.topk(count, -1)
    return chosen[:, 0], ranks, top.indices, top.values


def _best(logits: Tensor) -> Tensor:
    """Returns the ids of the largest logits, [R] int64. On a CPU, numpy compares many at a time, unlike torch."""
    return logits.argmax(-1) if logits.is_cuda else torch.from_numpy(logits.float().numpy().argmax(-1))


def _penalise(logits: Tensor, rows: Sequence[SamplingRow], counts: TokenCounts) -> Tensor:
    """logits: [P, V]. Returns the penalised logits."""
    counted = [row.counted for row in rows if row.counted is not None]
    prompt, output = counts.of(counted, [row.drafted for row in rows])
    seen = prompt | (output > 0)
    repetition = _column([row.sampling.repetition_penalty for row in rows], logits)
    logits = torch.where(seen, torch.where(logits > 0, logits / repetition, logits * repetition), logits)
    logits = logits - _column([row.sampling.frequency_penalty for row in rows], logits) * output
    return logits - _column([row.sampling.presence_penalty for row in rows], logits) * (output > 0)


def _parameters(rows: Sequence[SamplingRow], logits: Tensor) -> Tensor:
    """Returns the parameters of `draw_tokens`, on the device of the logits."""
    samplings = [row.sampling for row in rows]
    parameters = np.empty((len(rows), 5))
    parameters[:, :4] = [(one.temperature, one.top_k, one.top_p, one.min_p) for one in samplings]
    np.maximum(parameters[:, 0], _LEAST_TEMPERATURE, out=parameters[:, 0])
    parameters[:, 4] = uniforms([one.seed for one in samplings], [row.output_position for row in rows])
    return to_device(parameters, logits.device)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    """Returns [len(values), 1] on the device, in the dtype of `like`."""
    return to_device(np.asarray(values, dtype=np.float64)[:, None], like.device).to(like.dtype)
