"""The first eviction of a sequence: a second table, and the blocks that it leaves in the cache."""

import dataclasses

import pytest

from cachemgr.errors import SequenceEvictsError
from cachemgr.operators.state_dump import state_hash
from cachemgr.slices import at_once
from cachemgr.types import ForgetTarget, ManagerConfig, Quota
from protos.errors import InvalidField
from tests.support.in_process_manager import POLICIES, Live, World, asked
from tests.support.scrape import scraped

KEYDIFF = asked("KEYDIFF", start_tokens=1, recent_tokens=2, max_cache_tokens=8, period_tokens=3)
AVERAGE = asked("AVERAGE", max_cache_tokens=8, period_tokens=2, during_prefill=True)
SNAPKV = asked("SNAPKV", max_cache_tokens=5, recent_tokens=2, score_window_tokens=2)
NAMES = [str(requested.message().kind) for requested in POLICIES]
PROMPT = list(range(10, 29))


def ready(num_blocks: int = 20, policy: object = KEYDIFF, **options: object) -> tuple[World, Live]:
    """Sequence "a", whose prompt of 19 tokens is computed and reported, which evicts before it computes more."""
    world = World(num_blocks)
    world.admit(PROMPT, "a", eviction_policy=policy, **options)
    live = world.live["a"]
    world.step(19)
    world.step(19)
    assert live.must_move
    return world, live


def advance(world: World, state: str) -> None:
    """Leads the sequence that `ready` made to a state: asking for its second table, given it, moved, or reported."""
    if state != "asking":
        world.sync()
    if state in ("moved", "reported"):
        world.step()
    if state == "reported":
        world.sync()


def used(world: World) -> int:
    return world.num_blocks - world.free


def test_a_sequence_moves_to_a_second_table_and_grows_no_more():
    world, live = ready()
    answer = world.sync()
    assert (answer.evicting_handles, answer.evicting_counts) == ([live.handle], [2])
    assert used(world) == 7
    assert world.queries.pool("e/0").cached_blocks == 0
    world.check()
    world.step()
    world.sync()
    assert live.moved
    assert used(world) == 2
    assert world.queries.pool("e/0").cached_blocks == 5
    (sequence,) = world.queries.sequences()
    assert (sequence.has_evicted_tokens, sequence.blocks_held, sequence.capacity) == (True, 2, 8)
    assert (len(sequence.tokens), sequence.computed) == (21, 20)
    world.check()
    world.compute(live, 60)
    world.sync()
    assert used(world) == 2
    assert live.kept <= 8


@pytest.mark.parametrize("requested", POLICIES, ids=NAMES)
@pytest.mark.parametrize("prompt", [3, 12, 31])
def test_prefix_hits_end_at_the_first_eviction(requested, prompt):
    world = World(40)
    tokens = list(range(100, 100 + prompt))
    world.admit(tokens, "a", eviction_policy=requested)
    live = world.live["a"]
    world.compute(live, 60)
    clean = live.policy.clean_tokens(prompt, prompt)
    known = list(live.tokens)
    world.finish("a")
    world.check()
    found = world.cached_tokens(known)
    assert clean <= found
    if live.moved:
        # An eviction may be later than the prompt's end, and then more was computed in full.
        assert found <= max(prompt, live.policy.most_kept or prompt)
    # The simulated device looks at every token that it attends to.
    world.step(60)
    world.finish(f"q{world.names}")
    assert world.cached_tokens([*tokens, 7, 7]) == min(prompt, found)


def test_a_second_table_is_granted_whole_or_counted_as_missing():
    world, _ = ready(7)
    world.admit([1], "b")
    answer = world.sync()
    assert (answer.evicting_handles, answer.missing_blocks) == ([], 1)
    assert used(world) == 6
    world.leave(world.live["b"])
    assert world.sync().evicting_counts == [2]


def test_no_sequence_gets_capacity_ahead_while_another_has_too_few_blocks_to_move_to():
    world = World(8, config=ManagerConfig(capacity_ahead_tokens=16, free_watermark=0))
    world.admit(PROMPT, "a", eviction_policy=KEYDIFF)
    world.admit([1], "b")
    world.step(19)
    world.step(19)
    assert world.free == 1
    answer = world.sync()
    assert (answer.evicting_handles, answer.missing_blocks, answer.extended_slots) == ([], 1, [])


