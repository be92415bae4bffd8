"""The units: systemd accepts them, processes understand their settings, and their rights are limited."""

import configparser
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.stack import CONSOLE, MODULES, ROOT
from tests.support.deployed import ONE_ENGINE, Secrets, shortest_stop, understood
from tests.support.names import unknown_settings
from tests.support.patience import patience

FOLDER = ROOT / "ops/deploy/systemd"
PYTHON = "/opt/kvkeep/bin/python"
# Tenths of systemd's measure of what a service could do to the machine; 10.0 is everything.
MOST_EXPOSED = {"cachemgr": 15, "executor": 20, "scheduler": 15, "console": 15}

needs_systemd = pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="there is no systemd on the PATH")


def run(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience(60), check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def units(tmp_path: Path) -> Path:
    """The units as installed, with an interpreter that is there."""
    folder = tmp_path / "units"
    shutil.copytree(FOLDER, folder)
    for unit in folder.glob("*.service"):
        unit.write_text(unit.read_text().replace(PYTHON, sys.executable))
    return folder


def options(path: Path) -> dict[str, list[str]]:
    """The values of each option in a unit's [Service]."""
    found: dict[str, list[str]] = {}
    section = path.read_text().partition("[Service]\n")[2].partition("\n[")[0]
    for line in section.splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


def environment(*lists: list[str]) -> dict[str, str]:
    return dict(word.split("=", 1) for values in lists for value in values for word in value.split())


def env_file() -> dict[str, str]:
    parser = configparser.RawConfigParser()
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string("[env]\n" + (FOLDER / "kvkeep.env").read_text())
    return dict(parser["env"])


@needs_systemd
def test_systemd_accepts_the_units(units: Path) -> None:
    # It ends with 0 if it only warns.
    assert run("systemd-analyze", "verify", "--man=no", units / "kvkeep.target", *units.glob("*.service")) == ""


@needs_systemd
@pytest.mark.parametrize("process", ONE_ENGINE)
def test_units_restrict_their_services(process: str, units: Path) -> None:
    unit = units / f"kvkeep-{process}.service"
    # It ends with 1 above the threshold.
    run("systemd-analyze", "security", "--offline=true", f"--threshold={MOST_EXPOSED[process]}", "--no-pager", unit)


@needs_systemd
def test_users_and_folders_are_made(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    run("systemd-sysusers", f"--root={tmp_path}", FOLDER / "kvkeep.sysusers")
    assert re.search(r"^kvkeep:.*:/var/lib/kvkeep:", (tmp_path / "etc/passwd").read_text(), flags=re.MULTILINE)
    run("systemd-tmpfiles", "--create", f"--root={tmp_path}", FOLDER / "kvkeep.tmpfiles")
    assert {(tmp_path / name).is_dir() for name in ("run/kvkeep", "dev/shm/kvkeep", "etc/kvkeep")} == {True}


@pytest.mark.parametrize("process", ONE_ENGINE)
@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_units_set_only_known_settings(process: str, tls: bool, tmp_path: Path) -> None:
    unit = options(FOLDER / f"kvkeep-{process}.service")
    assert unit["ExecStart"] == [f"{PYTHON} -m {(MODULES | CONSOLE)[process]}"]
    told = environment(unit.get("Environment", []))
    if tls:
        drop_in = options(FOLDER / f"kvkeep-{process}.service.d/tls.conf")
        names = [credential.partition(":")[0] for credential in drop_in["LoadCredential"]]
        Secrets(tmp_path, {name: name for name in names})
        told |= {
            name: value.replace("%d", str(tmp_path)) for name, value in environment(drop_in["Environment"]).items()
        }
    settings = understood(process, told | env_file())
    assert settings.security.serves_tls is tls
    assert not settings.insecure
    assert float(unit["TimeoutStopSec"][0].removesuffix("s")) >= shortest_stop(settings)


def test_every_setting_is_one() -> None:
    for path in FOLDER.rglob("*"):
        if path.is_file():
            assert not unknown_settings(path.read_text()), path


def test_processes_stop_in_the_order_in_which_they_need_each_other() -> None:
    after = {process: (FOLDER / f"kvkeep-{process}.service").read_text() for process in ONE_ENGINE}
    assert "After=kvkeep-cachemgr.service kvkeep-executor.service\n" in after["scheduler"]
    assert "After=kvkeep-cachemgr.service\n" in after["executor"]
    assert "After=" not in after["cachemgr"]
