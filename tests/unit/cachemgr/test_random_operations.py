"""Random operations against a device that knows what is in its memory, and a check of everything after each.

`make fuzz-manager` has lives of other seeds; these are always the same.
"""

from random import Random

import pytest

from tests.support.random_operations import live_long


@pytest.mark.parametrize("seed", range(110))
def test_a_long_random_life_ends_with_every_block_free_or_cached(seed):
    live_long(seed, 400)


@pytest.mark.parametrize("seed", range(20))
def test_so_does_a_life_with_room_for_many_sequences_that_evict_tokens(seed):
    live_long(seed, 400, windows=(None,), num_blocks=24)


@pytest.mark.parametrize("seed", range(20))
def test_so_does_a_life_in_which_memory_moves_between_groups(seed):
    windows = [(None, 5), (None, 2, 9), (None,)]
    live_long(seed, 400, moves=6, windows=Random(seed).choice(windows), movable=6)