def test_a_sequence_that_commits_nothing_evicts_in_its_own_table():
    world, live = ready(5, no_store=True)
    answer = world.sync()
    assert (answer.evicting_handles, answer.evicting_counts, answer.evicting_slots) == ([live.handle], [0], [])
    assert used(world) == 5
    world.check()
    own = live.tables[0][:2]
    world.step()
    world.sync()
    assert live.tables == [own]
    assert used(world) == 2
    world.compute(live, 50)
    world.finish("a")
    assert used(world) == 0
    assert world.queries.pool("e/0").cached_blocks == 0


def test_a_sequence_whose_blocks_a_fork_shares_evicts_into_a_second_table():
    world = World(30)
    world.admit(PROMPT, "a", eviction_policy=KEYDIFF, no_store=True)
    world.step(8)
    world.sync()
    world.fork("a", "b", 8)
    for _ in range(3):
        world.step(19, names={"a"})
    answer = world.sync()
    assert (answer.evicting_handles, answer.evicting_counts) == ([world.live["a"].handle], [2])


def test_a_sequence_with_shared_blocks_evicts_into_a_second_table():
    world = World(20)
    world.cache(PROMPT)
    world.admit([*PROMPT, 1], "a", eviction_policy=KEYDIFF, no_store=True)
    live = world.live["a"]
    world.step(20)
    world.confirm()
    world.step(20)
    assert world.sync().evicting_counts == [2]
    world.compute(live, 30)
    world.finish("a")
    assert world.cached_tokens(PROMPT) == 18


