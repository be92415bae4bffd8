"""Steps whose tokens have slots that are not their positions, and steps that count attention, on every forward."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from executor.batch import HostBatch, ScoredSequence, SequenceState, build_batch
from executor.cache.pool import KvPools
from executor.models.forward import ForwardOutput, Model
from executor.step import NewSequence
from tests.unit.executor.conftest import load, load_fused, on_torch
from tests.unit.executor.tiny_models import VOCAB

BLOCK_SIZE = 4
# Of three sequences: tokens computed before, those of them that were evicted, and tokens of the step.
COMPUTED, EVICTED, COUNTS = (30, 9, 70), (13, 0, 40), (1, 6, 20)
COUNTED = (ScoredSequence(0, 1, squares=True), ScoredSequence(2, 8))


def running(compacted: bool = False) -> list[SequenceState]:
    """The sequences, every token known, with more blocks than they need."""
    states, width = [], 30
    for number, (computed, evicted, count) in enumerate(zip(COMPUTED, EVICTED, COUNTS, strict=True)):
        tokens = tuple((5 + 3 * number + 7 * place) % VOCAB for place in range(computed + count))
        table = tuple(1 + number + 3 * block for block in range(width))
        sequence = SequenceState.of(NewSequence(number, tokens, computed, computed, (table,)), number)
        states.append(sequence)
        sequence.kept = computed - evicted
        sequence.compacted = compacted
    return states


def work(compacted: bool = False, counted: tuple[ScoredSequence, ...] = ()) -> HostBatch:
    last_tokens = torch.zeros(8, dtype=torch.int64)
    return build_batch(running(compacted), COUNTS, last_tokens, BLOCK_SIZE, 1, counted)


def scores(model: Model, packed: HostBatch) -> ForwardOutput:
    """Over pools full of the same numbers every time."""
    pools = KvPools(model.groups, 100, BLOCK_SIZE, torch.float32, torch.device("cpu"))
    generator = torch.Generator().manual_seed(3)
    for pool in pools.pools:
        for cache in (pool.k, pool.v):
            cache.copy_(torch.randn(cache.shape, generator=generator))
    result = model.forward.prepare(packed, pools)()
    return replace(result, logits=result.logits.float().clone())


def test_a_token_stands_behind_what_is_kept_and_is_rotated_by_its_position() -> None:
    packed = work()
    assert packed.cache_positions.tolist() == [17, *range(9, 15), *range(30, 50)]
    assert packed.positions.tolist() == [30, *range(9, 15), *range(70, 90)]
    assert packed.seq_lens.tolist() == [18, 15, 50]
    assert packed.tables[0].shape == (3, -(-50 // BLOCK_SIZE))
    assert packed.slot_mappings[0][0] == (1 + 3 * (17 // BLOCK_SIZE)) * BLOCK_SIZE + 17 % BLOCK_SIZE
    assert packed.written_slots[0][0] == 1 + 3 * (17 // BLOCK_SIZE)
    assert packed.token_ids.tolist()[0] == (5 + 7 * 30) % VOCAB
    assert [sequence.handle for sequence in packed.sampling] == [0, 1, 2]


def test_compacted_tokens_are_rotated_by_their_slots() -> None:
    packed = work(compacted=True)
    assert packed.positions.tolist() == packed.cache_positions.tolist() == [17, *range(9, 15), *range(30, 50)]
    assert packed.token_ids.tolist()[0] == (5 + 7 * 30) % VOCAB


def test_counted_rows_are_a_batch_of_their_own() -> None:
    batch = work(counted=COUNTED).to_device()
    assert batch.scored is not None
    assert batch.scored.rows.tolist() == [0, *range(19, 27)]
    assert batch.scored.counts.tolist() == [1, 8]
    paged = batch.scored.paged
    assert paged.query_start.tolist() == [0, 1, 9]
    assert paged.seq_lens.tolist() == [18, 50]
    assert torch.equal(paged.block_tables, batch.paged[0].block_tables[[0, 2]])
    assert work().to_device().scored is None


@pytest.mark.parametrize(
    ("counted", "groups", "words"),
    [
        ((ScoredSequence(0, 2),), 1, "2 rows of a sequence that computes 1"),
        ((ScoredSequence(0, 0),), 1, "0 rows"),
        ((ScoredSequence(0, 1), ScoredSequence(0, 1)), 1, "named twice"),
        ((ScoredSequence(0, 1),), 2, "one layer group"),
    ],
)
def test_what_a_step_does_not_have_cannot_be_counted(
    counted: tuple[ScoredSequence, ...], groups: int, words: str
) -> None:
    with pytest.raises(ValueError, match=f"scored: .*{words}"):
        build_batch(running(), COUNTS, torch.zeros(8, dtype=torch.int64), BLOCK_SIZE, groups, counted)


FORWARDS = pytest.mark.parametrize("other", [load, load_fused], ids=["compiled", "fused"])


@FORWARDS
@pytest.mark.parametrize("compacted", [False, True])
def test_all_forwards_count_the_same(
    other: Callable[[Path], Model], compacted: bool, model_folder: Callable[[str], Path]
) -> None:
    folder = model_folder("llama, compiled")
    models = on_torch(folder), other(folder)
    assert type(models[0].forward) is not type(models[1].forward)
    packed = work(compacted, COUNTED)
    expected, computed = (scores(model, packed) for model in models)
    torch.testing.assert_close(computed.logits, expected.logits, rtol=1e-4, atol=1e-4)
    for one, truth, entry in zip(computed.scores, expected.scores, COUNTED, strict=True):
        slots = int(packed.seq_lens[entry.sequence])
        assert one.rows == truth.rows == entry.rows
        assert one.weights.shape == (4, 2, slots)
        torch.testing.assert_close(one.weights, truth.weights, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(one.weights.sum(2), torch.full((4, 2), 2.0 * entry.rows))
        assert (one.squares is None) == (truth.squares is None) == (not entry.squares)
        if one.squares is not None and truth.squares is not None:
            torch.testing.assert_close(one.squares, truth.squares, rtol=1e-4, atol=1e-4)


def decoding(counted: tuple[ScoredSequence, ...] = ()) -> HostBatch:
    sequences = running()
    return build_batch([sequences[0], sequences[2]], (1, 1), torch.zeros(8, dtype=torch.int64), BLOCK_SIZE, 1, counted)


@FORWARDS
def test_decoding_steps_count_the_same(other: Callable[[Path], Model], model_folder: Callable[[str], Path]) -> None:
    folder = model_folder("llama, compiled")
    packed = decoding((ScoredSequence(1, 1),))
    expected, computed = (scores(model, packed).scores[0].weights for model in (on_torch(folder), other(folder)))
    torch.testing.assert_close(computed, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("build", [on_torch, load, load_fused], ids=["torch", "compiled", "fused"])
def test_counting_changes_no_logits(build: Callable[[Path], Model], model_folder: Callable[[str], Path]) -> None:
    model = build(model_folder("llama, compiled"))
    for counting, not_counting in ((work(counted=COUNTED), work()), (decoding((ScoredSequence(0, 1),)), decoding())):
        counted, uncounted = scores(model, counting), scores(model, not_counting)
        assert torch.equal(counted.logits, uncounted.logits)
        assert uncounted.scores == ()


def test_evicted_tokens_are_as_if_they_had_never_been_kept(model_folder: Callable[[str], Path]) -> None:
    """A whole prefix evicted and the rest numbered anew: the logits of a prompt that is only the rest."""
    model = load(model_folder("llama, compiled"))
    pools = KvPools(model.groups, 20, BLOCK_SIZE, torch.float32, torch.device("cpu"))
    tokens = [(3 + 11 * place) % VOCAB for place in range(24)]

    def logits(joined: list[int], first: int, kept: int) -> Tensor:
        new = NewSequence(1, tuple(joined), len(joined), first, (tuple(range(1, 19)),))
        sequence = SequenceState.of(new, 0)
        sequence.kept, sequence.compacted = kept, True
        packed = build_batch([sequence], [len(joined) - first], torch.zeros(8, dtype=torch.int64), BLOCK_SIZE, 1)
        return model.forward.prepare(packed, pools)().logits.clone()

    assert torch.equal(logits(tokens, 10, 0), logits(tokens[10:], 0, 0))
