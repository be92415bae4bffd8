"""How predictions of the next tokens of a text change when its beginning is evicted down to a budget."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from bench.research.eviction.cache import Cache
from bench.research.eviction.outputs import Outputs, relative_error
from bench.research.eviction.policies import FULL, policy
from executor.batch import ScoredSequence, SequenceState


class Window:
    """A text whose first tokens were computed, and the full cache's predictions of the following tokens."""

    def __init__(self, cache: Cache, tokens: Sequence[int], prompt: int, outputs: Outputs | None) -> None:
        """tokens: the last token is only predicted. outputs: given if outputs of attention are compared, too."""
        self._cache = cache
        self._prompt = prompt
        self._following = list(tokens[prompt:-1])
        self._targets = torch.tensor(tokens[prompt + 1 :])
        cache.prefill(tokens[:prompt])
        sequence = cache.whole_prompt()
        self._recording = None if outputs is None else outputs.of(cache, sequence, self._following)
        computed = cache.compute(sequence, self._following, [ScoredSequence(0, len(self._following))])
        assert computed.attention is not None
        self._weights = computed.attention.weights
        self._log_probs = computed.logits.log_softmax(-1)
        self._probs = self._log_probs.exp()
        self._entropy = float(torch.vdot(self._probs.flatten(), self._log_probs.flatten()))
        self._best = computed.logits.argmax(-1)

    def full(self) -> dict[str, float]:
        """The figures of the full cache."""
        return {"nll": self._nll(self._log_probs), "kl": 0.0, "top1": 1.0, "mass": 1.0}

    def evicted(self, name: str, budget: int, seed: int) -> dict[str, float]:
        """The figures of a policy: nll and kl in nats per token; top1, mass and error as shares."""
        cache = self._cache
        sequence = cache.evicted(policy(name, budget, cache.layout, seed))
        mass = self._mass(sequence)
        error = {}
        if self._recording is not None:
            error["error"] = relative_error(self._recording, cache, sequence, self._following)
        logits = cache.compute(sequence, self._following).logits
        log_probs = logits.log_softmax(-1)
        crossed = float(torch.vdot(self._probs.flatten(), log_probs.flatten()))
        return {
            "nll": self._nll(log_probs),
            "kl": (self._entropy - crossed) / len(self._following),
            "top1": float((logits.argmax(-1) == self._best).float().mean()),
            "mass": mass,
            **error,
        }

    def _nll(self, log_probs: Tensor) -> float:
        return float(-log_probs.gather(-1, self._targets[:, None]).mean())

    def _mass(self, sequence: SequenceState) -> float:
        """The share of the following tokens' full-cache attention that falls on kept tokens and on themselves."""
        kept = self._weights.gather(-1, self._cache.engine.positions(sequence)).sum()
        return float((kept + self._weights[..., self._prompt :].sum()) / self._weights.sum())


def measure(
    cache: Cache,
    texts: Sequence[Sequence[int]],
    prompt: int,
    policies: Sequence[str],
    budgets: Sequence[int],
    outputs: dict[int, Outputs],
) -> Iterator[dict[str, Any]]:
    """Yields one record per window, policy and budget. outputs: in these windows, outputs of attention are compared."""
    for number, tokens in enumerate(texts):
        window = Window(cache, tokens, prompt, outputs.get(number))
        yield {"window": number, "policy": FULL, "budget": prompt, **window.full()}
        for name, budget in itertools.product(policies, budgets):
            yield {"window": number, "policy": name, "budget": budget, **window.evicted(name, budget, seed=number)}
