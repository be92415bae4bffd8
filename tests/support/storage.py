"""Folders that take no more data: on a full file system, and on a read-only file system."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

KINDS = {"full": "No space left on device", "read-only": "Read-only file system"}


@contextlib.contextmanager
def broken(kind: str, folder: Path) -> Iterator[Path]:
    """An empty folder of this kind; skips the test if nothing may be mounted."""
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", folder], check=False).returncode:
        pytest.skip("this user may not mount")
    try:
        if kind == "full":
            _fill(folder / "filling")
        else:
            subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def _fill(file: Path) -> None:
    with file.open("wb", buffering=0) as filling, contextlib.suppress(OSError):
        while True:
            filling.write(bytes(4096))
