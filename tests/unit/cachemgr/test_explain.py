"""Reasons of prefix hits and misses."""

import pytest

from cachemgr.blocks.removal_history import RemovalHistory
from cachemgr.errors import UnknownSequenceError
from cachemgr.operators.state_dump import state_hash
from cachemgr.slices import at_once
from cachemgr.types import BlockFilter, ForgetTarget, MissReason, Prefix, RemovalCause, TierKind
from tests.support.in_process_manager import World, retain

PROMPT = list(range(10, 18))


def explain(world: World, tokens: list[int] = PROMPT, group: int = 0, **options: object):
    before = state_hash(world.queries.state())
    (found,) = world.queries.explain(Prefix(tuple(tokens), **options), group)
    assert state_hash(world.queries.state()) == before
    return found


def test_cached_blocks_are_explained_one_by_one():
    world = World(8)
    world.cache(PROMPT, session_id="x", retention=retain(80, 5.0))
    world.now = 2.0
    world.manager.expire()
    found = explain(world)
    assert (found.executor_id, found.cached_tokens, found.miss_reason) == ("e", 8, MissReason.NONE)
    assert [(view.slot, view.tier, view.priority, view.references) for view, _, _ in found.blocks] == [
        (1, TierKind.DEVICE, 80, 0),
        (2, TierKind.DEVICE, 80, 0),
    ]
    assert [tuple(lease[:3]) for _, leases, _ in found.blocks for lease in leases] == [("session/x", 80, 3.0)] * 2
    assert [age for _, _, age in found.blocks] == [2.0, 2.0]


def test_a_block_that_was_never_committed_is_explained():
    world = World(8)
    world.cache(PROMPT[:4])
    found = explain(world)
    assert (len(found.blocks), found.cached_tokens, found.miss_reason) == (1, 4, MissReason.NEVER_STORED)
    assert found.removal is None


def test_an_evicted_block_is_explained_with_time_and_sequence():
    world = World(4)
    world.cache(PROMPT, retention=retain(20))
    world.now = 3.0
    world.admit([99] * 12, "guilty", no_store=True)
    world.now = 5.0
    world.sync()
    found = explain(world)
    assert (len(found.blocks), found.miss_reason) == (1, MissReason.REMOVED)
    assert found.removal[:4] == (RemovalCause.EVICTED, 3.0, "guilty", 20)
    assert found.removal_age == 2.0


def test_purged_and_forgotten_blocks_are_explained():
    world = World(8)
    world.cache(PROMPT)
    at_once(world.operators.purge(BlockFilter(), validate_only=False))
    assert explain(world).removal.cause is RemovalCause.PURGED
    world.cache(PROMPT, salt="a")
    at_once(world.operators.forget(ForgetTarget(salt="a"), validate_only=False))
    assert explain(world, salt="a").removal.cause is RemovalCause.FORGOTTEN


@pytest.mark.parametrize(
    ("stored", "asked", "reason"),
    [
        ({"salt": "a"}, {}, MissReason.OTHER_SALT),
        ({}, {"salt": "a"}, MissReason.OTHER_SALT),
        ({"salt": "a"}, {"salt": "b"}, MissReason.OTHER_SALT),
        ({"adapter_id": 0}, {}, MissReason.OTHER_ADAPTER),
        ({"salt": "a", "adapter_id": 1}, {"salt": "a", "adapter_id": 2}, MissReason.OTHER_ADAPTER),
        ({"salt": "a", "adapter_id": 1}, {"adapter_id": 2}, MissReason.OTHER_SALT),
    ],
)
def test_blocks_of_another_scope_are_the_reason_of_a_miss(stored, asked, reason):
    world = World(8)
    world.cache(PROMPT, **stored)
    assert explain(world, **asked).miss_reason is reason


def test_a_block_that_is_being_computed_is_explained():
    world = World(8)
    world.admit(PROMPT, "a")
    assert explain(world).miss_reason is MissReason.BEING_COMPUTED


def test_the_reason_is_that_of_the_first_block_that_is_missing():
    world = World(12)
    world.cache(PROMPT)
    world.cache(PROMPT, salt="a")
    at_once(world.operators.purge(BlockFilter(prefix=Prefix(tuple(PROMPT))), validate_only=False))
    world.cache(PROMPT[:4])
    assert explain(world).removal.cause is RemovalCause.PURGED
    assert len(explain(world).blocks) == 1


def test_each_group_is_explained_by_itself():
    world = World(8, windows=(None, 3))
    world.cache([*PROMPT, 1])
    at_once(world.operators.purge(BlockFilter(pool_id="e/1"), validate_only=False))
    assert explain(world, group=0).miss_reason is MissReason.NONE
    assert explain(world, group=1).removal.cause is RemovalCause.PURGED
    assert explain(world, group=0).cached_tokens == 0


def test_a_sequence_is_explained_by_its_tokens():
    world = World(8)
    world.run([*PROMPT, 1], "a", salt="a", adapter_id=3)
    (found,) = world.queries.explain_sequence("a", 0)
    assert [view.references for view, _, _ in found.blocks] == [1, 1]
    with pytest.raises(UnknownSequenceError) as refused:
        world.queries.explain_sequence("b", 0)
    assert list(refused.value.fields) == ["sequence_id"]


@pytest.mark.parametrize("capacity", [1, 2, 3, 8, 9])
def test_a_history_keeps_at_least_half_of_its_capacity_and_never_more_than_its_capacity(capacity):
    history, keys = RemovalHistory(capacity), [bytes([number]) for number in range(40)]
    for number, key in enumerate(keys, 1):
        history.add(key, RemovalCause.EVICTED, 1.0)
        kept = [one for one in keys if history.get(one) is not None]
        assert kept == keys[number - len(kept) : number]
        assert min(number, capacity / 2) <= len(kept) <= capacity
