"""A lost executor with very many blocks: they go at once, watchers begin again, and memory is freed bit by bit."""

import gc

import pytest

from cachemgr import manager
from cachemgr.blocks.block import Block
from cachemgr.errors import EventsGoneError
from cachemgr.sequences import release as lifecycle
from cachemgr.types import EventKind, RemovalCause
from tests.support.in_process_manager import World, wish
from tests.support.random_operations import live_long
from tests.support.work import work_of


def cached(blocks: int) -> World:
    world = World(blocks)
    for first in range(0, blocks * 4 - 40, 40):
        world.cache(list(range(first, first + 40)), retention=wish(80, 500.0))
    return world


def lose(world: World) -> None:
    world.now += 1000
    world.manager.expire()
    assert world.queries.pools() == []


def test_of_a_few_blocks_watchers_hear_one_by_one():
    world = cached(40)
    number, count = world.queries.last_event, world.queries.pools()[0].cached_blocks
    lose(world)
    events = world.queries.events_after(number)
    causes = [event.cause for event in events if event.kind is EventKind.REMOVED]
    assert causes == [RemovalCause.EXECUTOR_LOST] * count


def test_of_too_many_blocks_watchers_hear_that_they_begin_again(monkeypatch):
    monkeypatch.setattr(lifecycle, "MOST_TOLD", 10)
    world = cached(40)
    number, count = world.queries.last_event, world.queries.pools()[0].cached_blocks
    lose(world)
    assert world.queries.last_event >= number + count
    with pytest.raises(EventsGoneError):
        world.queries.events_after(number)
    # No lease of a lost block ends later.
    number = world.queries.last_event
    world.now += 1000
    world.manager.expire()
    assert world.queries.events_after(number) == []
    world.start_scheduler()
    world.start_executor()
    world.cache(list(range(40)))
    world.check()
    assert next(event.kind for event in world.queries.events_after(number)) is EventKind.CREATED


def test_what_a_loss_costs_does_not_grow_with_the_blocks(monkeypatch):
    monkeypatch.setattr(lifecycle, "MOST_TOLD", 10)

    monkeypatch.setattr(manager, "FREED_AT_A_TIME", 20)

    def cost(blocks: int) -> int:
        world = cached(blocks)
        world.now += 1000
        world.manager._state.leases.advance(world.now)
        return work_of(world.manager.expire)

    assert cost(400) < 1.2 * cost(100)


def test_the_memory_of_lost_blocks_is_freed(monkeypatch):
    monkeypatch.setattr(lifecycle, "MOST_TOLD", 10)
    world = cached(200)
    gc.collect()
    before = number_of_blocks()
    assert before > 190
    gc.disable()
    try:
        lose(world)
        while world.manager.leftovers:
            world.manager.expire()
        assert number_of_blocks() < before - 180
    finally:
        gc.enable()


def number_of_blocks() -> int:
    return sum(type(one) is Block for one in gc.get_objects())


@pytest.mark.parametrize("seed", range(10))
def test_random_lives_go_on_where_every_loss_is_too_large_to_tell(seed, monkeypatch):
    monkeypatch.setattr(lifecycle, "MOST_TOLD", 0)
    live_long(400_000 + seed, 250)
