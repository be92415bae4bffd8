"""The run of random lives: seeds that failed are kept, and come first."""

from itertools import count

import pytest

from tests.unit.cachemgr.lives import FailedSeeds, main, run


def numbered(first: int, lives: int):
    return ((seed, 10) for seed in range(first, first + lives))


class Lives:
    """Lives that are over at once; those of some seeds fail."""

    def __init__(self, *bad: int) -> None:
        self.bad = bad
        self.seen: list[int] = []

    def __call__(self, seed: int, operations: int) -> dict[str, object]:
        assert operations == 10
        self.seen.append(seed)
        assert seed not in self.bad, "it fails"
        return {"windows": (None, 5), "host": 2, "disk": 0}


def test_seeds_that_fail_are_kept_told_and_run_first_until_they_pass(tmp_path, capsys):
    failed = FailedSeeds(tmp_path / "folder")
    assert run(failed, numbered(1, 9), lambda: True, Lives(3, 7)) == 2
    assert failed.read() == [(3, 10), (7, 10)]
    assert 'make fuzz-manager ARGS="--first 7 --lives 1 --operations 10"' in capsys.readouterr().out
    lives = Lives(7, 21)
    assert run(failed, numbered(20, 3), lambda: True, lives) == 2
    assert lives.seen == [3, 7, 20, 21, 22]
    assert failed.read() == [(7, 10), (21, 10)]
    assert run(failed, numbered(7, 1), lambda: True, Lives()) == 0
    assert failed.read() == []
    assert "2 lives, 2 with windows and 2 with lower tiers" in capsys.readouterr().out


def test_a_run_that_is_broken_off_loses_no_seed(tmp_path):
    failed = FailedSeeds(tmp_path)
    failed.write([(1, 10), (2, 10), (3, 10)])

    def life(seed: int, operations: int) -> dict[str, object]:
        if seed == 2:
            raise KeyboardInterrupt
        raise AssertionError

    with pytest.raises(KeyboardInterrupt):
        run(failed, numbered(20, 3), lambda: True, life)
    assert failed.read() == [(1, 10), (2, 10), (3, 10)]


def test_it_ends_when_its_time_is_over(tmp_path):
    lives, turns = Lives(), iter([True, True, False])
    assert run(FailedSeeds(tmp_path), ((seed, 10) for seed in count()), lambda: next(turns), lives) == 0
    assert lives.seen == [0, 1]


def test_a_file_that_is_something_else_is_named(tmp_path):
    (tmp_path / "failed_seeds.txt").write_text("1 10\n5\n")
    with pytest.raises(ValueError, match=r"failed_seeds\.txt: each line must be a seed and a number"):
        FailedSeeds(tmp_path).read()


def test_real_lives_run_and_bad_numbers_are_refused(tmp_path, capsys):
    assert main(["--lives", "2", "--operations", "5", "--first", "1", "--folder", str(tmp_path)]) == 0
    assert "fresh lives from seed 1 on, 5 operations each\n2 lives" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["--seconds", "0"])
    assert "--seconds must be greater than 0" in capsys.readouterr().err
