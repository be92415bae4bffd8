"""How long tests wait grows with the slowness of the machine, and all processes of a run agree about it."""

import os
import subprocess
import sys

import pytest

from tests import conftest
from tests.stack import ROOT
from tests.support import patience as module
from tests.support.patience import LONGEST_SECONDS, REFERENCE_SECONDS, VARIABLE, patience, speed_factor


@pytest.mark.parametrize(
    ("factor", "usual", "waited"), [("1.00", 5, 20), ("2.50", 5, 50), ("1.00", 60, 240), ("3.00", 60, 240)]
)
def test_a_test_waits_four_times_as_long_as_usual_on_any_machine(
    monkeypatch: pytest.MonkeyPatch, factor: str, usual: float, waited: float
) -> None:
    monkeypatch.setenv(VARIABLE, factor)
    assert patience(usual) == waited <= LONGEST_SECONDS


@pytest.mark.parametrize(("seconds", "factor"), [(REFERENCE_SECONDS / 2, 1.0), (REFERENCE_SECONDS * 3, 3.0)])
def test_the_first_process_that_asks_measures_and_the_others_inherit(
    monkeypatch: pytest.MonkeyPatch, seconds: float, factor: float
) -> None:
    measured: list[float] = []
    # To be restored as it was.
    monkeypatch.setenv(VARIABLE, "")
    del os.environ[VARIABLE]
    monkeypatch.setattr(module, "_measured_seconds", lambda: measured.append(seconds) or seconds)
    assert [speed_factor(), speed_factor()] == [factor, factor]
    assert measured == [seconds]
    code = "from tests.support.patience import speed_factor; print(speed_factor())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert float(done.stdout) == factor


def test_what_is_measured_takes_time_on_every_machine() -> None:
    assert module._measured_seconds() > 0


def test_the_header_of_a_run_shows_the_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "2.50")
    assert "2.50" in conftest.pytest_report_header()
