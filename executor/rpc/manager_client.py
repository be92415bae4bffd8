"""The executor's dealings with the cache manager: registration, lease, confirmed copies."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Iterable
from typing import Protocol

import grpc
import structlog

from executor.cache.tiers.hazards import SlotRef
from executor.rpc.sessions import SchedulerLeases
from executor.step import Copy, Tier
from protos.kvcache.v1 import kvcache_pb2 as kv
from protos.kvcache.v1 import kvcache_pb2_grpc as kv_rpc
from protos.rpc.errors import from_rpc_error

log = structlog.get_logger()

CALL_SECONDS = 5.0
# A restarted manager does not know the executor until it registers again, so renewals are frequent.
MAX_RENEWAL_SECONDS = 0.5
BACKOFF_SECONDS = 0.1
# A manager refuses an executor for this reason if another process with its name has started since.
_REPLACED = "STALE_EXECUTOR"
# A restarted manager does not restore blocks that the steps of a session may still write into.
_SCHEDULER_FIRST = "SCHEDULER_FIRST"
# Longest time for an update: the manager reorders the eviction of very many blocks, in slices.
UPDATE_SECONDS = 60.0
# Reasons with which a manager refuses an unknown executor, or another epoch of a known executor.
_UNREGISTERED = ("UNKNOWN_EXECUTOR", _REPLACED)


class Announcement(Protocol):
    """How an executor registers. weight_version: version of the weights that it computes with."""

    weight_version: str

    @property
    def executor_id(self) -> str:
        """Stable name of the executor."""
        ...

    @property
    def epoch(self) -> int:
        """Chosen at its start."""
        ...

    def request(self, *, again: bool, awaited: Collection[SlotRef]) -> kv.RegisterExecutorRequest:
        """Returns the present registration. again: whether it has registered before.

        awaited: slots that will be written by copies that have not begun.
        """
        ...


class TransferWorker(Protocol):
    """Runs the copies that the cache manager itself asks for."""

    @property
    def last_step(self) -> int:
        """Number of the newest step that has begun."""
        ...

    def transfer(self, copies: tuple[Copy, ...]) -> None:
        """Begins copies; the tickets of those that have ended go to a TransferLog."""
        ...


class Fence(Protocol):
    """Keeps the steps of a scheduler that has not registered with the manager away from blocks that are restored."""

    @property
    def manager_epoch(self) -> int:
        """Epoch of the manager whose blocks running steps may write into; 0 if certainly no step runs."""
        ...

    async def cut_off(self) -> None:
        """Ends the session and refuses new sessions until `admit_again`; returns once no step runs any more."""
        ...

    def admit_again(self) -> None:
        """Accepts sessions again after `cut_off`."""
        ...


class TransferLog:
    """Copies that have yet to be confirmed. Only `confirm` may be called outside the asyncio loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        # Copies that the manager itself asked for and that have not ended, by ticket.
        self.open: dict[int, Copy] = {}
        self.done: list[int] = []
        self.failed: list[int] = []
        self.has_ended, self.all_confirmed = asyncio.Event(), asyncio.Event()
        self.all_confirmed.set()

    def confirm(self, done: tuple[int, ...], failed: tuple[int, ...]) -> None:
        """Queues tickets of finished and of failed copies."""
        self._loop.call_soon_threadsafe(self._add, done, failed)

    def _add(self, done: tuple[int, ...], failed: tuple[int, ...]) -> None:
        for ticket in (*done, *failed):
            self.open.pop(ticket, None)
        self.done.extend(done)
        self.failed.extend(failed)
        self.has_ended.set()
        self.all_confirmed.clear()

    def remove(self, done: int, failed: int) -> None:
        """Forgets the first `done` and `failed` tickets, which are confirmed."""
        del self.done[:done], self.failed[:failed]
        if not self.done and not self.failed:
            self.has_ended.clear()
            self.all_confirmed.set()


