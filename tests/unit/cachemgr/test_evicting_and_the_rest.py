"""What else is done to sequences that evict tokens: forks, truncations, holds, pins, quotas, forgetting, metrics."""

import pytest

from cachemgr.errors import SequenceEvictsError
from cachemgr.operators.state_dump import state_hash
from cachemgr.types import ForgetTarget, Quota
from tests.support.in_process_manager import World
from tests.support.scrape import scraped
from tests.unit.cachemgr.test_evicting import KEYDIFF, PROMPT, ready, used


@pytest.mark.parametrize("options", [{}, {"no_store": True}], ids=str)
def test_what_has_evicted_tokens_is_neither_forked_nor_cut(options):
    world, _ = ready(**options)
    world.sync()
    world.step()
    world.sync()
    before = state_hash(world.queries.state())
    for call, field in (
        (lambda: world.manager.fork(world.caller, "a", "b"), "parent_sequence_id"),
        (lambda: world.manager.truncate(world.caller, "a", 15), "sequence_id"),
    ):
        with pytest.raises(SequenceEvictsError, match="has evicted tokens") as refused:
            call()
        assert list(refused.value.fields) == [field]
    assert state_hash(world.queries.state()) == before


def test_who_is_told_to_stay_may_be_moving_already():
    world, _ = ready(no_store=True)
    world.sync()
    with pytest.raises(SequenceEvictsError):
        world.manager.fork(world.caller, "a", "b")
    with pytest.raises(SequenceEvictsError):
        world.manager.truncate(world.caller, "a", 15)


def test_a_hold_keeps_what_it_computed_before_and_nothing_of_its_own():
    world, live = ready()
    world.sync()
    world.compute(live, 40)
    world.sync()
    assert world.manager.hold(world.caller, "a", "owner", 5.0) == 5
    world.finish("a")
    (hold,) = world.queries.holds()
    assert hold.num_blocks == 5
    assert used(world) == 5
    world.cache([1] * 40)
    assert world.cached_tokens([*PROMPT, 1]) == 19
    world.check()


def test_both_tables_count_for_the_quota_and_may_go_beyond_its_ceiling():
    world = World(20)
    world.operators.set_quota(Quota(tenant_id="t", device_ceiling=5), validate_only=False)
    world.admit(PROMPT, "a", eviction_policy=KEYDIFF, tenant_id="t")
    live = world.live["a"]
    world.step(19)
    world.step(19)
    world.sync()
    assert live.granted
    assert [device for *_, device, _ in world.queries.quotas()] == [7]
    assert not world.admit([1], tenant_id="t").admitted
    world.check()
    world.compute(live, 40)
    world.finish("a")
    world.check()
    assert world.admit([1], tenant_id="t").admitted


def test_others_floors_are_not_taken_to_move_to():
    world = World(8)
    world.operators.set_quota(Quota(tenant_id="u", device_floor=2), validate_only=False)
    world.cache([1] * 8, tenant_id="u")
    world.admit(PROMPT, "a", eviction_policy=KEYDIFF, tenant_id="t")
    world.step(19)
    world.step(19)
    answer = world.sync()
    assert (answer.evicting_handles, answer.blocks_short) == ([], 1)
    world.check()


@pytest.mark.parametrize(
    ("state", "options"),
    [
        *((state, {}) for state in ("asking", "told", "moved", "reported")),
        # What was given back before it is forgotten is nobody's any more.
        *((state, {"no_store": True}) for state in ("asking", "told", "moved")),
    ],
    ids=str,
)
def test_no_byte_of_what_is_forgotten_outlives_its_use(state, options):
    world, live = ready(salt="a", **options)
    if state != "asking":
        world.sync()
    if state in ("moved", "reported"):
        world.step()
    if state == "reported":
        world.sync()
    world.operators.forget(ForgetTarget(salt="a"), validate_only=False)
    world.check()
    world.sync()
    world.check()
    world.compute(live, 30)
    world.finish("a")
    world.run_executor_copies()
    world.check()
    assert world.device.held() == []
    assert world.free == 20


def test_a_table_that_is_missing_or_shared_is_reported_by_a_check():
    world, live = ready()
    world.sync()
    sequence = world.manager._state.sequences["a"]
    table, eviction = sequence.tables[0], sequence.eviction
    lost = eviction.private.pop()
    assert [one.slot for one in world.queries.check_pool()] == [lost.index]
    eviction.private.append(lost)
    eviction.private[0].writer = None
    assert [one.slot for one in world.queries.check_pool()] == [eviction.private[0].index]
    eviction.private[0].writer = sequence
    world.compute(live, 30)
    world.sync()
    assert world.queries.check_pool() == []
    table.blocks[0].writer = None
    assert [one.slot for one in world.queries.check_pool()] == [table.blocks[0].index]


def test_those_that_begin_to_evict_are_counted_by_kind_once():
    world, live = ready()
    world.sync()
    assert scraped(world.manager, "cachemgr_evicting_sequences_total", kind="keydiff") is None
    world.compute(live, 40)
    world.sync()
    assert scraped(world.manager, "cachemgr_evicting_sequences_total", kind="keydiff") == 1
