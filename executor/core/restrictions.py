"""What restricts or biases an output besides the model: a grammar, allowed and forbidden tokens, and biases."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from executor.core.grammars import Matcher
from executor.step import Sampling

Words = np.ndarray[tuple[int], np.dtype[np.uint32]]


@dataclass(frozen=True)
class RowRestrictions:
    """Restricts a row of logits. allowed: [W] uint32, a bit per token; None for all. bias: added to logits, by id.

    failed: whether the grammar could not be followed, so that only an end is allowed.
    """

    allowed: Words | None
    bias: tuple[tuple[int, float], ...] = ()
    failed: bool = False


class Restrictions:
    """The restrictions of one sequence, which follow its output. Not thread-safe."""

    def __init__(
        self,
        sampling: Sampling,
        matcher: Matcher | None,
        words: int,
        ignored_eos: Iterable[int] = (),
        output: Sequence[int] = (),
    ) -> None:
        """matcher: for a new output; None without a grammar. words: length of a mask.

        ignored_eos: end-of-sequence ids that are stop ids only because of the grammar. output: with which the sequence
        joins.
        """
        self.sampling = sampling
        self._matcher = matcher
        self._words = words
        self._ignored_eos = frozenset(ignored_eos)
        self._bias = tuple(sampling.logit_bias.items())
        self._allowed = None
        if sampling.allowed_token_ids:
            self._allowed = _bits({*sampling.allowed_token_ids, *sampling.stop_token_ids}, words)
        # Most earlier tokens that a forbidden run may include.
        self._longest = max(map(len, sampling.bad_token_ids), default=1) - 1
        self._last: tuple[int, ...] = ()
        self._length = 0
        self.take(output)

    def take(self, token_ids: Sequence[int]) -> None:
        """Takes further tokens of the output."""
        self._length += len(token_ids)
        self._last = self._behind(token_ids)
        if self._matcher is not None:
            self._matcher.take(token_ids)

    def rows(self, drafts: Sequence[int] = ()) -> list[RowRestrictions | None]:
        """Returns the restrictions after the output, and after each draft as if it were taken; None for none."""
        grammar = failed = None
        if self._matcher is not None:
            grammar = np.zeros((1 + len(drafts), self._words), dtype=np.uint32)
            failed = self._matcher.fill(grammar, drafts)
        masks = (self._mask(None if grammar is None else grammar[row], drafts[:row]) for row in range(1 + len(drafts)))
        return [
            None if mask is None and not self._bias else RowRestrictions(mask, self._bias, failed=row == failed)
            for row, mask in enumerate(masks)
        ]

    def _behind(self, drafts: Sequence[int]) -> tuple[int, ...]:
        """Returns the last tokens of the output followed by drafts."""
        return (*self._last, *drafts)[-self._longest :] if self._longest else ()

    def _mask(self, grammar: Words | None, drafts: Sequence[int]) -> Words | None:
        """Returns the tokens that all restrictions allow; None for all tokens.

        If no token is left: the tokens that the grammar allows, or else those that end the output.
        """
        masks = [mask for mask in (grammar, self._allowed) if mask is not None]
        forbidden = self._forbidden(drafts)
        if not masks and not forbidden:
            return None
        # An ignored end-of-sequence id is allowed only if the grammar allows nothing else.
        mask = _without(_all_of(masks, self._words), self._ignored_eos | forbidden)
        if mask.any():
            return mask
        if grammar is not None and grammar.any():
            return grammar
        ends = self.sampling.stop_token_ids
        return _bits(ends, self._words) if ends else None

    def _forbidden(self, drafts: Sequence[int]) -> set[int]:
        """Returns the tokens that must not come after drafts."""
        sampling, before = self.sampling, self._behind(drafts)
        forbidden = {run[-1] for run in sampling.bad_token_ids if before[len(before) - len(run) + 1 :] == run[:-1]}
        if self._length + len(drafts) < sampling.min_tokens:
            forbidden.update(self.sampling.stop_token_ids)
        return forbidden


def _all_of(masks: Sequence[Words], words: int) -> Words:
    """Returns the tokens that are in all masks; all tokens if there are no masks."""
    return np.bitwise_and.reduce(masks) if masks else np.full(words, 0xFFFFFFFF, dtype=np.uint32)


def _bits(token_ids: Iterable[int], words: int) -> Words:
    """Returns a mask of tokens."""
    mask = np.zeros(words, dtype=np.uint32)
    ids = np.fromiter(token_ids, dtype=np.int64)
    np.bitwise_or.at(mask, ids >> 5, np.uint32(1) << (ids & 31).astype(np.uint32))
    return mask


def _without(mask: Words, token_ids: Iterable[int]) -> Words:
    """Returns the mask without some tokens."""
    return mask & ~_bits(token_ids, len(mask))


def unpacked(mask: Words, vocab_size: int) -> np.ndarray:
    """[V] bool."""
    return np.unpackbits(mask.view(np.uint8), count=vocab_size, bitorder="little").view(bool)
