"""The calls that change the manager: each is in the operation log; after an unexpected error, no call is answered.

A servicer's method decorated with `mutation` or `long_mutation` is such a call. Its name, request and time are logged
before the call is carried out; a replay calls the same method with the same request at the same time.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol, TypeVar, cast

from google.protobuf.message import Message

from cachemgr.blocks.block_record import BlockRecord
from cachemgr.errors import ManagerFailedError
from cachemgr.manager import CacheManager
from cachemgr.persistence.records import quota_of, rule_of, share_of
from cachemgr.persistence.redis_index import IndexStore
from cachemgr.rpc.event_feed import EventFeed
from cachemgr.slices import SLICE_SECONDS, Slices
from cachemgr.types import PinRecord, Restored
from protos.errors import ServiceError
from protos.kvcache.v1 import kvcache_pb2 as pb

# Seconds between two checks for expired leases.
EXPIRE_SECONDS = 0.5
# Log entries that are not methods of a service.
EXPIRE, CONTINUE, END_EPOCH, RESTORE_BLOCKS, END_RECOVERY = (
    "Expire",
    "Continue",
    "EndEpoch",
    "RestoreBlocks",
    "EndRecovery",
)
RESTORE_OPERATORS = "RestoreOperators"

Answer = TypeVar("Answer")
Request = TypeVar("Request", bound=Message)


class ManagerClock:
    """The manager's time. The time is constant within a call, or a slice of a call, and is the time in the log."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.now = clock()

    def __call__(self) -> float:
        return self.now

    def advance(self) -> float:
        """Reads the underlying clock."""
        self.now = self._clock()
        return self.now


class CallLog(Protocol):
    """Keeps every call for a replay."""

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
        """Logs that a call is about to be carried out at this time. Must not fail."""


class Mutations:
    """The only way to change a manager.

    A call that has begun to change the manager and fails with anything but a ServiceError may have left its work half
    done. `on_failure` gets the method and the error, and every later call is refused with ManagerFailedError.
    """

    def __init__(
        self,
        manager: CacheManager,
        clock: ManagerClock,
        log: CallLog | None = None,
        on_failure: Callable[[str, Exception], None] | None = None,
    ) -> None:
        self.manager = manager
        self.failed = False
        self._on_failure = on_failure
        self._clock = clock
        self._log = log
        self._expired_at = clock.now
        # The call that is carried out in slices, with its method; its answer follows the last slice.
        self._long_call: tuple[str, Slices[Any]] | None = None
        self.answer: Any = None
        self._one_at_a_time = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()

    def run(self, method: str, request: Message | None, call: Callable[[], Answer], *, later: bool = False) -> Answer:
        """Carries out a call. Raises what the call raises; even then the log has the call, as it advances the time.

        `later` is for a registration whose stored blocks follow by `restore_blocks` until `end_recovery`.
        """
        self._note(method, request, later=later)
        return self._whole(method, call)

    async def run_in_slices(self, method: str, request: Message, slices: Callable[[], Slices[Answer]]) -> Answer:
        """Carries out a call that may touch very many blocks, while other calls are answered. One such call at a time.

        It continues even if its caller disconnects.
        """
        task = asyncio.create_task(self._run_in_slices(method, request, slices))
        self._tasks.add(task)
        task.add_done_callback(self._has_ended)
        return await asyncio.shield(task)

    def _has_ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            # Retrieved here in case the caller has disconnected.
            task.exception()

    async def _run_in_slices(self, method: str, request: Message, slices: Callable[[], Slices[Answer]]) -> Answer:
        async with self._one_at_a_time:
            self.begin(method, request, slices)
            end = perf_counter() + SLICE_SECONDS
            while not self.go_on():
                if perf_counter() >= end:
                    await asyncio.sleep(0)
                    end = perf_counter() + SLICE_SECONDS
            answer: Answer = self.answer
            return answer

    def begin(self, method: str, request: Message, slices: Callable[[], Slices[Any]]) -> None:
        """Begins a call whose slices `go_on` takes; no other such call may be running."""
        self._note(method, request)
        self._long_call = method, slices()
        self.answer = None

    def go_on(self) -> bool:
        """Takes a slice of the running call; returns whether no slice is left. Raises what the call raises."""
        self._note(CONTINUE)
        if self._long_call is None:
            return True
        method, slices = self._long_call
        ended = False
        try:
            ended = self._whole(method, lambda: self._take_slice(slices))
        except BaseException:
            ended = True
            raise
        finally:
            if ended:
                self._long_call = None
        return ended

    def _take_slice(self, slices: Slices[Any]) -> bool:
        if inspect.getgeneratorstate(slices) == inspect.GEN_SUSPENDED:
            self.manager.go_on()
        try:
            next(slices)
        except StopIteration as ended:
            self.answer = ended.value
            return True
        return False

    def end_epoch(self, executor_id: str, executor_epoch: int) -> None:
        """Ends the epoch of a restarted executor that has too many blocks to keep in one call; the store has them."""
        self._note(END_EPOCH, pb.RecoveringExecutor(executor_id=executor_id, executor_epoch=executor_epoch))
        self._whole(END_EPOCH, lambda: self.manager.end_epoch(executor_id, executor_epoch))

    def is_recovering(self, executor_id: str) -> bool:
        return self.manager.is_recovering(executor_id)

    def restore_blocks(self, executor_id: str, executor_epoch: int, stored: list[BlockRecord]) -> None:
        """Restores a part of the stored blocks."""
        executor = pb.RecoveringExecutor(executor_id=executor_id, executor_epoch=executor_epoch)
        self._note(RESTORE_BLOCKS, executor, stored)
        self._whole(RESTORE_BLOCKS, lambda: self.manager.restore_blocks(executor_id, executor_epoch, stored))

    def end_recovery(self, executor_id: str, executor_epoch: int, pins: list[PinRecord]) -> Restored:
        """Ends the restoring of blocks and restores these pins; returns how many blocks are then cached."""
        executor = pb.RecoveringExecutor(executor_id=executor_id, executor_epoch=executor_epoch)
        self._note(END_RECOVERY, executor, pins=pins)
        self._whole(END_RECOVERY, lambda: self.manager.end_recovery(executor_id, executor_epoch, pins))
        return self.manager.cached_blocks(executor_id)

    def restore_operators(self, stored: pb.StoredOperators) -> None:
        """Restores stored rules, quotas and shares."""
        self._note(RESTORE_OPERATORS, stored)
        self._whole(
            RESTORE_OPERATORS,
            lambda: self.manager.operators.restore(
                map(rule_of, stored.rules), map(quota_of, stored.quotas), map(share_of, stored.shares)
            ),
        )

    def expire(self) -> None:
        """Ends leases and holds whose time is over; due every EXPIRE_SECONDS.

        A later call means a pause of the process, or a long call. The delay follows from the times in the
        log, so a replay sees the same pauses.
        """
        self._note(EXPIRE)
        late = max(0.0, self._clock.now - self._expired_at - EXPIRE_SECONDS)
        self._expired_at = self._clock.now
        self._whole(EXPIRE, lambda: self.manager.expire(late))

    def _whole(self, method: str, call: Callable[[], Answer]) -> Answer:
        """Carries out a call. An unexpected error sets `failed`, if the call has begun to change the manager."""
        begun = self.manager.begun
        try:
            return call()
        except ServiceError:
            raise
        except Exception as error:
            # A request that could not be read has changed nothing.
            if self.manager.begun > begun:
                self.failed = True
                if self._on_failure is not None:
                    self._on_failure(method, error)
            raise

    def _note(
        self,
        method: str,
        request: Message | None = None,
        stored: Iterable[BlockRecord] = (),
        pins: Iterable[PinRecord] = (),
        *,
        later: bool = False,
    ) -> None:
        if self.failed:
            raise ManagerFailedError("an earlier call has failed unexpectedly: the cache manager ends and starts again")
        # Stored leases are as of the clock's present time; advancing it would extend each lease.
        now = self._clock.now if method in (RESTORE_BLOCKS, END_RECOVERY) else self._clock.advance()
        if self._log is not None:
            self._log.write(now, method, request, stored, pins, later=later)


