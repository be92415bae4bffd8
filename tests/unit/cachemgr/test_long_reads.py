"""Long reads in slices are consistent, or raise an error."""

import asyncio
import dataclasses
import sys
from collections.abc import Iterator

import pytest

from cachemgr import manager as manager_module
from cachemgr import slices
from cachemgr.blocks.events import Event
from cachemgr.errors import EventsGoneError, StateChangesError
from cachemgr.manager import CacheManager
from cachemgr.operators.snapshot import SnapshotReader
from cachemgr.sequences import release
from cachemgr.slices import sliced, steady
from cachemgr.types import BlockFilter, EventKind, PoolViolation
from tests.support.in_process_manager import CONFIG, World, snapshot
from tests.support.random_operations import RandomLife
from tests.support.work import work_of


def comparable(events: list[Event]) -> list[tuple[object, ...]]:
    """Events without the references, which change without an event."""
    return sorted(
        (
            (
                event.number,
                event.kind.value,
                *event.block._replace(references=0, scope=None),
                *(() if event.lease is None else (event.lease.holder, event.lease.priority, event.lease.remaining)),
            )
            for event in events
        ),
        key=repr,
    )


@pytest.mark.parametrize("seed", range(12))
def test_a_snapshot_that_is_read_while_the_cache_changes_is_that_of_its_number(seed):
    life = RandomLife(seed, num_blocks=12, movable=0)
    manager: CacheManager | None = None
    reader: SnapshotReader
    steps: Iterator[None]
    compared = changed = 0
    for _ in range(400):
        life.operate()
        if life.world.manager is not manager:
            manager = life.world.manager
            reader = manager.queries.snapshot()
            steps, begun = reader.slots(), manager.queries.last_event
        try:
            reader.catch_up()
            ended = False
            for _ in range(life.random.randrange(8)):
                ended = ended or next(steps, "end") == "end"
            if ended:
                # The last step was in this turn, and nothing came after it.
                reader.catch_up()
                found = [event for event in reader.events() if event is not None]
                whole = snapshot(manager)
                assert reader.number == manager.queries.last_event
                assert comparable(found) == comparable(whole)
                depths = [event.block.depth for event in found if event.kind is EventKind.STORED]
                assert len(manager.queries.pools()) > 1 or depths == sorted(depths)
                compared += 1
                changed += reader.number - begun
                manager = None
        except EventsGoneError:
            manager = None
    assert compared > 5
    assert changed > 20


def test_a_snapshot_has_no_blocks_of_an_executor_that_was_lost_while_they_were_read(monkeypatch):
    # Its blocks have no separate events, and are still there.
    monkeypatch.setattr(release, "MOST_REPORTED", 0)
    monkeypatch.setattr(manager_module, "FREED_AT_A_TIME", 0)
    world = World(12)
    world.cache(list(range(40)))
    reader = world.queries.snapshot()
    reading = reader.slots()
    next(reading)
    world.expire_executor()
    world.register_again()
    for _ in reading:
        reader.catch_up()
    found = [event for event in reader.events() if event is not None]
    assert comparable(found) == comparable(snapshot(world.manager))
    assert all(event.kind is not EventKind.STORED for event in found)


def test_a_snapshot_gives_up_when_more_has_changed_than_is_kept():
    world = World(4, config=dataclasses.replace(CONFIG, event_history=5))
    reader = world.queries.snapshot()
    for number in range(3):
        world.cache([number] * 13)
    with pytest.raises(EventsGoneError):
        reader.catch_up()


async def test_requests_run_between_slices_and_items_stay_in_order(monkeypatch):
    monkeypatch.setattr(slices, "SLICE_SECONDS", 0.0)
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    other = asyncio.create_task(count())
    found = [item async for part in sliced(range(1000), 0.0) for item in part]
    other.cancel()
    assert found == list(range(1000))
    assert turns >= 1000 // 32 - 1


async def test_a_steady_read_begins_again_when_the_state_has_changed(monkeypatch):
    monkeypatch.setattr(slices, "SLICE_SECONDS", 0.0)
    monkeypatch.setattr(slices, "LONGEST_SLICE_SECONDS", 0.0)
    state, reads = [0], 0

    def read() -> Iterator[int]:
        nonlocal reads
        reads += 1
        for number in range(200):
            # The first two reads meet a change.
            if number == 100 and reads < 3:
                state[0] += 1
            yield state[0]

    assert await steady(read, lambda: state[0]) == [2] * 200
    assert reads == 3


async def test_a_steady_read_does_not_go_on_after_a_change(monkeypatch):
    monkeypatch.setattr(slices, "SLICE_SECONDS", 0.0)
    monkeypatch.setattr(slices, "LONGEST_SLICE_SECONDS", 0.0)
    state = dict.fromkeys(range(100))

    async def add() -> None:
        await asyncio.sleep(0)
        state[100] = None

    other = asyncio.create_task(add())
    # A dictionary that has another size cannot be read on.
    assert await steady(lambda: iter(state), lambda: len(state)) == list(range(101))
    await other


