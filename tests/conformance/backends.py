"""The cache manager behind three doors that all take and give messages: the object, its log replayed, the service."""

import asyncio
import io
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from unittest.mock import patch

import grpc
from google.protobuf.message import Message

from cachemgr.manager import CacheManager
from cachemgr.operators.state_dump import state_hash
from cachemgr.oplog.replay import replay
from cachemgr.process import CacheManagerProcess
from cachemgr.rpc.event_feed import EventFeed
from cachemgr.rpc.event_service import CacheEventService
from cachemgr.rpc.mutations import ManagerClock, ServiceContext
from cachemgr.settings import CachemgrSettings
from cachemgr.types import ManagerConfig
from protos.kvcache.v1 import kvcache_pb2 as pb
from protos.kvcache.v1 import kvcache_pb2_grpc as pb_grpc
from protos.rpc.channel import open_channel
from protos.rpc.errors import ServiceError, from_rpc_error, status_code
from tests.support.direct_calls import DirectCalls
from tests.support.patience import patience

Clock = Callable[[], float]
# Exact counts, and no lease of the scheduler or the executor that ends while a case lets time pass.
SETTINGS = {"capacity_ahead_tokens": 0, "free_watermark": 0.0, "lease_seconds": 1e9}


class Refused(Exception):  # noqa: N818 - reads as a sentence where it is raised
    """A call that was answered with an error."""

    def __init__(self, code: str, message: str, fields: dict[str, str]) -> None:
        super().__init__(f"{code}: {message} {fields or ''}")
        self.code = code
        self.fields = fields


class Backend(Protocol):
    """What a case runs against."""

    def call(self, method: str, request: Message) -> Any:
        """The answer. Raises Refused."""

    def events(self, after: int | None) -> list[pb.Event]:
        """The snapshot, or all events after a number. Raises Refused."""

    def verify(self) -> None:
        """Makes the checks that only this backend can make."""

    def close(self) -> None:
        """Ends it."""


class NothingMore(Exception):  # noqa: N818 - no error
    """The point at which a watch would wait."""


class EndOfEvents(EventFeed):
    """A feed in which nothing happens during a watch."""

    async def wait_for_events(self, after: int) -> None:
        raise NothingMore


class ObjectBackend:
    """The manager itself."""

    def __init__(self, settings: dict[str, Any], clock: Clock, folder: Path) -> None:
        config = ManagerConfig(**SETTINGS | settings)
        managed = ManagerClock(clock)
        self._open(DirectCalls(CacheManager(1, managed, config), managed, self._log()))

    def _log(self) -> io.BytesIO | None:
        return None

    def _open(self, calls: DirectCalls) -> None:
        self.manager = calls.manager
        self._calls = calls
        context = ServiceContext(calls.mutations, EndOfEvents(calls.manager.queries))
        self._watch = CacheEventService(context)

    def call(self, method: str, request: Message) -> Any:
        try:
            if method == "RegisterExecutor" or method in self._calls.handlers:
                return self._calls.run(method, request)
            for service in (self._calls.data, self._calls.admin):
                if method in vars(type(service)):
                    return _finish(getattr(service, method)(request, None))
        except ServiceError as error:
            raise Refused(status_code(error).name, error.message, error.fields) from error
        raise Refused("UNIMPLEMENTED", method, {})

    def events(self, after: int | None, salt: str | None = None) -> list[pb.Event]:
        watch = self._watch.WatchEvents(pb.WatchEventsRequest(after_event_number=after, salt=salt), None)
        found: list[pb.Event] = []
        try:
            while after != self.manager.queries.last_event:
                found += _finish(watch.__anext__()).events
        except NothingMore:
            pass
        except ServiceError as error:
            raise Refused(status_code(error).name, error.message, error.fields) from error
        return found

    def verify(self) -> None:
        pass

    def close(self) -> None:
        pass


class _Replayed(ObjectBackend):
    def __init__(self, manager: CacheManager) -> None:
        self._open(DirectCalls(manager, ManagerClock(lambda: 0.0)))


