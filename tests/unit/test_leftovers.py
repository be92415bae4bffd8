"""Folders of runs that were ended by force."""

import os
import time
from pathlib import Path

from tests.support.leftovers import OLD_SECONDS, remove_leftovers


def folder(path: Path, *, seconds_ago: float) -> Path:
    """A folder with a file, both written some time ago."""
    (path / "state").mkdir(parents=True)
    (path / "state" / "log").write_text("a line")
    written = time.time() - seconds_ago
    for one in (path / "state" / "log", path / "state", path):
        os.utime(one, (written, written))
    return path


def test_only_what_nothing_has_written_to_for_an_hour_goes(tmp_path: Path) -> None:
    old = folder(tmp_path / "kvk-old", seconds_ago=OLD_SECONDS + 60)
    young = folder(tmp_path / "kvk-young", seconds_ago=OLD_SECONDS - 600)
    running = folder(tmp_path / "kvk-running", seconds_ago=OLD_SECONDS + 60)
    other = folder(tmp_path / "other", seconds_ago=OLD_SECONDS + 60)
    os.utime(running / "state" / "log")
    assert remove_leftovers((tmp_path, tmp_path / "not there")) == [old]
    assert [path.exists() for path in (old, young, running, other)] == [False, True, True, True]
