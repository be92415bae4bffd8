"""Properties of all policies."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from executor.eviction.base import scored_rows
from executor.eviction.engine import EVICTORS, Eviction
from executor.step import Evicted
from protos.kvcommon.eviction import AREAS, WINDOWS, Kind
from tests.unit.executor.eviction.driving import KINDS, Driven, World, policy

JOINT = (*WINDOWS, Kind.LAST)
BY_LAYER = (*AREAS, Kind.TOVA)
UNORDERED = [kind for kind in KINDS if kind not in AREAS]
DURING_PREFILL = (Kind.SLIDING_WINDOW, Kind.H2O, Kind.TOVA, Kind.ROCO, Kind.AVERAGE, Kind.KEYDIFF, Kind.KNORM)

lengths = st.integers(30, 70)
chunks = st.integers(1, 40)
seeds = st.integers(0, 1000)


@pytest.mark.parametrize("kind", KINDS)
@given(prompt=st.integers(1, 50), length=lengths, chunk=chunks, seed=seeds, early=st.booleans())
@settings(max_examples=8)
def test_exactly_as_many_stay_as_the_lengths_say(
    kind: Kind, prompt: int, length: int, chunk: int, seed: int, early: bool
) -> None:
    chosen = policy(kind, during_prefill=early and kind in DURING_PREFILL)
    driven = Driven(chosen, World(length, seed=seed), prompt)
    while driven.computed < length:
        before, slots = driven.positions, driven.positions.shape[-1]
        kept = driven.evict()
        if kept is not None:
            count = chosen.kept_after(slots, driven.computed, prompt)
            assert kept.dtype == torch.int64
            assert tuple(kept.shape) == (1 if kind in JOINT else 2, 1 if kind in (*JOINT, *BY_LAYER) else 2, count)
            assert bool((kept.diff(dim=-1) > 0).all())
            assert 0 <= int(kept.min()) <= int(kept.max()) < slots
            must = (before < chosen.start) | (before >= driven.computed - chosen.recent)
            for layer, head in ((0, 0), (0, 1), (1, 0), (1, 1)):
                stays = set(driven.positions[layer, head].tolist())
                assert set(before[layer, head][must[layer, head]].tolist()) <= stays
        wanted = min(chunk, prompt - driven.computed) if driven.computed < prompt else 1
        room = chosen.room(driven.positions.shape[-1], driven.computed, prompt)
        driven.compute(min(wanted, length - driven.computed, wanted if room is None else room))


@pytest.mark.parametrize("kind", UNORDERED)
@given(prompt=st.integers(1, 30), length=lengths, chunk=chunks, seed=seeds)
@settings(max_examples=8)
def test_which_slots_tokens_are_in_does_not_matter(kind: Kind, prompt: int, length: int, chunk: int, seed: int) -> None:
    world, chosen = World(length, seed=seed), policy(kind)
    plain, shuffled = Driven(chosen, world, prompt), Driven(chosen, world, prompt, shuffle=True)
    plain.run(chunk)
    shuffled.run(chunk)
    assert len(plain.kept) == len(shuffled.kept)
    assert all(torch.equal(one, other) for one, other in zip(plain.kept, shuffled.kept, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_decides_the_same_again(kind: Kind) -> None:
    runs = []
    for _ in range(2):
        driven = Driven(policy(kind), World(80), 40)
        driven.run(16)
        runs.append(driven.kept)
    assert runs[0]
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_without_anything_to_evict_all_slots_stay(kind: Kind) -> None:
    driven = Driven(policy(kind), World(10), 10)
    driven.compute(10)
    kept = driven.evictor.keep(driven.contents(), 10)
    assert bool((kept == torch.arange(10)).all())


@pytest.mark.parametrize("kind", KINDS)
def test_the_share_of_the_scores_is_that_of_the_slots(kind: Kind) -> None:
    driven = Driven(policy(kind), World(40), 40)
    driven.compute(40)
    kept = driven.evictor.keep(driven.contents(), driven.policy.kept_after(40, 40, 40))
    mass = driven.evictor.kept_mass(kept)
    if not driven.policy.uses_scores:
        assert mass is None
    else:
        assert mass is not None
        assert 0 < float(mass) < 1
        whole = driven.evictor.kept_mass(torch.arange(40).expand(1, 1, -1))
        assert whole is not None
        assert float(whole) == pytest.approx(1)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if policy(kind).uses_scores])
def test_there_is_no_share_when_nothing_was_counted(kind: Kind) -> None:
    driven = Driven(policy(kind), World(10), 10)
    driven.evictor.observe(None, 10)
    driven.positions = torch.arange(10).expand(2, 2, -1)
    driven.computed = 10
    mass = driven.evictor.kept_mass(driven.evictor.keep(driven.contents(), 10))
    assert mass is not None
    assert mass.isnan()
    assert Eviction(1, 2, mass).result() == Evicted(1, 2, None)


@pytest.mark.parametrize("kind", KINDS)
def test_evictors_say_what_they_need(kind: Kind) -> None:
    made = EVICTORS[kind](policy(kind), World(1).space)
    assert made.ordered == (kind in AREAS)
    assert made.uses_squares == (kind is Kind.ROCO)


@pytest.mark.parametrize(
    ("kind", "early", "computed", "new", "rows"),
    [
        (Kind.SLIDING_WINDOW, False, 0, 40, 0),
        (Kind.RANDOM, False, 40, 1, 0),
        (Kind.H2O, False, 0, 10, 10),
        (Kind.H2O, False, 40, 1, 1),
        (Kind.SNAPKV, False, 0, 36, 0),
        (Kind.SNAPKV, False, 0, 40, 4),
        (Kind.SNAPKV, False, 38, 2, 2),
        (Kind.SNAPKV, False, 40, 1, 0),
        (Kind.TOVA, False, 0, 39, 0),
        (Kind.TOVA, False, 30, 10, 1),
        (Kind.TOVA, True, 0, 16, 1),
        (Kind.TOVA, True, 40, 1, 1),
    ],
)
def test_queries_that_count(kind: Kind, early: bool, computed: int, new: int, rows: int) -> None:
    assert scored_rows(policy(kind, during_prefill=early), 40, computed, new) == rows
