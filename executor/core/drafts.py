"""Speculative decoding: proposes drafts, which are likely next tokens, and decides how many a step computes.

A step computes drafted tokens after a sequence's last known token, and samples a token for the position of each draft
as if the earlier drafts were the sequence's tokens. A draft is accepted if the sample for its position equals the
draft, and all earlier drafts are accepted. The first sample that differs is the next token; later samples are
ignored.

This is speculative sampling (Leviathan et al. 2023, arXiv 2211.17192) for deterministic proposals. Its authors accept a
draft x with probability min(1, p(x) / q(x)), which is p(x) if q(x) = 1, and otherwise sample from p restricted to the
other tokens. A single sample from p has the same distribution. Here, its random number depends only on the seed and the
output position, so equal logits give the same output with and without drafts.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from itertools import count
from statistics import median
from typing import NamedTuple

from executor import metrics
from executor.batch import SequenceState
from executor.core.draft_model import Claim, DraftModel

# The lengths of the token runs by which an earlier place is found, longest first.
_SIZES = (4, 2)
# Initial chances that the next draft is accepted, by the number of matching tokens before it: fewer than the first
# bound, fewer than the second, or more.
_BOUNDS, _CHANCES = (4, 8), (0.3, 0.5, 0.8)
# Separates texts, and is not a token.
_GAP = -1
# Weight of the last outcome in a chance.
_WEIGHT = 1 / 8
# A draft with a smaller chance is never computed.
_LEAST_CHANCE = 0.1
# The cost of a draft before it is measured, as a share of a token's time; the weight of a new measurement; and the
# factor by which each step without drafts lowers the share, so that costly drafts are tried again.
_FIRST_SHARE, _COST_WEIGHT, _FORGETTING = 0.3, 1 / 4, 0.995
# The factor for a draft model's drafts: trying these costs additional passes.
_MODEL_FORGETTING = 0.9998
# A step with drafts is compared with the median time of this number of steps without drafts.
_KEPT_STEPS = 5
# Most drafted tokens of a step: each has separate logits.
MOST_ROWS = 64


def count_accepted(token_ids: Sequence[int], drafts: Sequence[int], stop_token_ids: frozenset[int]) -> int:
    """Returns how many sampled tokens count, at least 1: up to the first mismatch or stop token.

    token_ids: the sample for the position of each draft, then the sample after the last draft.
    """
    for index, (token_id, draft) in enumerate(zip(token_ids, drafts, strict=False)):
        if token_id != draft or token_id in stop_token_ids:
            return index + 1
    return len(token_ids)


class Method(StrEnum):
    """Where drafts are from: the sequence's own text, a cached text that may follow the prompt, or a draft model."""

    NGRAM = "ngram"
    CONTINUATION = "continuation"
    DRAFT_MODEL = "draft_model"


# The metrics of drafted tokens and of accepted drafts; here, so that unused methods are 0.
_METRICS = {method: (metrics.DRAFTED.labels(method), metrics.ACCEPTED.labels(method)) for method in Method}


class Proposed(NamedTuple):
    """The drafts of a sequence in a step: where they are from, and how many there are."""

    method: Method
    drafts: int

    @property
    def by_model(self) -> int:
        """Drafts that are from a draft model."""
        return self.drafts if self.method is Method.DRAFT_MODEL else 0


class NgramProposer:
    """Proposes what followed the sequence's last tokens at an earlier place in output, prompt or continuation.

    The proposer first follows the continuation, a text that may follow the prompt. After a mismatch, it looks up the
    last four tokens, then the last two, and follows the latest place after them. Only the constructor takes time that
    grows with the sequence's length. Every token counts for the chance that proposals are right, even if its proposal
    was not computed.
    """

    def __init__(self, token_ids: Sequence[int], continuation: Sequence[int] = ()) -> None:
        """token_ids: the sequence's tokens so far. continuation: tokens that may follow them."""
        self._text = [*continuation, _GAP, *token_ids]
        self._continuation = len(continuation)
        # The last place in the text after each run of tokens.
        self._places = [
            dict(zip(zip(*(self._text[start:] for start in range(size)), strict=False), count(size))) for size in _SIZES
        ]
        self._chances = list(_CHANCES)
        # The place that is followed, None for none, and how many tokens before it match.
        self._next: int | None = 0 if continuation else None
        self._matched = _BOUNDS[-1] if continuation else 0

    @property
    def chance(self) -> float:
        """The chance that the proposal for the next token is right; 0 without a proposal."""
        return self._chances[self._level] if self._next is not None and self._text[self._next] != _GAP else 0.0

    @property
    def method(self) -> Method:
        """Where the proposal for the next token is from."""
        is_cached = self._next is not None and self._next < self._continuation
        return Method.CONTINUATION if is_cached else Method.NGRAM

    @property
    def _level(self) -> int:
        return sum(self._matched >= bound for bound in _BOUNDS)

    def append(self, token_id: int) -> None:
        """Appends a token to the sequence."""
        text = self._text
        if self._next is not None:
            right, level = text[self._next] == token_id, self._level
            if text[self._next] != _GAP:
                self._chances[level] += (right - self._chances[level]) * _WEIGHT
            self._next = self._next + 1 if right else None
            self._matched += 1
        text.append(token_id)
        for size, places in zip(_SIZES, self._places, strict=True):
            run = tuple(text[-size:])
            if self._next is None and (place := places.get(run)) is not None:
                self._next, self._matched = place, size
            places[run] = len(text)

    def propose(self, most: int) -> list[int]:
        """Proposes at most `most` tokens. Beyond the end of the text, earlier proposals are repeated."""
        if self._next is None:
            return []
        proposed = self._text[self._next : self._next + most]
        if _GAP in proposed:
            return proposed[: proposed.index(_GAP)]
        while len(proposed) < most:
            proposed += proposed[: most - len(proposed)]
        return proposed


