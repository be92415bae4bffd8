"""The scheduler's side of the cache manager: admissions in order, syncs in the background. On the asyncio loop."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from collections.abc import Sequence as Seq
from typing import Protocol, TypeVar

import grpc
import structlog

from protos.kvcache.v1 import kvcache_pb2 as pb
from protos.kvcache.v1 import kvcache_pb2_grpc as rpc
from protos.rpc.errors import RemoteError, ServiceError, from_rpc_error
from scheduler.bridge import Admitted, Cancel, Mailbox, ManagerLost, Report, SyncAnswer
from scheduler.cache import answers
from scheduler.cache.sync import SyncBatch
from scheduler.cache.tier_costs import Rates, Tier
from scheduler.cache.waiting_queue import WaitingQueue
from scheduler.errors import ManagerLostError, SchedulerReplacedError, refusal
from scheduler.metrics import RequestMetrics
from scheduler.request import Account, Candidate

CALL_SECONDS = 5.0
FIRST_BACKOFF = 0.05
LONGEST_BACKOFF = 0.1
# Blocks can become free without our doing (copies end, other schedulers release): while somebody wants some, ask.
POLL_SECONDS = 0.05
RETRY_REFUSED_SECONDS = 0.25
# Admissions in one call, and tokens in all of them: what the manager does within a few milliseconds.
MAX_ADMISSIONS = 32
MAX_ADMITTED_TOKENS = 32_768

_AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
# Why a manager refuses everybody: it does not know this scheduler any more. All else is about one request.
_FORGOTTEN = ("UNKNOWN_SCHEDULER", "STALE_SCHEDULER", "MANAGER_RESTARTED")
# And why for good, when it comes again with a newer epoch.
_REPLACED = "STALE_SCHEDULER"
_NO_EXECUTOR = "EXECUTOR"
_LOWEST_TIERS = {Tier.DEVICE: pb.TIER_DEVICE, Tier.HOST: pb.TIER_HOST, Tier.DISK: pb.TIER_UNSPECIFIED}

log = structlog.get_logger()

M = TypeVar("M")
A = TypeVar("A")


class Admissions(Protocol):
    """Who wants to hear what became of candidates."""

    def admitted(self, candidate: Candidate, answer: pb.AdmitSequenceResponse) -> None:
        """It has its blocks."""

    def refused(self, candidate: Candidate, error: ServiceError) -> None:
        """It will never have any."""


class CacheClient:
    """One call at a time, so that what the step loop hears is in the order in which the manager decided it."""

    def __init__(
        self,
        stub: "rpc.CacheManagerServiceAsyncStub",
        queue: WaitingQueue,
        mailbox: Mailbox,
        admissions: Admissions,
        metrics: RequestMetrics,
        *,
        scheduler_id: str,
        scheduler_epoch: int,
        executor_id: str,
        block_size: int,
        max_running: int,
    ) -> None:
        self._stub = stub
        self._queue = queue
        self._mailbox = mailbox
        self._admissions = admissions
        self._metrics = metrics
        self._scheduler_id = scheduler_id
        self._scheduler_epoch = scheduler_epoch
        self._executor_id = executor_id
        self._block_size = block_size
        self._max_running = max_running
        self._manager_epoch = 0
        self._sync_number = 0
        self._batch = SyncBatch()
        self._session = 0
        # Sequences that hold blocks: their ids by handle.
        self._live: dict[int, str] = {}
        self._lost = False
        self._given_up = asyncio.Event()
        self._wake = asyncio.Event()
        # Whether the manager has heard all news.
        self._told = asyncio.Event()
        self._told.set()
        self.registered = asyncio.Event()
        # When the call was made that waits for an answer, all its repetitions being one.
        self._asked_at: float | None = None
        self._lease = 1.0
        self._synced_at = 0.0
        self._short = 0
        self._free_blocks = 0
        # The candidate that the manager has no blocks for, when it said so, and how many were free then.
        self._refused: Candidate | None = None
        self._refused_at = 0.0
        self._free_at_refusal = 0
        # Accounts whose quota has reached its ceiling, as far as the manager said so since this time.
        self._full: set[Account] = set()
        self._full_since = 0.0
        self._rates = Rates(block_size)

    @property
    def live(self) -> int:
        """Sequences that hold blocks."""
        return len(self._live)

    @property
    def silence(self) -> float:
        """Seconds for which the manager has not answered; 0 when no call waits for it."""
        return 0.0 if self._asked_at is None else time.monotonic() - self._asked_at

    def receive(self, report: Report) -> None:
        """Takes what a step brought, for the next sync."""
        if report.session is not None:
            self._session = report.session
        if report.speed is not None:
            self._rates.observe(report.speed, report.at)
        if self._lost:
            if report.all_given_up:
                self._given_up.set()
        else:
            self._batch.merge(report)
            for handle in report.released:
                self._live.pop(handle, None)
            if self._batch.urgent:
                self._told.clear()
        self.wake()

    def wake(self) -> None:
        """There is something to do."""
        self._wake.set()

    async def tell_all(self) -> None:
        """Waits until the manager has heard all news."""
        await self._told.wait()

    async def run(self) -> None:
        """Serves for ever; a manager that is away or starts again is waited for. Raises SchedulerReplacedError."""
        while True:
            await self._register()
            self.registered.set()
            try:
                while True:
                    await self._turn()
            except ManagerLostError as error:
                log.warning("cache manager lost", cause=str(error), sequences=self.live)
            await self._give_up()

    async def _register(self) -> None:
        # A newer epoch than any before: the manager frees what the older one held, and syncs count from 1 again.
        self._scheduler_epoch += 1
        try:
            answer = await self._ask_to_register()
        except SchedulerReplacedError as error:
            if self.registered.is_set() or error.newest_epoch < self._scheduler_epoch:
                raise
            # A process that starts is the newest, also where the clock that its epoch comes from has gone back.
            self._scheduler_epoch = error.newest_epoch + 1
            answer = await self._ask_to_register()
        self._manager_epoch = answer.manager_epoch
        self._lease = answer.lease_duration.ToTimedelta().total_seconds()
        self._sync_number = 0
        self._synced_at = time.monotonic()
        log.info("registered at the cache manager", manager_epoch=self._manager_epoch, lease_seconds=self._lease)

    async def _ask_to_register(self) -> pb.RegisterSchedulerResponse:
        message = pb.RegisterSchedulerRequest(scheduler_id=self._scheduler_id, scheduler_epoch=self._scheduler_epoch)
        return await self._call(self._stub.RegisterScheduler, message)

    async def _give_up(self) -> None:
        """Has the step loop give all sequences up: their blocks are no longer theirs."""
        self._lost = True
        self._given_up.clear()
        self._mailbox.put(ManagerLost())
        await self._given_up.wait()
        self._lost = False
        self._batch = SyncBatch()
        self._told.set()
        self._live.clear()
        self._short = 0
        self._forget_refusals()

    def _forget_refusals(self) -> None:
        self._refused = None
        self._full.clear()

    async def _turn(self) -> None:
        if self._batch.urgent or time.monotonic() >= self._next_sync:
            await self._sync()
        candidates = self._next_candidates()
        if candidates:
            await self._admit(candidates)
        elif not self._batch.urgent:
            self._wake.clear()
            try:
                async with asyncio.timeout(max(0.0, self._next_sync - time.monotonic())):
                    await self._wake.wait()
            except TimeoutError:
                return

    @property
    def _next_sync(self) -> float:
        refused = self._refused is not None or self._full
        wanting = self._batch.starving or self._batch.evicting or self._short or refused
        return self._synced_at + (min(POLL_SECONDS, self._lease / 3) if wanting else self._lease / 3)

    def _next_candidates(self) -> list[Candidate]:
        """Whom to ask blocks for now, in one call. Those who run and want blocks come first."""
        if self._session <= 0 or self.live >= self._max_running or self._short:
            return []
        now = time.monotonic()
        if self._full and now - self._full_since >= RETRY_REFUSED_SECONDS:
            self._full.clear()
        waiting = self._queue.first(min(MAX_ADMISSIONS, self._max_running - self.live), self._full)
        if not waiting:
            return []
        head = waiting[0]
        if head is self._refused:
            waited = now - self._refused_at
            if self._free_blocks <= self._free_at_refusal and waited < RETRY_REFUSED_SECONDS:
                return []
        chosen, tokens = [head], len(head.token_ids)
        for candidate in waiting[1:]:
            tokens += len(candidate.token_ids)
            if head.parent or candidate.parent or tokens > MAX_ADMITTED_TOKENS:
                break
            chosen.append(candidate)
        return chosen

    async def _sync(self) -> None:
        batch, self._batch = self._batch, SyncBatch()
        self._batch.step = batch.step
        self._sync_number += 1
        message = batch.message(self._scheduler_id, self._scheduler_epoch, self._manager_epoch, self._sync_number)
        session = self._session
        started = time.perf_counter()
        answer = await self._call(self._stub.SyncSequences, message)
        self._metrics.sync_seconds.observe(time.perf_counter() - started)
        if answer.manager_epoch != self._manager_epoch:
            raise ManagerLostError("it started again")
        self._synced_at = time.monotonic()
        self._lease = answer.lease_duration.ToTimedelta().total_seconds() or self._lease
        self._free_blocks = answer.free_blocks
        if answer.total_blocks:
            self._metrics.cache_usage.set(1 - answer.free_blocks / answer.total_blocks)
        self._short = answer.blocks_short
        if batch.released:
            self._forget_refusals()
        if not self._batch.urgent:
            self._told.set()
        # Also when it brings nothing: that nobody is short any more is news too.
        # A live sequence that the manager does not know, as after its executor was lost, has no blocks either.
        void = [*answer.void_handles, *answer.unknown_handles]
        self._mailbox.put(
            SyncAnswer(
                answers.extensions(answer),
                void,
                answer.blocks_short,
                batch.released,
                list(batch.trimmed),
                list(batch.moved),
                answers.own_blocks(answer),
                answers.copies(answer.transfers),
                session,
            )
        )

    async def _admit(self, candidates: Seq[Candidate]) -> None:
        session, first = self._session, candidates[0]
        try:
            answered = await self._fork(first)
            if not answered:
                message = pb.AdmitSequencesRequest(admissions=map(self._admission, candidates))
                answered = (await self._call(self._stub.AdmitSequences, message)).answers
        except RemoteError as error:
            if error.reason in _FORGOTTEN:
                raise ManagerLostError(str(error)) from error
            if _NO_EXECUTOR in error.reason:
                log.info("the cache manager waits for the executor", cause=str(error))
                self._refuse(first)
            else:
                self._queue.remove(first.request.arrival)
                has_policy = first.request.wishes.eviction_policy is not None
                self._admissions.refused(first, refusal(error, has_policy=has_policy))
            return
        if any(answer.manager_epoch != self._manager_epoch for answer in answered):
            raise ManagerLostError("it started again")
        # Those without an answer are still in the queue.
        for candidate, answer in zip(candidates, answered, strict=False):
            self._answered(candidate, answer, session)

    def _answered(self, candidate: Candidate, answer: pb.AdmitSequenceResponse, session: int) -> None:
        if answer.HasField("full_account"):
            if not self._full:
                self._full_since = time.monotonic()
            self._full.add(candidate.request.wishes.account(answer.full_account))
            return
        if not answer.admitted:
            self._refuse(candidate)
            return
        self._live[answer.sequence_handle] = candidate.sequence_id
        sequence = answers.sequence(candidate, answer, self._block_size, time.monotonic())
        self._mailbox.put(Admitted(sequence, session))
        if self._queue.remove(candidate.request.arrival):
            self._admissions.admitted(candidate, answer)
        else:
            # Its caller left while the manager answered; who shares its blocks must hear of both.
            self._mailbox.put(Cancel(candidate.request.arrival))

    async def _fork(self, candidate: Candidate) -> Seq[pb.AdmitSequenceResponse]:
        """Shares the parent's prompt. Empty when that cannot be done: then the candidate is one like any other."""
        if candidate.parent in self._batch.progress:
            # What the parent has computed is shared as far as the manager knows of it.
            await self._sync()
        if candidate.parent not in self._live:
            return ()
        message = pb.ForkSequenceRequest(
            parent_sequence_id=self._live[candidate.parent],
            sequence_id=candidate.sequence_id,
            num_tokens=len(candidate.token_ids),
            scheduler_id=self._scheduler_id,
            scheduler_epoch=self._scheduler_epoch,
        )
        try:
            answer = await self._call(self._stub.ForkSequence, message)
        except RemoteError as error:
            log.info("a sample is not forked", cause=str(error))
            return ()
        forked = pb.AdmitSequenceResponse(
            # Only the manager that admitted the parent knows it.
            manager_epoch=self._manager_epoch,
            admitted=answer.admitted,
            sequence_handle=answer.sequence_handle,
            cached_tokens=answer.cached_tokens,
            block_tables=answer.block_tables,
            transfers=answer.transfers,
            full_account=answer.full_account if answer.HasField("full_account") else None,
        )
        return (forked,)

    def _refuse(self, candidate: Candidate) -> None:
        self._refused = candidate
        self._refused_at = time.monotonic()
        self._free_at_refusal = self._free_blocks

    def _admission(self, candidate: Candidate) -> pb.AdmitSequenceRequest:
        wishes = candidate.request.wishes
        lowest = min(candidate.lowest_tier, self._rates.lowest_tier(time.monotonic()))
        return pb.AdmitSequenceRequest(
            sequence_id=candidate.sequence_id,
            scheduler_id=self._scheduler_id,
            scheduler_epoch=self._scheduler_epoch,
            executor_id=self._executor_id,
            token_ids=candidate.token_ids,
            salt=wishes.salt,
            session_id=wishes.session_id,
            request_id=candidate.request.request_id,
            num_prompt_tokens=len(candidate.request.prompt_ids),
            tenant_id=wishes.tenant_id,
            retention=wishes.retention,
            hints=wishes.hints,
            no_read=wishes.no_read,
            no_store=wishes.no_store,
            eviction_policy=wishes.eviction_policy,
            lowest_tier=_LOWEST_TIERS[lowest],
            traceparent=candidate.request.traceparent,
        )

    async def _call(self, method: Callable[..., Awaitable[A]], message: M) -> A:
        """Calls until the manager is there: every call can be repeated. Raises RemoteError, ManagerLostError."""
        self._asked_at = time.monotonic()
        try:
            return await self._call_until_answered(method, message)
        finally:
            self._asked_at = None

    async def _call_until_answered(self, method: Callable[..., Awaitable[A]], message: M) -> A:
        backoff = FIRST_BACKOFF
        while True:
            try:
                return await method(message, timeout=CALL_SECONDS)
            except grpc.aio.AioRpcError as failure:
                error = from_rpc_error(failure)
            if error.code not in _AWAY:
                if isinstance(message, pb.AdmitSequencesRequest | pb.ForkSequenceRequest):
                    raise error
                if isinstance(message, pb.RegisterSchedulerRequest) and error.reason == _REPLACED:
                    raise SchedulerReplacedError(error.message, int(error.metadata.get("newest_epoch", 0)))
                if error.reason not in _FORGOTTEN:
                    await asyncio.sleep(backoff)
                raise ManagerLostError(str(error))
            log.info("waiting for the cache manager", cause=str(error), retry_seconds=backoff)
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, LONGEST_BACKOFF)
