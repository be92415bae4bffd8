"""Tests of products are thinned out, and no pair of values is lost."""

import os
import subprocess
import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import SimpleNamespace

from tests.stack import ROOT
from tests.support.pairwise import pairs_of, thinned
from tests.support.patience import patience

# Each is one object, as the values of a parameter are.
VALUES = [f"value {number}" for number in range(10)]


@dataclass(frozen=True)
class Item:
    """A test with the values of its parameters."""

    values: tuple[int, ...]

    @property
    def callspec(self) -> SimpleNamespace:
        return SimpleNamespace(params={f"p{place}": VALUES[value] for place, value in enumerate(self.values)})


def items(*sizes: int) -> list[Item]:
    return [Item(values) for values in product(*map(range, sizes))]


def covered(tests: list[Item]) -> set[object]:
    return {pair for test in tests for pair in pairs_of(test.callspec.params)}


def test_every_pair_of_values_is_left_in_fewer_tests() -> None:
    whole = items(4, 3, 2, 2)
    some = thinned(whole)
    assert covered(some) == covered(whole)
    assert 12 <= len(some) <= 16 < len(whole)


def test_a_product_of_two_stays_whole() -> None:
    assert thinned(items(3, 4)) == items(3, 4)


def test_pairs_that_no_test_has_are_not_wanted() -> None:
    whole = [item for item in items(3, 3, 2) if item.values[0] != item.values[1]]
    assert covered(thinned(whole)) == covered(whole)


def test_the_same_tests_are_chosen_every_time() -> None:
    assert thinned(items(5, 3, 2)) == thinned(items(5, 3, 2))


TESTS = """
import pytest

@pytest.fixture(params=["torch", "interpreter", "cuda"])
def run_on(request):
    return request.param

@pytest.mark.parametrize("dtype", [object(), object()], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [{"rows": 1}, {"rows": 2}, {"rows": 3}])
def test_product(run_on, dtype, shape):
    pass

@pytest.mark.parametrize("shape", [1, 2, 3])
def test_two(run_on, shape):
    pass
"""


def test_pytest_runs_what_is_left_and_what_needs_a_device(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    program = "import sys, pytest; from tests.support.pairwise import Pairwise\n" + (
        "sys.exit(pytest.main(['-q', '-rA', '-p', 'no:cacheprovider', sys.argv[1]], plugins=[Pairwise(('',))]))"
    )
    run = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=patience(60),
        check=False,
    )
    ran = [line.partition("::")[2] for line in run.stdout.splitlines() if line.startswith("PASSED")]
    assert run.returncode == 0, run.stdout
    # Three shapes with two dtypes, each with one backend; with the device all of them.
    assert sum(name.startswith("test_product") and "cuda" not in name for name in ran) == 6
    assert sum(name.startswith("test_product") and "cuda" in name for name in ran) == 6
    assert sum(name.startswith("test_two") for name in ran) == 9
    assert "6 deselected" in run.stdout
