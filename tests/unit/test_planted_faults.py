"""Each fault that `python -m tests.planted_faults` plants changes one place of the code as it is."""

import tomllib

import pytest

from tests.stack import ROOT

FAULTS = tomllib.loads((ROOT / "tests/planted_faults.toml").read_text())["fault"]


@pytest.mark.parametrize("fault", FAULTS, ids=[fault["what"] for fault in FAULTS])
def test_a_fault_has_its_place(fault: dict[str, str]) -> None:
    assert (ROOT / fault["file"]).read_text().count(fault["old"]) == 1
    assert fault["new"] != fault["old"]