class ManagerClient:
    """Runs two loops as long as the process lives. All methods are called on the asyncio loop."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        announcement: Announcement,
        worker: TransferWorker,
        transfers: TransferLog,
        set_registered: Callable[[bool], None],
        leases: SchedulerLeases,
        fence: Fence,
    ) -> None:
        """transfers: receives the tickets of ended copies.

        set_registered: called with True after each registration, and with False after a newer process has registered.
        """
        self._stub: kv_rpc.CacheManagerServiceAsyncStub = kv_rpc.CacheManagerServiceStub(channel)
        self._announcement = announcement
        self._worker = worker
        self._transfers = transfers
        self._set_registered = set_registered
        self._leases = leases
        self._fence = fence
        # Tickets of copies from renewals that have begun, as long as a manager may ask for them again.
        self._begun: set[int] = set()
        self._registered = asyncio.Event()
        # Held during a registration or an update of the weights: the manager keeps the version that was reported last.
        self._reporting = asyncio.Lock()
        self._manager_epoch = 0
        self._lease_seconds = self._renewal_seconds = MAX_RENEWAL_SECONDS

    async def run(self) -> None:
        """Registers and confirms until it is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._stay_registered())
            tasks.create_task(self._confirm_all())

    async def update_weights(self, weight_version: str) -> int:
        """Tells the manager that the executor computes with new weights; returns how many cached blocks are of others.

        Raises RemoteError; the manager then has the previous version, or learns that version from the next
        registration. No session may be open during this call.
        """
        async with self._reporting:
            try:
                answer = await self._tell_weights(weight_version, UPDATE_SECONDS)
            except grpc.aio.AioRpcError as failed:
                # The update may have been carried out nevertheless.
                await self._tell_for_certain()
                raise from_rpc_error(failed) from failed
            self._announcement.weight_version = weight_version
            return answer.other_blocks

    async def take_weights_back(self, weight_version: str) -> None:
        """Returns to the previous weights' version.

        Ends once the manager has taken the version, or will learn it from the next registration.
        """
        async with self._reporting:
            self._announcement.weight_version = weight_version
            await self._tell_for_certain()

    async def _tell_for_certain(self) -> None:
        """Repeats the announced version until the manager has taken it, or a registration will announce it."""
        while True:
            try:
                await self._tell_weights(self._announcement.weight_version, CALL_SECONDS)
            except grpc.aio.AioRpcError as failed:
                error = from_rpc_error(failed)
                # Then the next registration announces the version.
                if error.reason in _UNREGISTERED:
                    return
                log.warning("the version of the weights is not taken back yet", cause=str(error))
                await asyncio.sleep(BACKOFF_SECONDS)
            else:
                return

    async def _tell_weights(self, weight_version: str, seconds: float) -> kv.UpdateWeightsResponse:
        request = kv.UpdateWeightsRequest(
            executor_id=self._announcement.executor_id,
            executor_epoch=self._announcement.epoch,
            weight_version=weight_version,
        )
        return await self._stub.UpdateWeights(request, timeout=seconds)

    async def confirmed(self, seconds: float) -> None:
        """Waits until everything is confirmed, but at most `seconds`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._transfers.all_confirmed.wait()

    async def _stay_registered(self) -> None:
        again = False
        while True:
            await self._register(again)
            again = True
            self._registered.set()
            self._set_registered(True)
            await self._renew()
            self._registered.clear()

    async def _register(self, again: bool) -> None:
        # When the manager first waited for the scheduler of the session.
        waiting_since: float | None = None
        while True:
            try:
                # Does not wait for a connection: each failure is logged, so that operators see what is missing.
                async with self._reporting:
                    answer = await self._stub.RegisterExecutor(self._request(again), timeout=CALL_SECONDS)
            except grpc.aio.AioRpcError as failed:
                error = from_rpc_error(failed)
                if error.reason == _REPLACED:
                    # Not forever: the manager forgets an executor whose lease has run out.
                    self._set_registered(False)
                log.info("waiting for the cache manager", cause=str(error))
                await asyncio.sleep(BACKOFF_SECONDS)
                if error.reason == _SCHEDULER_FIRST:
                    waiting_since = waiting_since or time.monotonic()
                    # The scheduler cannot reach the manager, or is gone: its steps must not keep the blocks forever.
                    if time.monotonic() - waiting_since >= self._lease_seconds:
                        await self._fence.cut_off()
                continue
            self._fence.admit_again()
            self._manager_epoch = answer.manager_epoch
            self._set_lease(answer.lease_duration.ToTimedelta().total_seconds())
            log.info(
                "registered with the cache manager",
                restored_blocks=answer.restored_blocks,
                restored_lower_blocks=answer.restored_lower_blocks,
                again=again,
            )
            return

    def _request(self, again: bool) -> kv.RegisterExecutorRequest:
        awaited = [(copy.target_tier, copy.group, copy.target) for copy in self._transfers.open.values()]
        # Read before the slots' contents, which then include what steps of earlier managers wrote.
        epoch = self._fence.manager_epoch
        request = self._announcement.request(again=again, awaited=awaited)
        request.steps_manager_epoch = epoch
        return request

    async def _renew(self) -> None:
        """Renews the lease; returns if the manager asks for a new registration or has been replaced."""
        request = kv.RenewExecutorRequest(
            executor_id=self._announcement.executor_id,
            executor_epoch=self._announcement.epoch,
            manager_epoch=self._manager_epoch,
        )
        pause = self._renewal_seconds
        while True:
            await asyncio.sleep(pause)
            try:
                answer = await self._stub.RenewExecutor(request, timeout=CALL_SECONDS)
            except grpc.aio.AioRpcError as error:
                if error.code() == grpc.StatusCode.FAILED_PRECONDITION:
                    log.info("registering again at the cache manager", cause=str(from_rpc_error(error)))
                    return
                log.warning("lease not renewed", cause=str(from_rpc_error(error)))
                pause = min(BACKOFF_SECONDS, self._renewal_seconds)
                continue
            if answer.manager_epoch != self._manager_epoch:
                return
            self._set_lease(answer.lease_duration.ToTimedelta().total_seconds())
            pause = self._renewal_seconds
            self._leases.update(answer.scheduler_ids)
            self._take(answer.transfers)

    def _take(self, transfers: Iterable[kv.Transfer]) -> None:
        """Begins each copy that the manager asks for, only once: requests are repeated until the copy is confirmed."""
        asked = {transfer.ticket: transfer for transfer in transfers}
        copies, impossible = [], []
        for ticket, transfer in asked.items():
            if ticket in self._begun:
                continue
            try:
                copies.append(_copy(transfer))
            except ValueError:
                impossible.append(ticket)
        # The manager stops asking for an ended copy once it is confirmed.
        self._begun = {
            ticket for ticket in self._begun if ticket in asked or ticket in self._transfers.open
        } | asked.keys()
        if copies:
            self._transfers.open.update((copy.ticket, copy) for copy in copies)
            self._worker.transfer(tuple(copies))
        if impossible:
            self._transfers.confirm((), tuple(impossible))

    def _set_lease(self, seconds: float) -> None:
        self._lease_seconds = seconds
        self._renewal_seconds = min(seconds / 3, MAX_RENEWAL_SECONDS) if seconds > 0 else MAX_RENEWAL_SECONDS

    async def _confirm_all(self) -> None:
        transfers = self._transfers
        while True:
            await transfers.has_ended.wait()
            await self._registered.wait()
            done, failed = len(transfers.done), len(transfers.failed)
            request = kv.ConfirmTransfersRequest(
                executor_id=self._announcement.executor_id,
                executor_epoch=self._announcement.epoch,
                tickets=transfers.done[:done],
                failed_tickets=transfers.failed[:failed],
                step=self._worker.last_step,
            )
            try:
                await self._stub.ConfirmTransfers(request, timeout=CALL_SECONDS)
            except grpc.aio.AioRpcError as error:
                log.warning("copies not confirmed", count=done + failed, cause=str(from_rpc_error(error)))
                await asyncio.sleep(BACKOFF_SECONDS)
                continue
            transfers.remove(done, failed)


def _copy(transfer: kv.Transfer) -> Copy:
    """Converts a transfer. Raises ValueError for a tier that does not exist."""
    target = Tier(transfer.target_tier)
    source = Tier(transfer.source_tier) if transfer.source_slot else target
    return Copy(transfer.ticket, transfer.group, transfer.source_slot, transfer.target_slot, source, target)
