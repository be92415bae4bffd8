"""Why the first missing block of an admitted prompt was missing, and limits of the stored blocks."""

from typing import Any

import pytest

from cachemgr.slices import at_once
from cachemgr.types import BlockFilter, ForgetTarget, Miss, MissCause, TierKind
from tests.support.in_process_manager import World, retain

PROMPT = list(range(10, 19))


def miss(world: World, tokens: list[int] = PROMPT, name: str = "asks", **options: Any) -> Miss | None:
    admission = world.admit(tokens, name, explain_miss=True, **options)
    assert admission.admitted
    return admission.miss


def test_a_prompt_whose_whole_blocks_are_cached_misses_nothing() -> None:
    world = World(8)
    world.cache(PROMPT)
    assert miss(world) is None
    assert world.admit(PROMPT, "asks not").miss is None


def test_the_first_missing_block_is_explained_as_it_was_before_the_admission() -> None:
    world = World(8)
    assert miss(world, name="new") == Miss(MissCause.NEVER_STORED)
    # The blocks that a sequence of the same scheduler is computing are shared.
    assert miss(world, name="shares") is None


@pytest.mark.parametrize(
    ("tenant", "salt", "other_tenant", "other_salt", "is_own"),
    [
        (None, None, None, None, True),
        (None, "a", None, "b", False),
        ("acme", "acme", "acme", "acme/x", True),
        ("acme", "acme", "globex", "globex", False),
        ("acme", None, None, None, False),
        ("acme", None, "globex", None, False),
    ],
)
def test_an_eviction_names_sequences_of_the_same_owner_only(
    tenant: str | None, salt: str | None, other_tenant: str | None, other_salt: str | None, is_own: bool
) -> None:
    world = World(4)
    world.cache(PROMPT, retention=retain(20), salt=salt, tenant_id=tenant)
    world.now = 3.0
    world.admit([99] * 16, "guilty", no_store=True, salt=other_salt, tenant_id=other_tenant)
    world.release("guilty")
    world.now = 5.0
    found = miss(world, salt=salt, tenant_id=tenant)
    assert found == Miss(MissCause.EVICTED, 2.0, 20, is_own, "guilty" if is_own else "")


@pytest.mark.parametrize(("later", "cause"), [(1.0, MissCause.EVICTED), (6.0, MissCause.LEASE_ENDED)])
def test_an_eviction_after_the_end_of_a_lease_is_told_apart(later: float, cause: MissCause) -> None:
    world = World(4)
    world.cache(PROMPT, retention=retain(20, 5.0))
    world.now = later
    world.manager.expire()
    world.admit([99] * 16, "guilty", no_store=True)
    world.release("guilty")
    found = miss(world)
    assert found is not None
    assert (found.cause, found.priority) == (cause, 20 if cause is MissCause.EVICTED else 35)


def test_the_end_of_a_lease_is_forgotten_with_the_blocks_tokens() -> None:
    world = World(4)
    world.cache(PROMPT, retention=retain(20, 5.0))
    world.now = 6.0
    world.manager.expire()
    # Later blocks, without leases, take the place of each of these blocks.
    other = list(range(50, 59))
    for tokens in ([60] * 9, other):
        world.cache(tokens)
    world.admit([99] * 16, "guilty", no_store=True)
    world.release("guilty")
    found = miss(world, other)
    assert found is not None
    assert found.cause is MissCause.EVICTED


def test_blocks_that_were_removed_on_demand_are_not_evicted() -> None:
    world = World(8)
    world.cache(PROMPT)
    at_once(world.operators.purge(BlockFilter(), validate_only=False))
    found = miss(world)
    assert found is not None
    assert found.cause is MissCause.PURGED
    world = World(8)
    world.cache(PROMPT, salt="a")
    at_once(world.operators.forget(ForgetTarget(salt="a"), validate_only=False))
    found = miss(world, salt="a")
    assert found is not None
    assert found.cause is MissCause.PURGED


def test_a_request_that_may_not_read_is_told_so() -> None:
    world = World(8)
    world.cache(PROMPT)
    assert miss(world, no_read=True) == Miss(MissCause.NOT_READ)


def test_a_block_in_a_slower_tier_is_named_with_its_tier() -> None:
    world = World(4, host_blocks=8)
    world.cache(PROMPT)
    world.cache([99] * 16, no_store=True)
    found = miss(world, lowest_tier=TierKind.DEVICE)
    assert found is not None
    assert (found.cause, found.tier) == (MissCause.SLOWER_TIER, TierKind.HOST)


@pytest.mark.parametrize(("limit", "kept"), [(0, 0), (3, 0), (4, 4), (7, 4), (8, 8), (9, 8), (100, 8), (None, 8)])
def test_only_whole_blocks_within_the_bound_are_stored(limit: int | None, kept: int) -> None:
    world = World(8)
    world.cache(PROMPT, store_tokens=limit)
    assert world.cached_tokens(PROMPT) == kept
    world.check()


def test_the_answer_says_how_much_of_the_prompt_is_stored() -> None:
    world = World(16)
    for name, options, stored in (
        ("all", {}, 9),
        ("prompt", {"num_prompt_tokens": 6}, 6),
        ("none", {"no_store": True}, 0),
        ("some", {"store_tokens": 6}, 4),
    ):
        assert world.admit(PROMPT, name, salt=name, **options).store_tokens == stored
