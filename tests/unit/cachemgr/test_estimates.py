"""Estimates against the blocks that sequences then allocate."""

import pytest

from tests.support.in_process_manager import BLOCK, World

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


def test_blocks_held_by_others_cost_nothing_and_cached_blocks_cost_their_slot():
    world = World(12)
    world.run(list(range(9)), "live")
    world.cache([*range(8), 50, 51, 52, 53])
    request = world.request([*range(8), 50, 51, 52, 53, 60])
    before = world.free
    (estimate,) = world.queries.preview(request, 0).estimates
    assert world.manager.admit(request).admitted
    assert (tuple(estimate), before - world.free) == ((0, 3, 2, 2), 2)
