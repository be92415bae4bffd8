"""Replays an operation log and reports the resulting state, so that one file suffices as a bug report."""

from dataclasses import dataclass
from functools import partial
from inspect import isgeneratorfunction
from pathlib import Path
from typing import BinaryIO, TypeVar

from google.protobuf.message import DecodeError, Message

from cachemgr.manager import CacheManager
from cachemgr.operators.state_dump import state_hash
from cachemgr.oplog import writer as oplog
from cachemgr.oplog.writer import OperationLogError
from cachemgr.rpc import convert
from cachemgr.rpc import mutations as names
from cachemgr.rpc.admin_service import CacheAdminService
from cachemgr.rpc.data_service import CacheManagerService
from cachemgr.rpc.event_feed import EventFeed
from cachemgr.rpc.mutations import ManagerClock, Mutations, ServiceContext, handlers
from protos.errors import ServiceError
from protos.kvcache.v1 import kvcache_pb2 as pb

Request = TypeVar("Request", bound=Message)


@dataclass(frozen=True, slots=True)
class Replayed:
    """The manager after a replay. `refused` counts calls that got an error, as they did when the log was written."""

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
    manager = CacheManager(epoch, managed, config)
    calls = _Calls(ServiceContext(Mutations(manager, managed), EventFeed(manager.queries)))
    count = refused = 0
    for entry in entries:
        time = entry.time
        count += 1
        try:
            calls.run(entry)
        except ServiceError:
            refused += 1
    return Replayed(manager, count, refused)


class _Calls:
    """The calls of a log, as the services carry them out."""

    def __init__(self, context: ServiceContext) -> None:
        self._mutations = context.mutations
        self._data = CacheManagerService(context)
        self._handlers = handlers(self._data) | handlers(CacheAdminService(context))

    def run(self, entry: pb.LoggedOperation) -> None:
        """Carries out a call. Raises what the call raises, and OperationLogError."""
        mutations = self._mutations
        match entry.method:
            case names.EXPIRE:
                mutations.expire()
            case names.CONTINUE:
                mutations.go_on()
            case names.RESTORE_OPERATORS:
                mutations.restore_operators(_request(pb.StoredOperators, entry))
            case names.END_EPOCH | names.RESTORE_BLOCKS | names.END_RECOVERY:
                self._recover(entry)
            case "RegisterExecutor":
                request = _request(pb.RegisterExecutorRequest, entry)
                self._data.register(request, convert.executor_spec(request), later=entry.later)
            case _:
                self._run_method(entry)

    def _recover(self, entry: pb.LoggedOperation) -> None:
        executor = _request(pb.RecoveringExecutor, entry)
        named = executor.executor_id, executor.executor_epoch
        if entry.method == names.END_EPOCH:
            self._mutations.end_epoch(*named)
        elif entry.method == names.RESTORE_BLOCKS:
            self._mutations.restore_blocks(*named, oplog.stored_blocks(entry))
        else:
            self._mutations.end_recovery(*named, oplog.stored_pins(entry))

    def _run_method(self, entry: pb.LoggedOperation) -> None:
        handler = self._handlers.get(entry.method)
        if handler is None:
            raise OperationLogError(f"the operation log has an unknown call, {entry.method}")
        call = partial(handler, _request(getattr(pb, f"{entry.method}Request"), entry))
        if isgeneratorfunction(handler):
            self._mutations.begin(entry.method, call.args[0], call)
        else:
            self._mutations.run(entry.method, call.args[0], call)


def _request(kind: type[Request], entry: pb.LoggedOperation) -> Request:
    try:
        return kind.FromString(entry.request)
    except DecodeError as error:
        raise OperationLogError(f"the operation log has a {entry.method} that cannot be read") from error


def report(path: Path) -> str:
    """Returns the output of `cachemgr replay FILE`. Raises OperationLogError, OSError."""
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
