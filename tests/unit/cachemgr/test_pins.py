"""Pins: within a budget, for an owner and a time; the oldest become leases first."""

import dataclasses

import pytest

from cachemgr.errors import UnknownHoldError
from cachemgr.operators.state_dump import state_hash
from cachemgr.types import Outcome, Prefix
from tests.support.in_process_manager import CONFIG, World

PROMPT = list(range(10, 18))
OTHER = list(range(50, 58))


def roomy(num_blocks: int = 10, budget: float = 0.3, **options: object) -> World:
    """A world in which no process is lost for being silent."""
    return World(num_blocks, config=dataclasses.replace(CONFIG, lease_seconds=1e9, pin_budget=budget), **options)


def pin(world: World, tokens: list[int] = PROMPT, owner: str = "ops", seconds: float = 10.0, **options: object):
    (pinned,) = world.operators.pin_prefix(Prefix(tuple(tokens), **options), owner, seconds, validate_only=False)
    world.check()
    return pinned


def cached(world: World, tokens: list[int] = PROMPT) -> int:
    return world.found(tokens)


def flood(world: World, blocks: int, **options: object) -> bool:
    """Whether N = `blocks` blocks can be taken at once; gives them back."""
    admission = world.admit([99] * (blocks * 4), "flood", no_store=True, **options)
    if admission.admitted:
        world.release("flood")
    world.check()
    return admission.admitted


def test_pinned_blocks_are_never_evicted_and_count_as_used():
    world = roomy()
    world.cache(PROMPT)
    pinned = pin(world)
    assert pinned.receipt == ("pin", Outcome.GRANTED, "", 100, 10.0, 2)
    assert world.free == 8
    assert not flood(world, 9)
    assert flood(world, 8)
    assert cached(world) == 8


def test_a_pin_has_an_owner_and_ends_with_its_time():
    world = roomy()
    world.cache(PROMPT)
    pinned = pin(world)
    world.now = 4.0
    world.manager.expire()
    (hold,) = world.queries.holds("ops")
    assert (hold.name, hold.pin, hold.remaining, hold.num_blocks) == (pinned.name, True, 6.0, 2)
    assert list(world.queries.holds("nobody")) == []
    world.now = 10.0
    world.manager.expire()
    assert list(world.queries.holds()) == []
    assert world.free == 10
    assert cached(world) == 8
    world.check()
    assert flood(world, 10)


def test_a_released_pin_leaves_its_blocks_cached():
    world = roomy()
    world.cache(PROMPT)
    pinned = pin(world)
    assert world.operators.release_hold(pinned.name) == 2
    world.check()
    assert (world.free, cached(world)) == (10, 8)
    with pytest.raises(UnknownHoldError) as refused:
        world.operators.release_hold(pinned.name)
    assert list(refused.value.fields) == ["name"]


def test_a_pin_beyond_the_budget_is_clipped_from_the_tail():
    world = roomy(budget=0.1)
    world.cache(PROMPT)
    pinned = pin(world)
    assert (pinned.receipt.outcome, pinned.receipt.num_blocks) == (Outcome.CLIPPED, 1)
    assert "1 of the 2" in pinned.receipt.reason
    flood(world, 9)
    assert cached(world) == 4


@pytest.mark.parametrize(("tokens", "budget"), [(PROMPT, 0.05), (OTHER, 0.3)])
def test_a_pin_without_budget_or_blocks_is_rejected_and_changes_nothing(tokens, budget):
    world = roomy(budget=budget)
    world.cache(PROMPT)
    before = state_hash(world.queries.state())
    pinned = pin(world, tokens)
    assert (pinned.name, pinned.receipt.outcome, bool(pinned.receipt.reason)) == ("", Outcome.REJECTED, True)
    assert list(world.queries.holds()) == []
    assert state_hash(world.queries.state()) == before


def test_the_oldest_pin_becomes_a_lease_when_a_newer_one_needs_the_budget():
    world = roomy(budget=0.3)
    world.cache(PROMPT)
    world.cache(OTHER)
    old = pin(world, owner="old", seconds=20.0)
    world.now = 5.0
    (said,) = world.operators.pin_prefix(Prefix(tuple(OTHER)), "new", 10.0, validate_only=True)
    new = pin(world, OTHER, owner="new")
    assert said.degraded == new.degraded == (old.name,)
    assert [hold.owner for hold in world.queries.holds()] == ["new"]
    leases = [
        (view.slot, lease.priority, lease.remaining) for _, view, lease in filter(None, world.queries.leases("e/0", ""))
    ]
    assert leases == [(1, 100, 15.0), (2, 100, 15.0)]
    world.now = 20.0
    world.manager.expire()
    assert list(filter(None, world.queries.leases("e/0", ""))) == []


def test_only_as_many_pins_as_needed_become_leases_oldest_first():
    world = roomy(budget=0.3)
    prompts = [[first] * 4 for first in range(4)]
    for prompt in prompts:
        world.cache(prompt)
    names = [pin(world, prompt).name for prompt in prompts[:3]]
    assert pin(world, prompts[3]).degraded == (names[0],)
    assert [hold.name for hold in world.queries.holds()][:2] == names[1:]


def test_a_pin_whose_blocks_a_newer_pin_shares_frees_no_budget():
    world = roomy(budget=0.3)
    longer = [*PROMPT, 1, 2, 3, 4]
    for prompt in (longer, OTHER[:4]):
        world.cache(prompt)
    older = [pin(world, prompt).name for prompt in (PROMPT, OTHER[:4])]
    assert pin(world, longer).degraded == tuple(older)


def test_a_pinned_host_block_is_not_evicted():
    world = roomy(4, budget=0.5, host_blocks=4)
    world.cache(PROMPT)
    world.cache([99] * 16, no_store=True)
    assert pin(world).receipt.outcome is Outcome.GRANTED
    for first in (100, 200, 300):
        world.cache(list(range(first, first + 16)))
        world.check()
    assert cached(world) == 8
