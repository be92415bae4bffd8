"""Kept tokens move to other slots: which slots move where, and which copies may run in any order."""

from collections import Counter
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from executor.batch import SequenceState
from executor.eviction import engine
from executor.eviction.engine import TokenEviction, in_place, moved
from kernels.compact_kv.launch import compact_kv
from protos.kvcommon.eviction import Kind
from protos.kvcommon.v1 import kvcommon_pb2 as common
from tests.unit.executor.eviction.driving import BLOCK, CPU, KINDS, ROTATED, TOKENS, evictions, policy

# Of the table to which the first eviction moves the tokens: blocks apart from those before, and blocks among those.
FIRST_BLOCKS = (20, 3)


def chosen(slots: int, count: int, seed: int) -> Tensor:
    """[L, Hkv, count]: slots that stay, ascending, different in each layer and head."""
    ranks = torch.rand(3, 2, slots, generator=torch.Generator().manual_seed(seed)).argsort(-1)
    return ranks[..., :count].sort(-1).values


@pytest.mark.parametrize(("padding", "counts"), [(0, False), (2, False), (2, True)])
@pytest.mark.parametrize(("slots", "count"), [(9, 8), (20, 12), (20, 3), (40, 39), (7, 1)])
def test_slots_beyond_the_new_length_fill_the_gaps(slots: int, count: int, padding: int, counts: bool) -> None:
    for seed in range(20):
        kept = chosen(slots, count, seed)
        order = in_place(kept, slots)
        assert torch.equal(order.sort(-1).values, kept)
        most = int((order != torch.arange(count)).sum(-1).max())
        sources, targets = moved(order, min(count, most + padding), counts=counts)
        assert targets.shape[-1] == (most if counts else min(count, most + padding))
        cache = torch.arange(slots).expand(3, 2, slots).clone()
        cache.scatter_(-1, targets, cache.gather(-1, sources))
        assert torch.equal(cache[..., :count], order)
        # Each slot that stays below the new length is where it was.
        assert torch.equal(cache[..., :count] >= count, order != torch.arange(count))


class Marked(TokenEviction):
    """Token eviction of keys that begin with the position of their token."""

    def observe(self, sequences: Sequence[SequenceState], counts: Sequence[int], scores: Any) -> None:
        for sequence, count in zip(sequences, counts, strict=True):
            positions, keys = self.positions(sequence), self._keys(sequence)[..., 0].long()
            before = positions < sequence.computed - count
            assert torch.equal(keys[before], positions[before])
            slots = self._flat(sequence.tables[0], torch.arange(sequence.kept))
            self._pools.pools[0].k.flatten(1, 2)[:, slots, :, 0] = positions.transpose(1, 2).float()
        super().observe(sequences, counts, scores)


@pytest.mark.parametrize("first_block", FIRST_BLOCKS)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_the_keys_of_kept_tokens_are_where_their_positions_are(kind: Kind, first_block: int) -> None:
    assert evictions(policy(kind), CPU, Marked, first_block=first_block)


@pytest.mark.parametrize("first_block", FIRST_BLOCKS)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_copies_that_overlap_are_announced(kind: Kind, first_block: int) -> None:
    check_overlap(kind, first_block)


@pytest.mark.parametrize("kind", ROTATED, ids=lambda kind: kind.name)
def test_copies_that_overlap_are_announced_where_keys_are_rotated(kind: Kind) -> None:
    check_overlap(kind, FIRST_BLOCKS[0], positions=common.EVICTION_POSITIONS_COMPACTED)


def check_overlap(kind: Kind, first_block: int, **fields: int) -> None:
    calls = Counter[bool]()

    def checked(k: Tensor, v: Tensor, sources: Tensor, targets: Tensor, *, overlap: bool) -> None:
        calls[overlap] += 1
        sources, targets = (slots.expand(2, 2, -1) for slots in (sources, targets))
        for one in range(2):
            for head in range(2):
                pairs = list(zip(sources[one, head].tolist(), targets[one, head].tolist(), strict=True))
                read = Counter(source for source, _ in pairs)
                # A slot may be copied to itself, by the same copy.
                others = [target for source, target in pairs if read[target] - (source == target)]
                assert overlap or not others, f"{others} are written while other copies read them"
        compact_kv(k, v, sources, targets, overlap=overlap)

    with patch.object(engine, "compact_kv", checked):
        assert evictions(policy(kind, **fields), CPU, first_block=first_block)
    # The first eviction moves all tokens to other blocks.
    assert calls[first_block <= TOKENS // BLOCK]
