"""Admissions: all or nothing, idempotent, and above the watermark."""

import dataclasses

import pytest

from cachemgr.errors import SequenceExistsError
from cachemgr.manager import CacheManager
from cachemgr.types import AdmitRequest, ManagerConfig, Retention
from tests.support.in_process_manager import World

VALID = AdmitRequest("a", "s", 1, "e", (1, 2, 3))


def test_repeating_an_admission_gives_the_same_answer_also_after_progress():
    world = World()
    world.cache(list(range(9)))
    first = world.admit([*range(9), 9], "a")
    assert first.transfers
    again = world.manager.admit(world.live["a"].request)
    assert again == first
    world.step()
    world.confirm()
    world.sync()
    assert world.manager.admit(world.live["a"].request) == first
    assert len(list(world.queries.sequences())) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"token_ids": (1, 2, 4)},
        {"token_ids": (1, 2)},
        {"salt": "x"},
        {"adapter_id": 0},
        {"no_store": True},
        {"no_read": True},
        {"retention": Retention((), 40)},
    ],
    ids=str,
)
def test_the_same_id_with_other_content_is_refused(change):
    world = World()
    world.manager.admit(VALID)
    with pytest.raises(SequenceExistsError):
        world.manager.admit(dataclasses.replace(VALID, **change))


def test_an_admission_leaves_the_watermark_free_unless_no_other_sequence_runs():
    world = World(10, config=ManagerConfig(capacity_ahead_tokens=0, free_watermark=0.3))
    assert world.admit(list(range(32)), "a").admitted
    assert not world.admit([99]).admitted
    world.finish("a")
    assert world.admit(list(range(100, 140)), "b").admitted


def test_a_sequence_gets_capacity_ahead_while_the_watermark_stays_free():
    world = World(10, config=ManagerConfig(capacity_ahead_tokens=8, free_watermark=0.2))
    assert world.admit([1, 2], "a").capacity_tokens == 8
    assert world.admit(list(range(10, 28)), "b").capacity_tokens == 24
    assert world.admit([3]).admitted is False


def test_only_admitted_tokens_count_as_queried():
    world = World(4)
    world.cache(list(range(9)))
    world.run(list(range(9)), "a")
    assert not world.admit(list(range(50, 60))).admitted
    pool = world.queries.pool("e/0")
    assert (pool.queried_tokens, pool.hit_tokens) == (18, 8)


def test_handles_grow_and_begin_behind_those_of_an_earlier_manager():
    world = World()
    handles = [world.admit([token]).sequence_handle for token in range(3)]
    assert handles == sorted(set(handles))
    later = World()
    later.manager = CacheManager(2, lambda: later.now)
    later.start_executor()
    later.start_scheduler()
    assert later.admit([1]).sequence_handle > handles[-1]


@pytest.mark.parametrize("lower", [{"host_blocks": 3}, {"disk_blocks": 3}])
def test_an_admission_allocates_slots_whose_offload_is_not_confirmed(lower):
    world = World(4, windows=(None, 2), **lower)
    world.cache([0, 0, 0, 0, 1, 0, 0, 0, 0, 0], generate=4)
    assert world.admit([0, 0, 0, 0, 0, 0, 0, 0, 1, 0], "b").cached_tokens == 4
    live = world.live["b"]
    world.step(4, names={"b"})
    assert (live.computed, len(world.done)) == (8, 4)
    world.finish("b")
    # A full block of the first group that is evicted takes the window's block of the same key with it.
    request = world.request([0, 0, 0, 0, 1, 0, 0, 1, 1], "c")
    assert world.queries.preview(request, 1).admitted
    assert world.manager.admit(request).admitted
    world.check()
    world.confirm()
