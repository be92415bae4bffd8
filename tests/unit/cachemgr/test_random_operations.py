"""Random operations against a device that knows what is in its memory, and a check of everything after each.

`make fuzz-manager` has lives of other seeds; these are always the same.
"""

from random import Random

import pytest

from tests.fuzz import cache_manager
from tests.support.random_operations import live_long, live_long_as_twins


@pytest.mark.parametrize("seed", range(110))
def test_a_long_random_life_ends_with_every_block_free_or_cached(seed):
    live_long(seed, 400)


@pytest.mark.parametrize("seed", range(20))
def test_so_does_a_life_with_blocks_for_many_sequences_that_evict_tokens(seed):
    live_long(seed, 400, windows=(None,), num_blocks=24)


@pytest.mark.parametrize("seed", range(20))
def test_so_does_a_life_in_which_memory_moves_between_groups(seed):
    windows = [(None, 5), (None, 2, 9), (None,)]
    live_long(seed, 400, moves=6, windows=Random(seed).choice(windows), movable=6)


@pytest.mark.parametrize("seed", range(20))
def test_so_does_a_life_of_two_engines_whose_manager_starts_again(seed):
    live_long_as_twins(seed, 400)


def test_the_program_runs_lives_and_says_how_to_run_one_that_fails_again(monkeypatch, capsys):
    assert cache_manager.main(["--lives", "2", "--operations", "5", "--first", "1"]) == 0
    assert capsys.readouterr().out.endswith("2 lives, 0 failed\n")
    monkeypatch.setattr(cache_manager, "live_long", lambda seed, operations: {}[seed])
    assert cache_manager.main(["--lives", "1", "--operations", "5", "--first", "7"]) == 1
    assert 'make fuzz-manager ARGS="--first 7 --lives 1 --operations 5"' in capsys.readouterr().out
    with pytest.raises(SystemExit):
        cache_manager.main(["--seconds", "0"])
