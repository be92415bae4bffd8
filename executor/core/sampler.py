"""Chooses the next tokens, all rows at once, on the device.

A row's choice is a function of its own logits, its parameters, and one number derived from seed and output position:
neither the rest of the batch nor a recomputation after a preemption changes it.

Order and meaning follow transformers: repetition penalty (prompt and output), then frequency and presence (output);
log-probabilities are taken here; then temperature, top-k, top-p over what top-k left, min-p relative to the best.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from executor.step import Sampling, uniform
from executor.transfer import to_device, to_host

# Of a sorted distribution, top-p seldom looks further than this; a row that does is sorted in full.
_CANDIDATES = 512
# Lower temperatures change nothing, and one that is 0 in float32 would divide 0.
_LEAST_TEMPERATURE = 1e-30


@dataclass
class TokenCounts:
    """Which tokens a sequence has: prompt [V] bool, output [V] float32 counts. Kept only where penalties need them."""

    prompt: Tensor
    output: Tensor

    @classmethod
    def of(cls, prompt: Tensor, output: Tensor, vocab_size: int) -> "TokenCounts":
        """Counts of the given ids, [N] int64 each, on their device."""
        seen = torch.zeros(vocab_size, dtype=torch.bool, device=prompt.device)
        seen[prompt] = True
        counts = torch.zeros(vocab_size, dtype=torch.float32, device=prompt.device)
        counts.index_add_(0, output, torch.ones_like(output, dtype=torch.float32))
        return cls(seen, counts)

    def add(self, token: Tensor) -> None:
        """Counts one more output token, [1] int64."""
        self.output.index_add_(0, token, torch.ones_like(token, dtype=torch.float32))


@dataclass(frozen=True)
class SamplingRow:
    """One row to sample: output_position counts generated tokens from 0; counts only when the parameters penalise."""

    sampling: Sampling
    output_position: int
    counts: TokenCounts | None = None


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
        """A copy on the host, readable once the device has come this far."""
        if self.logprobs is None or self.top_ids is None or self.top_logprobs is None:
            return SampleResult(to_host(self.ids))
        columns = map(to_host, (self.ids, self.logprobs, self.top_ids, self.top_logprobs))
        ids, logprobs, top_ids, top_logprobs = columns
        return SampleResult(ids, self.logprob_rows, logprobs, top_ids, top_logprobs)


def sample(logits: Tensor, rows: Sequence[SamplingRow], best: Tensor | None = None) -> SampleResult:
    """logits: [R, V] of any float dtype, one row per entry of `rows`; overwritten.

    best: [R] int64, the ids of the largest logits, where they are known.
    """
    penalised = [index for index, row in enumerate(rows) if row.counts is not None]
    random = [index for index, row in enumerate(rows) if row.sampling.temperature > 0]
    asked = tuple(index for index, row in enumerate(rows) if row.sampling.num_logprobs is not None)
    if best is not None and not (penalised or random or asked):
        return SampleResult(best)
    logits = logits.float()
    if penalised:
        places = to_device(penalised, logits.device)
        logits[places] = _penalise(logits[places], [rows[index] for index in penalised])
    ids = _best(logits)
    if random:
        places = to_device(random, logits.device)
        ids[places] = _draw(logits[places], [rows[index] for index in random])
    if not asked:
        return SampleResult(ids)
    places = to_device(asked, logits.device)
    logprobs = logits[places].log_softmax(-1)
    top = logprobs.topk(max(rows[index].sampling.num_logprobs or 0 for index in asked), -1)
    chosen = logprobs.gather(1, ids[places][:, None])[:, 0]
    return SampleResult(ids, asked, chosen, top.indices, top.values)


def _best(logits: Tensor) -> Tensor:
    """Ids of the largest logits, [R] int64. On a CPU numpy compares many at a time, which torch does not."""
    return logits.argmax(-1) if logits.is_cuda else torch.from_numpy(logits.numpy().argmax(-1))


def _penalise(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """logits: [P, V]. Returns the penalised ones."""
    counts = [row.counts for row in rows if row.counts is not None]
    output = torch.stack([each.output for each in counts])
    seen = torch.stack([each.prompt for each in counts]) | (output > 0)
    repetition = _column([row.sampling.repetition_penalty for row in rows], logits)
    logits = torch.where(seen, torch.where(logits > 0, logits / repetition, logits * repetition), logits)
    logits = logits - _column([row.sampling.frequency_penalty for row in rows], logits) * output
    return logits - _column([row.sampling.presence_penalty for row in rows], logits) * (output > 0)


def _draw(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """logits: [P, V], temperatures above 0. Returns [P] int64 by inverting the cumulative distribution."""
    # The largest logit is subtracted first, so that no temperature makes it overflow.
    logits = logits - logits.amax(-1, keepdim=True)
    logits /= _column([max(row.sampling.temperature, _LEAST_TEMPERATURE) for row in rows], logits)
    best = logits.new_zeros(len(rows), 1)
    least = torch.full_like(best, -torch.inf)
    with_min_p = [index for index, row in enumerate(rows) if row.sampling.min_p > 0]
    if with_min_p:
        places = to_device(with_min_p, logits.device)
        least[places] = best[places] + _column([rows[i].sampling.min_p for i in with_min_p], logits).log()
    filtered = [index for index, row in enumerate(rows) if row.sampling.top_k > 0 or row.sampling.top_p < 1]
    if filtered:
        places = to_device(filtered, logits.device)
        cut = _least_kept(logits[places], [rows[index].sampling for index in filtered])
        least[places] = torch.maximum(least[places], cut)
    weights = (logits - best).to(torch.float64).exp_().masked_fill_(logits < least, 0)
    cumulative = weights.cumsum_(-1)
    drawn = _column([uniform(row.sampling.seed, row.output_position) for row in rows], cumulative)
    # Right: an id whose weight is 0 is never hit, the first positive one is hit at 0.
    found = torch.searchsorted(cumulative, drawn * cumulative[:, -1:], right=True)[:, 0]
    return found.clamp_(max=logits.shape[1] - 1)


def _least_kept(logits: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """logits: [P, V]. Smallest logit that top-k and top-p keep, [P, 1]."""
    vocab = logits.shape[1]
    width = min(vocab, _CANDIDATES)
    if logits.is_cuda or any(sampling.top_k > width for sampling in samplings):
        return _cut(logits.sort(-1, descending=True).values, logits, samplings)[0]
    least, complete = _cut(logits.topk(width, -1).values, logits, samplings)
    rest = (~complete).nonzero().flatten().tolist()
    if rest and width < vocab:
        full = logits[rest].sort(-1, descending=True).values
        least[rest] = _cut(full, logits[rest], [samplings[index] for index in rest])[0]
    return least


def _cut(ordered: Tensor, logits: Tensor, samplings: Sequence[Sampling]) -> tuple[Tensor, Tensor]:
    """ordered: [P, W], the W best logits, best first. Returns the smallest kept, [P, 1], and if W was enough, [P]."""
    width, vocab = ordered.shape[1], logits.shape[1]
    top_k = to_device([min(sampling.top_k or vocab, vocab) for sampling in samplings], ordered.device)[:, None]
    top_p = _column([sampling.top_p for sampling in samplings], ordered).double()
    ranks = torch.arange(width, device=ordered.device)
    in_k = ranks < top_k
    weights = (ordered - ordered[:, :1]).double().exp().masked_fill_(~in_k, 0)
    everything = (logits - ordered[:, :1]).double().exp_().sum(-1, keepdim=True)
    total = torch.where(top_k < vocab, weights.sum(-1, keepdim=True), everything)
    before = weights.cumsum(-1) - weights
    kept = in_k & ((before < top_p * total) | (top_p >= 1))
    # The best one stays, whatever the parameters.
    kept[:, 0] = True
    last = kept.sum(-1, keepdim=True) - 1
    complete = (last < width - 1) | (top_k <= width)
    return ordered.gather(1, last), complete[:, 0]


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    """[len(values), 1] on the device, in the dtype of `like`."""
    return to_device(np.asarray(values, dtype=np.float64)[:, None], like.device).to(like.dtype)