def test_a_token_within_the_last_block_leaves_the_fingerprint_as_it_is():
    world = World(20)
    world.admit(list(range(6)), "a")
    seen = []
    for _ in range(9):
        world.step(most=20)
        world.sync()
        seen.append(world.queries.fingerprint())
    # Twice in nine tokens a block of four is full.
    assert 1 < len({repr(one) for one in seen}) < 6


async def test_a_steady_read_gives_up_where_the_state_never_stands_still(monkeypatch):
    monkeypatch.setattr(slices, "SLICE_SECONDS", 0.0)
    monkeypatch.setattr(slices, "LONGEST_SLICE_SECONDS", 0.0)
    monkeypatch.setattr(slices, "PATIENCE_SECONDS", 0.0)
    state = [0]

    def read() -> Iterator[int]:
        for number in range(200):
            state[0] += 1
            yield number

    with pytest.raises(StateChangesError):
        await steady(read, lambda: state[0])


def most_work_of_a_step(steps: Iterator[object]) -> int:
    """The largest number of bytecodes between two steps."""
    most = 0
    for _ in range(1_000_000):
        ended: list[bool] = []
        most = max(most, work_of(lambda: ended.append(next(steps, END) is END)))  # noqa: B023
        if ended[0]:
            break
    return most


END = object()


def cached_world(blocks: int) -> World:
    world = World(blocks, host_blocks=blocks, config=dataclasses.replace(CONFIG, event_history=10))
    # Chains, and prompts that have nothing in common but the root.
    for first in range(0, blocks // 2, 10):
        world.cache(list(range(first * 100, first * 100 + 40)))
    for first in range(blocks // 2):
        world.cache([first] * 5)
    return world


READS = {
    "check": lambda world: (item for part in world.queries.check_pool_in_parts() for item in part()),
    "dump": lambda world: next(part for part in world.queries.state_outline() if not isinstance(part, str)),
    "snapshot": lambda world: world.queries.snapshot().slots(),
    "blocks": lambda world: world.queries.blocks("e/0"),
    "filtered": lambda world: world.queries.filtered_blocks(BlockFilter(pool_id="e/0", salt="none")),
    "prefixes": lambda world: world.queries.prefixes(BlockFilter(pool_id="e/0", salt="none")),
    "leases": lambda world: world.queries.leases("e/0", ""),
}


@pytest.mark.parametrize("name", READS)
def test_no_step_of_a_long_read_grows_with_the_cache(name):
    small, large = (most_work_of_a_step(iter(READS[name](cached_world(size)))) for size in (40, 160))
    # Without steps it would be four times as much.
    assert large < 2 * small


async def checked(manager: CacheManager) -> list[PoolViolation]:
    return [
        one for part in manager.queries.check_pool_in_parts() for one in await steady(part, manager.queries.fingerprint)
    ]


async def test_a_check_reports_a_fault_and_nothing_else_while_requests_are_served(monkeypatch):
    monkeypatch.setattr(slices, "SLICE_SECONDS", 0.0)
    world = cached_world(40)
    manager = world.manager
    turns = 0

    async def work() -> None:
        nonlocal turns
        for number in range(5):
            world.cache([7_000 + number] * 13)
            turns += 1
            await asyncio.sleep(0.02)

    other = asyncio.create_task(work())
    assert await checked(manager) == []
    await other
    assert turns == 5
    pool = manager._state.pool("e/0")
    block = next(iter(pool.tree.by_key.values()))
    block.priority += 1
    assert {one.slot for one in await checked(manager)} == {block.index - pool.tier_of(block).offset}
    block.priority -= 1


def test_nothing_changes_the_state_of_blocks_behind_the_fingerprint():
    """In random lives equal fingerprints mean equal blocks."""
    for seed in range(6):
        life = RandomLife(seed, windows=(None,), num_blocks=10, host=4, disk=3, movable=0)
        before: tuple[object, list[str]] | None = None
        for _ in range(150):
            name = life.operate()
            manager = life.world.manager
            now = (
                manager.queries.fingerprint(),
                [line for line in manager.queries.state() if line.startswith('{"kind":"block"')],
            )
            assert before is None or now[0] != before[0] or now[1] == before[1], name
            before = now


def test_a_check_keeps_no_reference_to_blocks_it_has_counted():
    world = World(4)
    world.cache(list(range(8)))
    block = next(iter(world.manager._state.pool("e/0").tree.by_key.values()))
    parts, before = world.queries.check_pool_in_parts(), sys.getrefcount(block)
    for part in parts:
        assert not any(part())
        assert sys.getrefcount(block) == before
