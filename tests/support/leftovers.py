"""Folders of test runs that were ended by force: of stacks in /tmp, of their host tiers in /dev/shm."""

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

FOLDERS = (Path("/tmp"), Path("/dev/shm"))
# The beginnings of their names: see `tests.stack.Stack`.
PREFIX = "kvk-"
# No stack of a test is silent for this time: its logs, its Redis and its tiers write.
OLD_SECONDS = 3600.0


def remove_leftovers(folders: tuple[Path, ...] = FOLDERS) -> list[Path]:
    """Removes the folders of this user in which nothing has been written for an hour; returns them."""
    removed = []
    for folder in folders:
        for path in folder.glob(PREFIX + "*"):
            # Another run may remove the folder at the same time.
            with contextlib.suppress(OSError):
                if path.stat().st_uid == os.getuid() and max(_written(path)) < time.time() - OLD_SECONDS:
                    shutil.rmtree(path)
                    removed.append(path)
    return removed


def _written(folder: Path) -> Iterator[float]:
    yield folder.stat().st_mtime
    for path in folder.rglob("*"):
        yield path.lstat().st_mtime
