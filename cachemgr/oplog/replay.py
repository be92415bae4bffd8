"""Runs an operation log again and says what state it leads to, so that a bug report is a file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from google.protobuf.message import DecodeError, Message

from cachemgr.manager import CacheManager
from cachemgr.operators.state_dump import state_hash
from cachemgr.oplog import writer as oplog
from cachemgr.oplog.operations import OPERATIONS, ManagerClock, Operations
from cachemgr.oplog.writer import OperationLogError
from protos.errors import ServiceError
from protos.kvcache.v1 import kvcache_pb2 as pb


@dataclass(frozen=True, slots=True)
class Replayed:
    """The manager that a log leads to. `refused` calls got an error, as they did when the log was written."""

    manager: CacheManager
    operations: int
    refused: int


def replay(file: BinaryIO) -> Replayed:
    """Builds a manager from an operation log. Raises OperationLogError."""
    entries = oplog.read(file)
    start = next(entries, None)
    if start is None:
        raise OperationLogError("the operation log is empty")
    time = start.time

    def clock() -> float:
        return time

    epoch, config = oplog.settings_of(start)
    managed = ManagerClock(clock)
    operations = Operations(CacheManager(epoch, managed, config), managed)
    count = refused = 0
    for entry in entries:
        time = entry.time
        count += 1
        try:
            _run(operations, entry)
        except ServiceError:
            refused += 1
    return Replayed(operations.manager, count, refused)


def _run(operations: Operations, entry: pb.LoggedOperation) -> None:
    if entry.method == oplog.EXPIRE:
        operations.expire()
        return
    if entry.method == oplog.GO_ON:
        operations.go_on()
        return
    if entry.method in (oplog.END_EPOCH, oplog.PUT_BACK, oplog.END_RECOVERY):
        executor = _request(pb.RecoveringExecutor, entry)
        if entry.method == oplog.END_EPOCH:
            operations.end_epoch(executor.executor_id, executor.executor_epoch)
        elif entry.method == oplog.PUT_BACK:
            operations.put_back(executor.executor_id, executor.executor_epoch, oplog.remembered_blocks(entry))
        else:
            operations.end_recovery(executor.executor_id, executor.executor_epoch, oplog.remembered_pins(entry))
        return
    operation = OPERATIONS.get(entry.method)
    if operation is None:
        raise OperationLogError(f"the operation log has an unknown call, {entry.method}")
    request = _request(operation.request, entry)
    if entry.method == "RegisterExecutor":
        operations.register_executor(request, later=entry.later)
    elif entry.in_steps and operation.steps is not None:
        operations.begin(entry.method, request)
    else:
        operations.run(entry.method, request)


def _request(kind: type[Message], entry: pb.LoggedOperation) -> Any:
    try:
        return kind.FromString(entry.request)
    except DecodeError as error:
        raise OperationLogError(f"the operation log has a {entry.method} that cannot be read") from error


def report(path: Path) -> str:
    """What `cachemgr replay FILE` prints. Raises OperationLogError, OSError."""
    with path.open("rb") as file:
        replayed = replay(file)
    manager = replayed.manager
    lines = [f"operations {replayed.operations}, of which refused {replayed.refused}"]
    lines += [
        f"pool {pool.pool_id}: {pool.used_blocks} used, {pool.cached_blocks} cached, {pool.free_blocks} free"
        f" of {pool.total_blocks} blocks"
        for pool in manager.queries.pools()
    ]
    lines += [f"violation in {one.pool_id}, slot {one.slot}: {one.message}" for one in manager.queries.check_pool()]
    lines.append(f"state {state_hash(manager.queries.state())}")
    return "\n".join(lines)