class Decodes(NamedTuple):
    """The decoding sequences of a step. size: the bit length of the number of tokens that they keep in all."""

    sequences: int = 0
    size: int = 0

    @classmethod
    def of(cls, sequences: Sequence[SequenceState]) -> "Decodes":
        return cls(len(sequences), sum(sequence.kept for sequence in sequences).bit_length())


class DraftCosts:
    """The time that a drafted token adds to a step, as a share of what it saves: the time of a token without drafts.

    Measured in steps that only decode, by the number of decoding sequences and the number of tokens that they keep.
    """

    def __init__(self, forgetting: float = _FORGETTING) -> None:
        """forgetting: the factor by which each step without drafts lowers a share."""
        self._forgetting = forgetting
        self._plain: dict[Decodes, deque[float]] = {}
        self._shares: dict[Decodes, float] = {}
        self._last_share = _FIRST_SHARE

    def observe(self, decodes: Decodes, drafts: int, seconds: float) -> None:
        """Takes the time of a step, with the sequences that it decoded and the number of drafts that it computed."""
        plain = self._plain.setdefault(decodes, deque(maxlen=_KEPT_STEPS))
        share = self._shares.get(decodes, self._last_share)
        if not drafts:
            plain.append(seconds)
            share *= self._forgetting
        elif plain and (usual := median(plain)) > 0:
            # No draft costs more than a token; a step that took longer was delayed by other things.
            seen = min(1.0, max(0.0, seconds - usual) / drafts * decodes.sequences / usual)
            share += (seen - share) * _COST_WEIGHT
        self._shares[decodes] = self._last_share = share

    def least_chance(self, decodes: Decodes) -> float:
        """Returns the chance of acceptance above which a draft saves more than it costs; 1 if that is not known."""
        if not self._plain.get(decodes):
            return 1.0
        return max(_LEAST_CHANCE, self._shares[decodes])


class ModelChance:
    """How likely a draft model's first proposal for a sequence is right, judging by the last proposals."""

    def __init__(self) -> None:
        self.chance = _CHANCES[-1]

    def note(self, drafted: int, accepted: int) -> None:
        """Takes how many of the drafts were accepted; drafts after the first rejected one say nothing."""
        if not drafted:
            # Drafts that were not worth their computation are tried again.
            self.chance += (_CHANCES[-1] - self.chance) * (1 - _FORGETTING)
        for index in range(min(drafted, accepted + 1)):
            self.chance += ((index < accepted) - self.chance) * _WEIGHT


