"""Files that a process is given: read again when they change, and refused if others can read their secrets.

Also the folders that a process may write to.
"""

import errno
import stat
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import structlog

# The minimum time between checks of a file, which happen only when its contents are requested.
_LOOK_SECONDS = 1.0
# Permissions that a secret's file must not have. Its group may read, as orchestrators pass secrets this way.
_FORBIDDEN = stat.S_IRWXO | stat.S_IWGRP

log = structlog.get_logger()

T = TypeVar("T")

# Size of the test file that is written to a folder at the start. With less free space, the folder counts as full.
_PROBE_BYTES = 1 << 16
_ADVICE = dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free some room there, or ") | dict.fromkeys(
    (errno.EROFS, errno.EACCES, errno.EPERM), "make it writable, or "
)


class FolderError(Exception):
    """A folder cannot be written in; the message is one line that names it, its setting and a remedy."""

    def __init__(self, folder: Path, setting: str, error: OSError) -> None:
        advice = _ADVICE.get(error.errno or 0, "")
        super().__init__(
            f"cannot write in the folder {folder}: {error.strerror or error}: "
            f"{advice}choose another folder with {setting}"
        )


def prepare_folder(folder: Path, setting: str) -> None:
    """Makes a folder for its owner only, unless it exists, and tries to write in it. Raises FolderError."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder, buffering=0) as probe:
            probe.write(bytes(_PROBE_BYTES))
    except OSError as error:
        raise FolderError(folder, setting, error) from error


def read_secret(path: Path) -> str:
    """Reads the text of a file that only its owner and its group can read. Raises ValueError and OSError."""
    with path.open() as file:
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & _FORBIDDEN:
            raise ValueError(f"{path} has mode {mode:o} and can be read by others or written by its group: chmod 600")
        return file.read()


class Reloaded(Generic[T]):
    """Contents of files. Changed files are read again; if they cannot be read, nothing changes."""

    def __init__(self, paths: Sequence[Path], read: Callable[[], T]) -> None:
        """read: may raise ValueError or OSError, which reach the caller here, and later the log."""
        self._paths = paths
        self._read = read
        self._stamp = self._look()
        self._value = read()
        self._looked = time.monotonic()

    def get(self) -> T:
        """Returns the value; the same object as before unless a file has changed."""
        now = time.monotonic()
        if now - self._looked >= _LOOK_SECONDS:
            self._looked = now
            try:
                stamp = self._look()
                if stamp != self._stamp:
                    # First, so that the log describes a bad file only once.
                    self._stamp = stamp
                    self._value = self._read()
                    log.info("changed files loaded", paths=[str(path) for path in self._paths])
            except (OSError, ValueError) as error:
                log.error("changed files are not loaded", cause=str(error))
        return self._value

    def _look(self) -> list[tuple[int, int, int, int]]:
        found = [path.stat() for path in self._paths]
        return [(one.st_ino, one.st_size, one.st_mtime_ns, one.st_mode) for one in found]
