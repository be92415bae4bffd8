"""No policy waits for the device: on the meta device, which has no values, any value that is read is an error."""

import pytest
import torch

from executor.batch import SequenceState
from executor.cache.pool import KvPools, LayerGroup, LayerShape
from executor.eviction.engine import TokenEviction
from executor.step import NewSequence
from kernels.scores import SequenceScores
from protos.kvcommon.eviction import Kind
from tests.unit.executor.eviction.driving import KINDS, policy

META = torch.device("meta")
LAYERS, HEADS, HEAD_DIM, BLOCK = 2, 2, 8, 4
PROMPT, TOKENS = 24, 60
ROTATED = [Kind.SLIDING_WINDOW, Kind.H2O]


def scores_of(slots: int, rows: int) -> SequenceScores:
    weights, squares = (torch.empty(LAYERS, HEADS, slots, device=META) for _ in range(2))
    return SequenceScores(weights, squares, rows)


def evictions(kind: Kind, *, compacted: bool) -> int:
    """Evictions of a sequence of TOKENS tokens on the meta device."""
    shape = LayerShape(None, HEADS, HEAD_DIM)
    pools = KvPools([LayerGroup(shape, tuple(range(LAYERS)))], 40, BLOCK, torch.float32, META)
    eviction = TokenEviction(pools, torch.empty(HEAD_DIM // 2, device=META), META)
    chosen = policy(kind, BLOCK, **({"positions": 2} if compacted else {}))
    table = tuple(range(1, 1 + TOKENS // BLOCK))
    sequence = SequenceState.of(NewSequence(1, (5,) * PROMPT, PROMPT, 0, (table,), policy=chosen), 0)
    eviction.add(sequence)
    count, begun, new = 0, False, PROMPT
    for step in range(1, TOKENS - PROMPT + 2):
        wants = chosen.kept_after(sequence.kept, sequence.computed, PROMPT) < sequence.kept
        # The first eviction moves the tokens to other blocks, all later ones stay in these.
        fresh = tuple(range(20, 20 + TOKENS // BLOCK)) if wants and not begun else None
        begun = begun or wants
        evicted = eviction.evict(sequence, fresh, step)
        count += evicted is not None
        eviction.scored([sequence], [new])
        sequence.computed += new
        sequence.kept += new
        eviction.observe([sequence], [new], [scores_of(sequence.kept, new)] if chosen.uses_scores else [])
        if kind is Kind.ADAPTIVE_WINDOW:
            eviction.wanted_window(sequence)
        new = 1
    return count


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_no_policy_reads_from_the_device(kind: Kind) -> None:
    assert evictions(kind, compacted=False)


@pytest.mark.parametrize("kind", ROTATED, ids=lambda kind: kind.name)
def test_rotating_keys_reads_nothing_from_the_device(kind: Kind) -> None:
    assert evictions(kind, compacted=True) > 1