class LoggedBackend(ObjectBackend):
    """The manager with its operation log; `verify` builds it again from the log and compares."""

    READS = (
        ("CheckPool", pb.CheckPoolRequest()),
        ("ListPools", pb.ListPoolsRequest()),
        ("ListBlocks", pb.ListBlocksRequest(pool_id="gpu/0", page_size=1000)),
        ("ListSequences", pb.ListSequencesRequest(page_size=1000)),
    )

    def _log(self) -> io.BytesIO:
        self._file = io.BytesIO()
        return self._file

    def verify(self) -> None:
        again = replay(io.BytesIO(self._file.getvalue())).manager
        assert state_hash(again.queries.state()) == state_hash(self.manager.queries.state())
        replayed = _Replayed(again)
        for method, request in self.READS:
            assert replayed.call(method, request) == self.call(method, request), method
        assert replayed.events(None) == self.events(None)


class ServiceBackend:
    """The process with its servers on unix sockets. It runs whenever a call waits for it, and stands still else."""

    def __init__(self, settings: dict[str, Any], clock: Clock, folder: Path) -> None:
        self._loop = asyncio.new_event_loop()
        self._run(self._start(settings, clock, folder))

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.run_until_complete(coroutine)

    async def _start(self, settings: dict[str, Any], clock: Clock, folder: Path) -> None:
        values = SETTINGS | settings
        known = {name: value for name, value in values.items() if name in CachemgrSettings.model_fields}
        addresses = {"cachemgr_address": f"unix:{folder}/data", "cachemgr_admin_address": f"unix:{folder}/admin"}
        read = CachemgrSettings(metrics_address="", drain_seconds=0.5, state_dir=folder, **addresses, **known)
        # What operators cannot set, cases can.
        beyond = {name: value for name, value in values.items() if name not in known}
        with patch("cachemgr.process.ManagerConfig", partial(ManagerConfig, **beyond)):
            self._process = CacheManagerProcess(read, clock=clock)
        await self._process.start()
        self._channels = [open_channel(address) for address in addresses.values()]
        data, admin = self._channels
        self._stubs = [pb_grpc.CacheManagerServiceStub(data), pb_grpc.CacheAdminServiceStub(admin)]
        self._watch = pb_grpc.CacheEventServiceStub(admin).WatchEvents

    def call(self, method: str, request: Message) -> Any:
        stub = next(stub for stub in self._stubs if hasattr(stub, method))
        return self._run(self._answer(getattr(stub, method), request))

    async def _answer(self, method: Any, request: Message) -> Any:
        try:
            return await method(request, timeout=patience(10))
        except grpc.aio.AioRpcError as error:
            raise _refusal(error) from error

    def events(self, after: int | None) -> list[pb.Event]:
        return self._run(self._events(after))

    async def _events(self, after: int | None) -> list[pb.Event]:
        snapshot = self._watch(pb.WatchEventsRequest(), timeout=patience(10))
        last = (await anext(aiter(snapshot))).events[0].event_number
        snapshot.cancel()
        if after == last:
            return []
        found: list[pb.Event] = []
        watch = self._watch(pb.WatchEventsRequest(after_event_number=after), timeout=patience(10))
        try:
            async for message in watch:
                found += message.events
                if found[-1].event_number == last:
                    break
        except grpc.aio.AioRpcError as error:
            raise _refusal(error) from error
        watch.cancel()
        return found

    def verify(self) -> None:
        pass

    def close(self) -> None:
        self._run(self._stop())
        self._loop.close()

    async def _stop(self) -> None:
        for channel in self._channels:
            await channel.close()
        await self._process.stop()


BACKENDS: dict[str, type[Any]] = {"object": ObjectBackend, "replay": LoggedBackend, "service": ServiceBackend}


def _refusal(error: grpc.aio.AioRpcError) -> Refused:
    remote = from_rpc_error(error)
    return Refused(remote.code.name, remote.message, remote.fields)


def _finish(coroutine: Any) -> Any:
    """The result of a coroutine that waits for nothing: at most it lets others run between two slices of a read."""
    while True:
        try:
            waited_for = coroutine.send(None)
        except StopIteration as finished:
            return finished.value
        assert waited_for is None, "the call waits for something"
