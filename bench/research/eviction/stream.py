"""Loss on a text much longer than the attention window, with absolute and with compacted positions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from bench.research.eviction.cache import Cache
from executor.models.forward import Model
from protos.kvcommon.eviction import Kind, parse
from protos.kvcommon.v1 import kvcommon_pb2 as common

SINKS, RECENT = 4, 1020
CHUNK = 64
BIN = 1000
# Values of EvictionPositions.
POSITIONS = {"absolute": 1, "compacted": 2}
# Recomputes the cache for each bin, as a baseline that shows how hard the text of the bin is.
FRESH = "computed anew"


def losses(model: Model, tokens: Sequence[int], positions: str) -> Iterator[list[float]]:
    """Yields negative log likelihoods of all tokens after the first, chunk by chunk, with a sliding window."""
    cache = Cache(model, SINKS + RECENT + CHUNK)
    message = common.EvictionPolicy(
        kind=common.EVICTION_KIND_SLIDING_WINDOW,
        start_tokens=SINKS,
        recent_tokens=RECENT,
        period_tokens=CHUNK,
        positions=POSITIONS[positions],  # type: ignore[arg-type]
    )
    policy = parse(message, cache.layout)
    assert policy is not None
    assert policy.kind is Kind.SLIDING_WINDOW
    # Evicts from the first chunk on.
    sequence = cache.sequence(tokens[:CHUNK], policy)
    for start in range(0, len(tokens) - 1, CHUNK):
        targets = tokens[start + 1 : start + CHUNK + 1]
        cache.evict(sequence, ())
        logits = cache.compute(sequence, tokens[start : start + len(targets)]).logits
        yield F.cross_entropy(logits, torch.tensor(targets), reduction="none").tolist()


def fresh(model: Model, tokens: Sequence[int]) -> Iterator[list[float]]:
    """Yields negative log likelihoods of each bin, computed at once with earlier tokens that fit into the window."""
    cache = Cache(model, SINKS + RECENT + BIN)
    for start in range(0, len(tokens) - 1, BIN):
        first = max(0, start - SINKS - RECENT)
        sequence = cache.sequence(tokens[first:start])
        if first < start:
            cache.compute(sequence, tokens[first:start])
        targets = tokens[start + 1 : start + BIN + 1]
        logits = cache.compute(sequence, tokens[start : start + len(targets)]).logits
        yield F.cross_entropy(logits, torch.tensor(targets), reduction="none").tolist()


def measure(model: Model, streams: Sequence[Sequence[int]]) -> Iterator[dict[str, Any]]:
    """Yields one record per stream and kind of positions, with the mean loss of each full bin."""
    for number, tokens in enumerate(streams):
        for name in (*POSITIONS, FRESH):
            chunks = fresh(model, tokens) if name == FRESH else losses(model, tokens, name)
            flat = [loss for chunk in chunks for loss in chunk]
            bins = [sum(flat[at : at + BIN]) / BIN for at in range(0, len(flat) - BIN + 1, BIN)]
            yield {"stream": number, "positions": name, "nll": bins}
