"""Drafts of a smaller model with the same vocabulary.

Its keys and values share the model's blocks. So caching, sharing, copies between tiers and restoration of a prefix
apply to both models, and the cache manager counts their bytes together. The draft model computes every prompt, so that
a sequence drafts from its first token on, but output only as far as the drafts need it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tokenizers import Tokenizer

from executor.batch import SequenceState, build_batch
from executor.cache.pool import KvPools, Pool, block_bytes
from executor.cache.shares import Shares
from executor.cache.tiers.hazards import SlotRef
from executor.errors import ModelError
from executor.models.files import ModelFiles
from executor.models.forward import ForwardOutput, Model
from executor.models.tokenizer import TokenizerFiles
from executor.step import Tier

# Waits until the copies that use these slots have ended, because the slots are about to be written.
Claim = Callable[[Sequence[SlotRef]], None]


@dataclass(frozen=True)
class Draft:
    """A draft model beside another model. group: the other model's layer group that shares its blocks with it."""

    model: Model
    files: ModelFiles
    group: int

    @classmethod
    def of(
        cls, files: ModelFiles, draft: Model, tokenizer: TokenizerFiles, model: Model, own_tokenizer: TokenizerFiles
    ) -> "Draft":
        """files, tokenizer: the draft model's. own_tokenizer: the other model's.

        Raises ModelError if the draft model cannot draft for the other model.
        """
        pair = [one.json for one in (tokenizer, own_tokenizer) if one.json]
        vocabularies = [Tokenizer.from_str(one.decode()).get_vocab() for one in pair]
        if draft.vocab_size != model.vocab_size or vocabularies[1:] != vocabularies[:-1]:
            raise ModelError(
                f"{draft.name} and {model.name} have different vocabularies ({draft.vocab_size} and {model.vocab_size} "
                "tokens), and a draft model must have the same"
            )
        if len(draft.groups) > 1 or draft.groups[0].shape.window is not None:
            raise ModelError(f"{draft.name} has attention windows, and a draft model must have none")
        full = [number for number, group in enumerate(model.groups) if group.shape.window is None]
        if not full:
            raise ModelError(f"no layer of {model.name} keeps all tokens, as a draft model needs it")
        return cls(draft, files, full[0])

    def with_bytes(self, sizes: Sequence[int], block_size: int) -> tuple[int, ...]:
        """Returns the bytes of one block of each group, including the draft model's. sizes: the bytes without these."""
        added = block_bytes(self.model.groups, block_size, self.model.dtype)[0]
        return tuple(size + added * (number == self.group) for number, size in enumerate(sizes))


