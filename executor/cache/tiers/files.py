"""Opens a lower tier's file: in a private folder, locked, fully allocated, and empty unless its layout matches."""

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import stat
import time
from dataclasses import dataclass
from pathlib import Path

import structlog

from executor.cache.memory import available_memory
from executor.cache.tiers.layout import FileLayout, least_size
from executor.errors import BrokenStorageError, CacheFileError

log = structlog.get_logger()

# A process that was just killed may still hold the lock.
LOCK_SECONDS = 2.0


@dataclass(frozen=True)
class FileSettings:
    """Folder and bytes of a tier's file, with the variables that set them. in_memory: whether the file fills memory."""

    folder: Path
    size: int
    folder_variable: str
    size_variable: str
    in_memory: bool = False


def file_name(tier: str, executor_id: str) -> str:
    """Returns an executor's file name: the tier, the id with "-" for characters not allowed, and a digest of the id."""
    readable = re.sub(r"[^A-Za-z0-9_-]", "-", executor_id)[:64]
    return f"{tier}-{readable}-{hashlib.sha256(executor_id.encode()).hexdigest()[:16]}.kv"


def check_space(settings: FileSettings) -> None:
    """Raises CacheFileError if a tier of this size certainly does not fit, or its folder cannot be used.

    Creates the folder. Called long before `open_file` allocates the file.
    """
    if not settings.size:
        return
    try:
        folder = _open_folder(settings)
    except BrokenStorageError:
        # open_tiers leaves the tier out.
        return
    try:
        # The space of existing cache files is reused.
        ours = sum(entry.stat().st_blocks * 512 for entry in os.scandir(folder) if entry.is_file(follow_symlinks=False))
        found = os.fstatvfs(folder)
    finally:
        os.close(folder)
    free = found.f_bavail * found.f_frsize
    if settings.in_memory:
        free = min(free, available_memory())
    # The file is smaller than the setting by less than a block of the model, whose size is not known yet.
    if settings.size > (free + ours) * 1.1 + (1 << 20):
        raise CacheFileError(
            f"{settings.size_variable}: no space for {settings.size} bytes in {settings.folder}, which has "
            f"{free + ours}: choose a smaller size, or another folder with {settings.folder_variable}"
        )


def open_file(settings: FileSettings, name: str, layout: FileLayout) -> int:
    """Returns a descriptor of the file, locked for this process and with fitting contents. Raises CacheFileError."""
    if layout.slots < 1:
        raise CacheFileError(
            f"{settings.size_variable} is {settings.size}: a single block takes {least_size(layout.block_bytes)} bytes"
        )
    folder = _open_folder(settings)
    try:
        fd = _open_in(folder, name, settings)
    finally:
        os.close(folder)
    try:
        _lock(fd, settings, name)
        _fit(fd, settings, name, layout)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _open_folder(settings: FileSettings) -> int:
    """Opens the folder, which other users may read but in which only this user may write."""
    folder = settings.folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise _refused(error, f"{settings.folder_variable}: {folder} cannot be opened: {error.strerror}") from error
    found = os.fstat(fd)
    if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        os.close(fd)
        raise CacheFileError(
            f"{settings.folder_variable}: {folder} must belong to this process's user, and no other may write there"
        )
    return fd


def _refused(error: OSError, message: str) -> CacheFileError:
    """Returns the error for a wrong setting, or for a later fault of the storage."""
    return (BrokenStorageError if error.errno in (errno.EROFS, errno.EIO) else CacheFileError)(message)


def _open_in(folder: int, name: str, settings: FileSettings) -> int:
    try:
        fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
    except OSError as error:
        raise _refused(
            error, f"{settings.folder_variable}: cannot open {settings.folder / name}: {error.strerror}"
        ) from error
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_nlink != 1:
        os.close(fd)
        raise CacheFileError(f"{settings.folder_variable}: {settings.folder / name} is no file of this process's user")
    os.fchmod(fd, 0o600)
    return fd


def _lock(fd: int, settings: FileSettings, name: str) -> None:
    until = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                raise CacheFileError(
                    f"another executor uses {settings.folder / name}: each needs a KVKEEP_EXECUTOR_EXECUTOR_ID "
                    f"or a {settings.folder_variable} of its own"
                ) from None
            time.sleep(0.05)


def _fit(fd: int, settings: FileSettings, name: str, layout: FileLayout) -> None:
    """Recreates the file unless it has this layout; in both cases, all its space is allocated afterwards."""
    fits = os.fstat(fd).st_size == layout.size and os.pread(fd, len(layout.header), 0) == layout.header
    if not fits and os.fstat(fd).st_size:
        log.info("a cache file of another layout is discarded", file=str(settings.folder / name))
        os.ftruncate(fd, 0)
    missing = layout.size - os.fstat(fd).st_blocks * 512
    if settings.in_memory and missing > available_memory():
        raise CacheFileError(f"{settings.size_variable}: there is no memory for {missing} bytes more")
    try:
        if missing > 0:
            os.posix_fallocate(fd, 0, layout.size)
        if not fits:
            # Written last, so that an interruption leaves a file that fits no layout. All other bytes are zeros.
            os.pwrite(fd, layout.header, 0)
    except OSError as error:
        if not fits:
            os.ftruncate(fd, 0)
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM):
            raise _refused(error, f"{settings.folder_variable}: {settings.folder / name}: {error.strerror}") from error
        raise CacheFileError(
            f"{settings.size_variable}: no space for {layout.size} bytes in {settings.folder}: {error.strerror}"
        ) from error
    log.info("cache file ready", file=str(settings.folder / name), slots=layout.slots, kept=fits)