class Drafter:
    """Proposes drafts for the sequences of a running batch, as many as are worth their computation.

    Proposing what followed the same tokens earlier is free. A draft model proposes if it is more likely to be right.
    """

    def __init__(
        self,
        most: int,
        proposer: Callable[[Sequence[int], Sequence[int]], NgramProposer] = NgramProposer,
        costs: Callable[[float], DraftCosts] = DraftCosts,
        model: DraftModel | None = None,
    ) -> None:
        """most: drafted tokens of a sequence in a step. proposer: takes a sequence's tokens and continuation.

        costs: makes the costs of drafts with this forgetting, called for drafts without `model` and for drafts of
        `model`. model: None for none.
        """
        self._most = most
        self._proposer = proposer
        self._proposers: dict[int, NgramProposer] = {}
        self._wanted: dict[int, int] = {}
        self._costs, self._model_costs = costs(_FORGETTING), costs(_MODEL_FORGETTING)
        self._decodes = Decodes()
        self._model = model
        self._chances: dict[int, ModelChance] = {}
        # The last step's drafts, by sequence.
        self._proposed: dict[int, Proposed] = {}

    def remove(self, handle: int) -> None:
        """Removes a sequence that has left."""
        self._proposers.pop(handle, None)
        self._wanted.pop(handle, None)
        self._chances.pop(handle, None)
        if self._model is not None:
            self._model.remove(handle)

    def clear(self) -> None:
        """Removes all sequences."""
        self._proposers.clear()
        self._wanted.clear()
        self._chances.clear()
        if self._model is not None:
            self._model.clear()

    def propose(self, allowed: Mapping[int, int], decodes: Decodes, claim: Claim) -> dict[int, list[int]]:
        """Returns sequences' drafts for a step, none of them empty.

        allowed: by handle, most drafts. decodes: of the step. claim: called before slots are written.
        """
        proposed: dict[int, list[int]] = {}
        of_model: dict[int, int] = {}
        self._proposed, left = {}, MOST_ROWS
        for handle, most in allowed.items():
            worth, modelled = self._worth(handle, decodes), self._worth_of_model(handle, decodes)
            if modelled and self._chances[handle].chance > self._proposers[handle].chance:
                of_model[handle] = min(most, left, modelled)
                left -= of_model[handle]
            elif drafts := self._proposers[handle].propose(min(most, left, worth)) if worth else []:
                proposed[handle] = drafts
                self._proposed[handle] = Proposed(self._proposers[handle].method, len(drafts))
                left -= len(drafts)
        if self._model is not None and of_model:
            found = self._model.propose(of_model, claim)
            self._proposed |= {handle: Proposed(Method.DRAFT_MODEL, len(drafts)) for handle, drafts in found.items()}
            proposed |= found
        return proposed

    def extend(self, sequence: SequenceState, token_ids: Sequence[int]) -> None:
        """Takes sampled tokens of a sequence.

        Ignores sequences with an eviction policy, because drafts must not add to their scores of attention.
        """
        if sequence.policy is not None:
            return
        handle = sequence.handle
        if (proposer := self._proposers.get(handle)) is None:
            proposer = self._proposers[handle] = self._proposer(sequence.tokens.tolist(), sequence.continuation)
        for token_id in token_ids:
            proposer.append(token_id)
        accepted, proposed = len(token_ids) - 1, self._proposed.get(handle)
        if proposed is not None:
            drafted_tokens, accepted_drafts = _METRICS[proposed.method]
            drafted_tokens.inc(proposed.drafts)
            accepted_drafts.inc(accepted)
        if self._model is not None:
            self._model.append(sequence, token_ids)
            by_model = 0 if proposed is None else proposed.by_model
            self._chances.setdefault(handle, ModelChance()).note(by_model, accepted)
        # The number falls by one per step at most: a single token that was not foreseen does not end the drafts.
        before = self._wanted.pop(handle, 0)
        worth = max(self._worth(handle, self._decodes), self._worth_of_model(handle, self._decodes))
        if wanted := max(before - 1, worth):
            self._wanted[handle] = wanted

    def keep_up(self, sequences: Sequence[SequenceState], claim: Claim) -> None:
        """Has the draft model keep up with a step that computed these sequences and whose tokens are sampled.

        The draft model computes every prompt without an eviction policy, because blocks of prompts are shared. It
        computes output only while its drafts are useful, and can compute skipped output later. claim: called before
        slots are written.
        """
        if self._model is not None:
            self._model.keep_up([sequence for sequence in sequences if self._follows(sequence)], claim)

    def _follows(self, sequence: SequenceState) -> bool:
        if sequence.policy is not None:
            return False
        is_prompt = sequence.computed <= len(sequence.tokens)
        return is_prompt or self._worth_of_model(sequence.handle, self._decodes) > 0

    def observe(self, decodes: Decodes, drafts: int, seconds: float) -> None:
        """Takes the time of a step that only decoded."""
        self._decodes = decodes
        by_model = sum(found.by_model for found in self._proposed.values())
        for costs, own in ((self._costs, drafts - by_model), (self._model_costs, by_model)):
            # For a step with drafts of both kinds, the time of each kind is not known.
            if own == drafts:
                costs.observe(decodes, drafts, seconds)

    def wanted(self, handles: Sequence[int]) -> dict[int, int]:
        """Returns how many drafts are worth their computation in the next step, by handle; leaves out 0."""
        return {handle: self._wanted[handle] for handle in handles if handle in self._wanted}

    def _worth(self, handle: int, decodes: Decodes) -> int:
        """Returns how many drafts from a text each save more time than they cost."""
        proposer = self._proposers.get(handle)
        return 0 if proposer is None else self._count(proposer.chance, self._costs.least_chance(decodes))

    def _worth_of_model(self, handle: int, decodes: Decodes) -> int:
        """Returns how many drafts of the draft model each save more time than they cost."""
        found = self._chances.get(handle)
        return 0 if found is None else self._count(found.chance, self._model_costs.least_chance(decodes))

    def _count(self, chance: float, least: float) -> int:
        """Returns how many drafts are worth computing: a draft is right only if all earlier drafts are, too."""
        if chance < least:
            return 0
        return min(self._most, int(math.log(least) / math.log(min(chance, 0.999))))