class DraftModel:
    """Follows the sequences of a running batch, and proposes the draft model's greedy next tokens."""

    def __init__(self, draft: Draft, pools: KvPools) -> None:
        """pools: only the draft model's, with the slots of its group."""
        self.pools = pools
        self._model = draft.model
        self._group = draft.group
        self._followed: dict[int, _Followed] = {}
        # All ids are known here.
        self._no_tokens = torch.zeros(1, dtype=torch.int64, device=draft.model.device)

    @classmethod
    def of(cls, draft: Draft, shares: Shares, block_size: int) -> "DraftModel":
        """Creates a draft model with new pools. shares: of all groups of the other model."""
        of_group = slice(draft.group, draft.group + 1)
        own = Shares(shares.blocks[of_group], shares.slots[of_group], shares.memory_bytes)
        return cls(draft, KvPools(draft.model.groups, own, block_size, draft.model.dtype, draft.model.device))

    @property
    def beside(self) -> dict[int, Pool]:
        """The draft model's pool, by the other model's group that shares its blocks."""
        return {self._group: self.pools.pools[0]}

    def remove(self, handle: int) -> None:
        """Removes a sequence that has left."""
        self._followed.pop(handle, None)

    def clear(self) -> None:
        """Removes all sequences."""
        self._followed.clear()

    def append(self, sequence: SequenceState, token_ids: Sequence[int]) -> None:
        """Takes tokens that the sequence has sampled."""
        self._of(sequence).append(token_ids)

    def keep_up(self, sequences: Sequence[SequenceState], claim: Claim) -> None:
        """Computes the draft model's K and V of each block that has become full: other sequences may share the block.

        claim: called before slots are written. A copy may read the blocks of skipped output, which were full before.
        """
        size, lagging, ends = self.pools.block_size, [], []
        for sequence in sequences:
            followed = self._of(sequence)
            end = min(sequence.computed, self._model.max_positions)
            if followed.ready < end // size * size:
                lagging.append(followed)
                ends.append(end)
        if lagging:
            self._compute(lagging, ends, claim, samples=False)

    def propose(self, wanted: Mapping[int, int], claim: Claim) -> dict[int, list[int]]:
        """Returns the wanted number of tokens per sequence, by handle; none where the draft model's positions end."""
        chosen = {
            handle: count
            for handle, count in wanted.items()
            if count and self._followed[handle].length + count <= self._model.max_positions
        }
        for index in range(max(chosen.values(), default=0)):
            active = [self._followed[handle] for handle, count in chosen.items() if count > index]
            output = self._compute(active, [one.length + index for one in active], claim, samples=True)
            best = output.logits.argmax(-1) if output.best is None else output.best
            for followed, token_id in zip(active, best.tolist(), strict=True):
                followed.draft(index, token_id)
        return {handle: self._followed[handle].drafts(count) for handle, count in chosen.items()}

    def _of(self, sequence: SequenceState) -> "_Followed":
        if (followed := self._followed.get(sequence.handle)) is None:
            followed = self._followed[sequence.handle] = _Followed(sequence, self._group)
        return followed

    def _compute(
        self, followed: Sequence["_Followed"], ends: Sequence[int], claim: Claim, *, samples: bool
    ) -> ForwardOutput:
        """Computes each sequence up to its end. samples: whether the logits after the end are wanted."""
        states = [one.state(end, end if samples else end + 1) for one, end in zip(followed, ends, strict=True)]
        counts = [end - one.ready for one, end in zip(followed, ends, strict=True)]
        batch = build_batch(states, counts, self._no_tokens, self.pools.block_size, 1)
        claim([(Tier.DEVICE, self._group, slot) for slot in np.unique(batch.written_slots[0]).tolist()])
        output = self._model.forward.prepare(batch, self.pools)()
        for one, end in zip(followed, ends, strict=True):
            one.ready = end
        return output


class _Followed:
    """A sequence as the draft model has it: ids followed by drafts, of which the first `ready` are computed."""

    def __init__(self, sequence: SequenceState, group: int) -> None:
        self.length = len(sequence.tokens)
        self.ready = sequence.cached
        self._sequence = sequence
        self._group = group
        self._ids = np.full(2 * self.length + 64, -1, dtype=np.int64)
        self._ids[: self.length] = sequence.tokens

    def state(self, end: int, known: int) -> SequenceState:
        """Returns the state for a batch that computes the tokens from `ready` to `end`."""
        return SequenceState(
            handle=self._sequence.handle,
            tokens=self._ids[:end],
            num_prompt=0,
            computed=self.ready,
            known=known,
            row=0,
            tables=[self._sequence.tables[self._group]],
            sampling=self._sequence.sampling,
            kept=self.ready,
        )

    def append(self, token_ids: Sequence[int]) -> None:
        """Appends the next tokens. If they equal earlier drafts, these stay computed."""
        end = self.length + len(token_ids)
        self._reserve(end)
        differs = np.flatnonzero(self._ids[self.length : end] != token_ids)
        if len(differs):
            self.ready = min(self.ready, self.length + int(differs[0]))
        self._ids[self.length : end] = token_ids
        self.length = end

    def draft(self, index: int, token_id: int) -> None:
        """Sets the draft with this number to a token."""
        self._reserve(self.length + index + 1)
        self._ids[self.length + index] = token_id

    def drafts(self, count: int) -> list[int]:
        """Returns the first `count` drafts."""
        return list(map(int, self._ids[self.length : self.length + count]))

    def _reserve(self, size: int) -> None:
        if size > len(self._ids):
            self._ids = np.concatenate([self._ids, np.full(size, -1, dtype=np.int64)])
