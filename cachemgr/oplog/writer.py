"""The operation log: every call that changes a manager, with its time, in a file that can be replayed.

Each entry is a length-prefixed LoggedOperation. The first entry has the manager's epoch and settings. The
file holds token ids, so only its owner may read it.
"""

import contextlib
import fcntl
import io
import itertools
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import BinaryIO, cast

import structlog
from google.protobuf import proto
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import DecodeError, Message
from prometheus_client import Gauge

from cachemgr.blocks.block_record import BlockRecord
from cachemgr.persistence.records import RecordError, decode_block, encode_block, encode_slot, pin_message, pin_of
from cachemgr.types import ManagerConfig, PinRecord
from protos.kvcache.v1 import kvcache_pb2 as pb

START = "Start"
ENDED = Gauge(
    "kvkeep_operation_log_ended", "Whether the operation log has ended early: its disk is full, or a write failed."
)
log = structlog.get_logger()


class OperationLogError(ValueError):
    """The file is no operation log, was written by a different version, or cannot be created."""


class OperationLog:
    """Writes each entry before its call is carried out, so that a crash of the process loses no entry.

    No call fails because of the log. If an entry cannot be written, the log ends there for good, since a replay needs
    every call. `is_whole`, a metric and one line in the process's log report this.
    """

    def __init__(self, file: BinaryIO, now: float, epoch: int, config: ManagerConfig) -> None:
        """`file` is unbuffered, so that a refused entry leaves nothing to be written later."""
        self._file = file
        self._end = 0
        self.is_whole = True
        ENDED.set(0)
        start = pb.LoggedStart(manager_epoch=epoch)
        start.settings.update(asdict(config))
        self.write(now, START, start)

    @classmethod
    def create(cls, path: Path, now: float, epoch: int, config: ManagerConfig) -> "OperationLog":
        """Creates a file that only its owner can read; an earlier start's file is renamed to PATH.1, PATH.2 and so on.

        Raises OperationLogError, also if another process still writes the earlier file.
        """
        try:
            _move_aside(path)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise OperationLogError(
                f"another cache manager writes the operation log {path}: "
                "give each a file of its own with KVKEEP_CACHEMGR_OPERATION_LOG"
            ) from error
        except OSError as error:
            raise OperationLogError(
                f"cannot create the operation log {path}: {error.strerror}; "
                "set KVKEEP_CACHEMGR_OPERATION_LOG to another file, or leave it out"
            ) from error
        return cls(os.fdopen(descriptor, "wb", buffering=0), now, epoch, config)

    def write(
        self,
        now: float,
        method: str,
        request: Message | None,
        stored: Iterable[BlockRecord] = (),
        pins: Iterable[PinRecord] = (),
        *,
        later: bool = False,
    ) -> None:
        """Appends an entry, unless the log has ended."""
        if not self.is_whole:
            return
        entry = pb.LoggedOperation(
            time=now,
            method=method,
            request=b"" if request is None else request.SerializeToString(),
            blocks=[pb.StoredBlock(field=encode_slot(*one.tier_slot), record=encode_block(one)) for one in stored],
            pins=[pin_message(pin) for pin in pins],
            later=later,
        )
        framed = io.BytesIO()
        proto.serialize_length_prefixed(entry, framed)
        data = framed.getbuffer()
        try:
            written = 0
            while written < len(data):
                written += self._file.write(data[written:])
        except OSError as error:
            self._give_up(error)
        else:
            self._end += len(data)

    def _give_up(self, error: OSError) -> None:
        self.is_whole = False
        ENDED.set(1)
        log.error("the operation log ends here: an entry could not be written", error=error.strerror)
        with contextlib.suppress(OSError):
            # A replay must not find a partial entry.
            self._file.truncate(self._end)

    def close(self) -> None:
        self._file.close()


def _move_aside(path: Path) -> None:
    """Renames the file of an earlier start. Raises OSError; BlockingIOError if a process still writes the file."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if stat.S_ISREG(mode):
        # A log's owner can read it, so an unreadable file is not a log that is being written.
        with contextlib.suppress(PermissionError), path.open("rb") as earlier:
            fcntl.flock(earlier, fcntl.LOCK_EX | fcntl.LOCK_NB)
        numbered = (path.with_name(f"{path.name}.{number}") for number in itertools.count(1))
        path.rename(next(free for free in numbered if not os.path.lexists(free)))


def read(file: BinaryIO) -> Iterator[pb.LoggedOperation]:
    """Yields all entries. Raises OperationLogError; an entry that a crash has cut short ends the log."""
    while True:
        try:
            # The function only calls `read` on the file, and returns None at the end of the file.
            entry = cast(
                "pb.LoggedOperation | None",
                proto.parse_length_prefixed(pb.LoggedOperation, cast("io.BytesIO", file)),
            )
        except (DecodeError, ValueError, OverflowError, MemoryError) as error:
            if not file.read(1):
                return
            raise OperationLogError("this is no operation log") from error
        if entry is None:
            return
        yield entry


def settings_of(start: pb.LoggedOperation) -> tuple[int, ManagerConfig]:
    """Epoch and settings of the manager that wrote the log. Raises OperationLogError."""
    try:
        if start.method != START:
            raise OperationLogError("this is no operation log: it does not begin with a start")
        begun = pb.LoggedStart.FromString(start.request)
        values = MessageToDict(begun.settings)
        fields = asdict(ManagerConfig())
        given = {name: type(fields[name])(value) for name, value in values.items()}
        return begun.manager_epoch, ManagerConfig(**given)
    except (DecodeError, KeyError, TypeError) as error:
        raise OperationLogError("another version of the cache manager wrote this operation log") from error


def stored_blocks(entry: pb.LoggedOperation) -> list[BlockRecord]:
    """The blocks of an executor that the store has. Raises OperationLogError."""
    try:
        return [decode_block(block.field, block.record) for block in entry.blocks]
    except RecordError as error:
        raise OperationLogError("another version of the cache manager wrote this operation log") from error


def stored_pins(entry: pb.LoggedOperation) -> list[PinRecord]:
    """The pins of an executor that the store has. Raises OperationLogError."""
    try:
        return [pin_of(message) for message in entry.pins]
    except RecordError as error:
        raise OperationLogError("another version of the cache manager wrote this operation log") from error
