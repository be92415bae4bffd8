"""The lock of versions: what it keeps, and that the environment of the tests is the one that it describes."""

import sys
import sysconfig
from importlib.metadata import distributions
from pathlib import Path

import pytest
from set_up import CONSTRAINTS, MODEL
from update_lock import changes, lock

ROOT = Path(__file__).resolve().parents[3]
# Come with the environment itself.
OF_VENV = {"pip", "setuptools", "wheel", "kvkeep"}


def versions(text: str) -> dict[str, str]:
    return dict(line.split("==") for line in text.splitlines() if "==" in line)


def test_what_pip_froze_is_sorted_and_fits_every_build_of_torch() -> None:
    frozen = "torch==2.13.0+cpu\nJinja2==3.1.6\njsonschema_rs==0.60.3\nthing @ file:///somewhere\n"
    assert lock(frozen).splitlines()[2:] == ["jinja2==3.1.6", "jsonschema-rs==0.60.3", "torch==2.13.0"]


def test_changes_are_named() -> None:
    old, new = lock("a==1\nb==1\nd==1"), lock("a==2\nb==1\nc==1")
    assert changes(old, new) == ["a: 1 -> 2", "c: new -> 1", "d: 1 -> gone"]


def test_everything_that_is_installed_is_in_the_lock() -> None:
    if Path(sys.prefix) != ROOT / ".venv" or "include-system-site-packages = true" in (
        Path(sys.prefix, "pyvenv.cfg").read_text()
    ):
        pytest.skip("not the environment that `make setup` made")
    locked = versions(CONSTRAINTS.read_text()) | versions(MODEL.read_text())
    installed = {
        one.metadata["Name"].lower().replace("_", "-").replace(".", "-"): one.version.partition("+")[0]
        for one in distributions(path=[sysconfig.get_paths()["purelib"]])
    }
    assert {name: version for name, version in installed.items() if name not in OF_VENV} == {
        name: locked.get(name) for name in installed if name not in OF_VENV
    }