@pytest.mark.parametrize("options", [{}, {"no_store": True}], ids=str)
def test_with_an_unbounded_policy_the_second_table_grows_with_the_kept_tokens(options):
    world, live = ready(policy=SNAPKV, **options)
    assert world.sync().evicting_counts == [2]
    for computed in range(20, 40):
        world.compute(live, computed)
        world.sync()
        world.check()
        # Fourteen tokens went.
        assert live.evicted == 14
        assert live.capacity == -(-max(computed + 2 - 14, 7) // 4) * 4


def test_a_sequence_that_waits_gets_no_second_table():
    world = World(30)
    world.cache(PROMPT)
    world.admit([*PROMPT, 1], "a", eviction_policy=KEYDIFF)
    world.admit([*PROMPT, 1, 2], "b", eviction_policy=KEYDIFF)
    for _ in range(3):
        world.step(20)
    asking = [world.live[name].handle for name in "ab"]
    answer = world.sync()
    assert (answer.evicting_handles, answer.missing_blocks) == ([], 0)
    world.confirm()
    assert world.sync().evicting_handles == asking


@pytest.mark.parametrize(
    ("columns", "field"),
    [
        ({"evicting_handles": ["a", "never"]}, "evicting_handles[1]"),
        ({"evicted_handles": ["a"], "computed_tokens_before_eviction": [19]}, "evicted_handles[0]"),
        (
            {
                "evicted_handles": ["told"],
                "computed_tokens_before_eviction": [19],
                "trimmed_handles": ["told"],
                "trimmed_capacity_tokens": [20],
            },
            "trimmed_handles[0]",
        ),
        # It cannot compute more than it has slots for, nor beyond its first eviction.
        ({"handles": ["a"], "computed_tokens": [20], "new_token_counts": [0]}, "computed_tokens[0]"),
        (
            {
                "handles": ["told"],
                "computed_tokens": [21],
                "new_token_counts": [0],
                "evicted_handles": ["told"],
                "computed_tokens_before_eviction": [19],
            },
            "computed_tokens[0]",
        ),
    ],
    ids=str,
)
def test_columns_about_evictions_that_do_not_fit_are_refused_and_nothing_changes(columns, field):
    world = World(40)
    for name, requested in (("told", KEYDIFF), ("a", KEYDIFF), ("never", asked("SNAPKV")), ("plain", None)):
        first = 100 * ord(name[0])
        world.admit(list(range(first, first + 19)), name, eviction_policy=requested)
    world.step(19)
    world.step(19)
    world.sync({"told"})
    assert world.live["told"].granted
    progress = world.next_sync({"a", "never", "plain"})
    world.manager.sync(dataclasses.replace(progress, evicting_handles=[]))
    request = dataclasses.replace(world.next_sync(set()), evicting_handles=[])
    handles = {name: live.handle for name, live in world.live.items()}
    named = {key: [handles.get(entry, entry) for entry in column] for key, column in columns.items()}
    before = state_hash(world.queries.state())
    with pytest.raises(InvalidField) as refused:
        world.manager.sync(dataclasses.replace(request, **named))
    assert list(refused.value.fields) == [field]
    assert state_hash(world.queries.state()) == before
    world.manager.sync(request)


def test_a_sequence_that_evicts_before_its_promised_blocks_are_computed_voids_its_readers():
    world = World(30)
    world.admit(PROMPT, "a", eviction_policy=KEYDIFF)
    live = world.live["a"]
    assert world.admit(PROMPT, "b").wait_for_handle == live.handle
    world.step(5, names={"a"})
    world.manager.sync(dataclasses.replace(world.next_sync({"a"}), evicting_handles=[live.handle]))
    request = dataclasses.replace(
        world.next_sync({"a"}), evicted_handles=[live.handle], computed_tokens_before_eviction=[5]
    )
    assert world.manager.sync(request).void_handles == [world.live["b"].handle]
    assert world.queries.check_pool() == []


def away(world: World, live: Live, how: str) -> None:
    if how == "release":
        world.release("a")
    elif how == "sync":
        world.finish("a")
    elif how == "scheduler":
        world.start_scheduler()
    elif how == "lease":
        world.now += 5
        world.renew()
        world.now += 6
        world.manager.expire()
        world.start_scheduler()
    elif how == "executor":
        world.start_executor()
        world.sync()
    elif how == "executor's lease":
        world.silence_executor()
        assert world.sync().void_handles == [live.handle]
        world.sync()


@pytest.mark.parametrize("how", ["release", "sync", "scheduler", "lease", "executor", "executor's lease"])
@pytest.mark.parametrize("state", ["asking", "told", "moved", "reported"])
@pytest.mark.parametrize("options", [{}, {"no_store": True}], ids=str)
def test_a_sequence_that_evicts_frees_all_blocks_however_it_ends(how, state, options):
    world, live = ready(**options)
    advance(world, state)
    away(world, live, how)
    assert used(world) == 0
    world.check()
    world.run(PROMPT, "b")


# With other calls: forks, truncations, holds, quotas, forgetting, metrics


@pytest.mark.parametrize("state", ["told", "reported"])
def test_a_sequence_that_evicts_in_its_own_table_is_neither_forked_nor_truncated(state):
    world, _ = ready(no_store=True)
    advance(world, state)
    before = state_hash(world.queries.state())
    for call, field in (
        (lambda: world.manager.fork(world.caller, "a", "b"), "parent_sequence_id"),
        (lambda: world.manager.truncate(world.caller, "a", 15), "sequence_id"),
    ):
        with pytest.raises(SequenceEvictsError, match="has evicted tokens") as refused:
            call()
        assert list(refused.value.fields) == [field]
    assert state_hash(world.queries.state()) == before


def test_a_hold_keeps_the_blocks_computed_before_the_first_eviction():
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


def test_both_tables_count_for_the_quota_and_may_go_beyond_its_ceiling():
    world = World(20)
    at_once(world.operators.set_quota(Quota(tenant_id="t", device_ceiling=5), validate_only=False))
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


def test_a_second_table_leaves_the_floors_of_others():
    world = World(8)
    at_once(world.operators.set_quota(Quota(tenant_id="u", device_floor=2), validate_only=False))
    world.cache([1] * 8, tenant_id="u")
    world.admit(PROMPT, "a", eviction_policy=KEYDIFF, tenant_id="t")
    world.step(19)
    world.step(19)
    answer = world.sync()
    assert (answer.evicting_handles, answer.missing_blocks) == ([], 1)


@pytest.mark.parametrize(
    ("state", "options"),
    [
        *((state, {}) for state in ("asking", "told", "moved", "reported")),
        # A block that was released before it is forgotten is in no sequence.
        *((state, {"no_store": True}) for state in ("asking", "told", "moved")),
    ],
    ids=str,
)
def test_no_byte_of_a_forgotten_sequence_outlives_its_use(state, options):
    world, live = ready(salt="a", **options)
    advance(world, state)
    at_once(world.operators.forget(ForgetTarget(salt="a"), validate_only=False))
    world.check()
    world.sync()
    world.check()
    world.compute(live, 30)
    world.finish("a")
    world.run_executor_copies()
    world.check()
    assert world.device.held() == []
    assert world.free == 20


def test_a_table_that_is_missing_or_shared_is_reported_by_a_check(worlds):
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
    worlds.clear()


def test_those_that_begin_to_evict_are_counted_by_kind_once():
    world, live = ready()
    world.sync()
    assert scraped(world.manager, "cachemgr_evicting_sequences_total", kind="keydiff") is None
    world.compute(live, 40)
    world.sync()
    assert scraped(world.manager, "cachemgr_evicting_sequences_total", kind="keydiff") == 1
