"""Greedy output while policies evict during decoding, through the executor's runner."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bench.research.eviction.cache import BLOCK_SIZE
from bench.research.eviction.policies import FULL, policy
from bench.research.eviction.rouge import rouge_2, rouge_l
from executor.cache.pool import KvPools
from executor.core.runner import Runner
from executor.models.forward import Model
from executor.step import NewSequence, Step
from protos.kvcommon.eviction import Policy

OUTPUT = 128


@dataclass
class _Sequence:
    """A scheduler's view of a sequence whose prompt is computed. private: the table that the sequence moves to."""

    policy: Policy
    prompt: int
    private: tuple[int, ...]
    kept: int
    computed: int
    moved: bool = False

    def next(self) -> tuple[int, ...] | None:
        """Adds one token; at the first eviction returns the table that the sequence moves to."""
        left = self.policy.kept_after(self.kept, self.computed, self.prompt)
        moves = left < self.kept and not self.moved
        self.moved |= moves
        self.kept = left + 1
        self.computed += 1
        return self.private if moves else None


class Generation:
    """A prompt with one sequence per policy; the sequences share the prompt's blocks until they evict."""

    def __init__(self, model: Model, prompt: Sequence[int]) -> None:
        self._model = model
        self._prompt = tuple(prompt)

    def outputs(self, policies: Sequence[str], budget: int) -> dict[str, list[int]]:
        """OUTPUT greedy tokens with the full cache and with each policy."""
        prompt = len(self._prompt)
        whole = _blocks(1, prompt + OUTPUT)
        private = _blocks(0, budget + OUTPUT + BLOCK_SIZE)
        pools = KvPools(
            self._model.groups,
            len(whole) + len(policies) * len(private),
            BLOCK_SIZE,
            self._model.dtype,
            self._model.device,
        )
        runner = Runner(self._model, pools)
        names = [FULL, *policies]
        sequences: dict[int, _Sequence] = {}
        outputs: dict[int, list[int]] = {}
        for handle, name in enumerate(names):
            chosen = None if name == FULL else policy(name, budget, runner.layout)
            # Tokens that are computed again to count their attention have the same results.
            known = 0 if chosen is None else chosen.reusable(prompt, prompt)
            known = min(known, prompt - 1)
            joining = NewSequence(handle, self._prompt, prompt, known, (whole,), policy=chosen)
            made = Step(
                handle + 1, new_sequences=(joining,), chunks={handle: prompt - known}, idle=frozenset(range(handle))
            )
            outputs[handle] = [sampled.token_id for sampled in runner.launch(runner.prepare(made)).result().sampled]
            if chosen is not None:
                first = len(whole) + 1 + (handle - 1) * len(private)
                blocks = tuple(block + first for block in private)
                sequences[handle] = _Sequence(chosen, prompt, blocks, prompt, prompt)
        for number in range(1, OUTPUT):
            moving = {handle: table for handle, one in sequences.items() if (table := one.next()) is not None}
            for sampled in runner.launch(runner.prepare(Step(len(names) + number, evicting=moving))).result().sampled:
                outputs[sampled.sequence].append(sampled.token_id)
        return {name: outputs[handle] for handle, name in enumerate(names)}


def _blocks(first: int, tokens: int) -> tuple[int, ...]:
    return tuple(range(first, first + -(-tokens // BLOCK_SIZE)))


def measure(
    model: Model, tokenizer: Any, prompts: Sequence[Sequence[int]], policies: Sequence[str], budget: int
) -> Iterator[dict[str, Any]]:
    """Yields one record per window and policy: the text, and its ROUGE against the full cache's text.

    The record of the full cache has only the text.
    """
    for number, prompt in enumerate(prompts):
        outputs = Generation(model, prompt).outputs(policies, budget)
        texts = {name: tokenizer.decode(tokens) for name, tokens in outputs.items()}
        for name in policies:
            pair = texts[name], texts[FULL]
            scores = {"rouge2": rouge_2(*pair), "rougel": rouge_l(*pair)}
            yield {"window": number, "policy": name, "budget": budget, **scores, "text": texts[name]}
        yield {"window": number, "policy": FULL, "budget": len(prompt), "text": texts[FULL]}
