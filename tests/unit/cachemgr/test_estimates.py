"""Estimates against the blocks that sequences then allocate."""

import pytest

from cachemgr.operators.state_dump import state_hash
from cachemgr.types import EventKind, TierKind
from tests.support.in_process_manager import BLOCK, World, wish

NUM_BLOCKS = 40


@pytest.mark.parametrize("window", [None, 1, 2, 3, 4, 5, 8, 9, 16, 17])
@pytest.mark.parametrize(("prompt", "new"), [(1, 1), (1, 40), (4, 9), (5, 20), (13, 2), (20, 1), (30, 40)])
def test_blocks_to_completion_are_the_most_that_are_held_at_once(window, prompt, new):
    """Between what the steps need and what the manager, a step ahead of them, gives."""
    world = World(NUM_BLOCKS, windows=(window,))
    tokens = list(range(100, 100 + prompt))
    (estimate,) = world.queries.preview(world.request(tokens), new).estimates
    world.admit(tokens, "a", no_store=True)
    live = world.live["a"]
    needed = given = NUM_BLOCKS - world.free
    assert estimate.next_step == needed
    while live.computed < prompt + new - 1:
        world.step(prompt)
        world.sync()
        passed = 0 if window is None else max(0, live.computed - window + 1) // BLOCK
        needed = max(needed, -(-len(live.tokens) // BLOCK) - passed)
        given = max(given, NUM_BLOCKS - world.free)
    assert needed <= estimate.completion <= given


def evicted(world: World, before: int) -> list[tuple[int, int, int, int]]:
    """Group, priority, blocks and how many of them moved down, of what left the device since an event."""
    found: dict[tuple[int, int], list[int]] = {}
    for event in world.queries.events_after(before):
        group = int(event.block.pool_id.split("/")[1])
        lost = event.kind is EventKind.REMOVED and event.block.tier is TierKind.DEVICE
        moved = event.kind is EventKind.UPDATED and event.block.tier is TierKind.HOST
        if lost or moved:
            entry = found.setdefault((group, event.block.priority), [0, 0])
            entry[0] += 1
            entry[1] += moved
    return [(*key, *counts) for key, counts in sorted(found.items())]


def previewed(world: World, tokens: list[int], **options: object):
    """A preview that changes nothing, and the admission that it is about."""
    request = world.request(tokens, **options)
    before = state_hash(world.queries.state())
    preview = world.queries.preview(request, 0)
    assert state_hash(world.queries.state()) == before
    number, used = world.queries.last_event, [pool.used_blocks for pool in world.queries.pools()]
    admission = world.manager.admit(request)
    assert (preview.admitted, preview.blocks_short) == (admission.admitted, admission.blocks_short)
    assert preview.cached_tokens == admission.cached_tokens
    assert [tuple(one) for one in preview.evictions] == evicted(world, number)
    assert world.queries.check_pool() == []
    return preview, [now.used_blocks - then for now, then in zip(world.queries.pools(), used, strict=True)]


@pytest.mark.parametrize("windows", [(None,), (5,), (None, 5)])
@pytest.mark.parametrize("length", [1, 4, 9, 20, 33])
def test_an_admission_allocates_the_blocks_of_its_preview(windows, length):
    world = World(12, windows=windows)
    world.cache(list(range(100, 112)), retention=wish(20))
    world.cache(list(range(200, 212)), retention=wish(80))
    world.cache(list(range(300, 309)))
    preview, taken = previewed(world, list(range(length)))
    assert [estimate.next_step for estimate in preview.estimates] == taken


@pytest.mark.parametrize("host_blocks", [0, 1, 2, 8])
def test_a_preview_tells_offloaded_from_evicted_blocks(host_blocks):
    world = World(6, host_blocks=host_blocks)
    world.cache([50, 51, 52, 53], retention=wish(10))
    world.cache([60, 61, 62, 63], retention=wish(40))
    world.cache([70, 71, 72, 73], retention=wish(60))
    previewed(world, list(range(20)))


@pytest.mark.parametrize("window", [None, 5])
def test_the_next_step_allocates_the_estimate(window):
    world = World(20, windows=(window,))
    world.run(list(range(7)), "a", no_store=True)
    for _ in range(20):
        live = world.live["a"]
        (estimate,) = world.queries.estimate(world.caller, "a", 1, 0)
        assert estimate.next_step == max(0, -(-(live.computed + 1) // BLOCK) - len(live.tables[0]))
        world.step()
        world.sync()
        world.check()