@dataclass(frozen=True)
class ServiceContext:
    """The parts that all servicers share. Without Redis, there is no store."""

    mutations: Mutations
    feed: EventFeed
    store: IndexStore | None = None

    @property
    def manager(self) -> CacheManager:
        """The manager, for reading; mutations change it."""
        return self.mutations.manager

    async def keep(self) -> bool:
        """Waits a moment for Redis to have all changes; returns whether it does, or there is no Redis."""
        return self.store is None or await self.store.flush_soon()


class Servicer(Protocol):
    """A service with mutations among its methods."""

    @property
    def context(self) -> ServiceContext:
        """The context in which its mutations are carried out."""


Service = TypeVar("Service", bound=Servicer)
Asked = TypeVar("Asked", contravariant=True)
Answered = TypeVar("Answered", covariant=True)


class Method(Protocol[Asked, Answered]):
    """A method of a servicer, as gRPC calls it."""

    def __call__(self, request: Asked, context: Any = None) -> Coroutine[Any, Any, Answered]: ...


def logged(handler: Callable[[Service, Request], Answer]) -> Callable[[Service, Request], Answer]:
    """Makes a change of the manager with a separate log entry, under its name without leading underscores."""
    name = handler.__name__.lstrip("_")

    @functools.wraps(handler)
    def change(self: Service, request: Request) -> Answer:
        answer = self.context.mutations.run(name, request, lambda: handler(self, request))
        self.context.feed.notify()
        return answer

    return change


def mutation(handler: Callable[[Service, Request], Answer]) -> Method[Request, Answer]:
    """Makes a service method that changes the manager at once."""
    change = logged(handler)

    @functools.wraps(handler)
    async def call(self: Service, request: Request, context: object = None) -> Answer:  # noqa: ARG001
        return change(self, request)

    return cast("Method[Request, Answer]", call)


def long_mutation(handler: Callable[[Service, Request], Slices[Answer]]) -> Method[Request, Answer]:
    """Makes a service method that changes the manager in slices, as it may touch very many blocks."""
    name = handler.__name__.lstrip("_")

    @functools.wraps(handler)
    async def call(self: Service, request: Request, context: object = None) -> Answer:  # noqa: ARG001
        try:
            return await self.context.mutations.run_in_slices(name, request, lambda: handler(self, request))
        finally:
            self.context.feed.notify()

    return cast("Method[Request, Answer]", call)


def kept(call: Method[Request, Answer]) -> Method[Request, Answer]:
    """Makes the answer to an operator's change wait a moment for Redis: a crash after the answer must not undo it."""
    method: Callable[[Servicer, Request], Awaitable[Answer]] = cast("Any", call)

    @functools.wraps(call)
    async def keep(self: Servicer, request: Request, context: object = None) -> Answer:  # noqa: ARG001
        answer = await method(self, request)
        if not getattr(request, "validate_only", False):
            await self.context.keep()
        return answer

    return cast("Method[Request, Answer]", keep)


def handlers(servicer: object) -> dict[str, Callable[[Any], Any]]:
    """A servicer's mutations by their names in the log, as functions of the request; generators for long mutations."""
    return {
        name.lstrip("_"): functools.partial(inspect.unwrap(method), servicer)
        for name, method in vars(type(servicer)).items()
        if hasattr(method, "__wrapped__")
    }
