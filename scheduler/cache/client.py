"""The cache manager's client: admissions in order, syncs in the background. On the asyncio loop."""

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable
from collections.abc import Sequence as Seq
from typing import TypeVar

import grpc
import structlog

from protos.kvcache.v1 import kvcache_pb2 as pb
from protos.kvcache.v1 import kvcache_pb2_grpc as rpc
from protos.kvcommon.eviction import Layout, parse
from protos.kvcommon.v1 import kvcommon_pb2 as common
from protos.rpc.errors import RemoteError, from_rpc_error
from scheduler.bridge import (
    Admission,
    AdmissionListener,
    Admitted,
    CacheUpdate,
    Cancel,
    CommandQueue,
    ManagerFound,
    ManagerLost,
)
from scheduler.cache.sync import copies, sync_answer, sync_request
from scheduler.cache.tier_costs import TierCosts
from scheduler.cache.waiting_queue import WaitingQueue
from scheduler.errors import ManagerLostError, SchedulerReplacedError, refusal
from scheduler.metrics import EngineMetrics
from scheduler.request import Account, AdmissionAttempt, Tier, caller_id_of
from scheduler.sequence import Eviction, Sequence

CALL_SECONDS = 5.0
FIRST_BACKOFF = 0.05
LONGEST_BACKOFF = 0.1
# Other events free blocks, too (copies end, other schedulers release blocks): poll while a sequence needs blocks.
POLL_SECONDS = 0.05
RETRY_REFUSED_SECONDS = 0.25
# Most admissions in one call, and most tokens in all of them: a few milliseconds of the manager's time.
MAX_ADMISSIONS = 32
MAX_ADMITTED_TOKENS = 32_768
# Cached tokens after a prompt that are asked for: sequences draft from them.
MAX_CONTINUATION = 2048

_AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
# Reasons that concern all requests: the manager no longer knows this scheduler.
_FORGOTTEN = ("UNKNOWN_SCHEDULER", "STALE_SCHEDULER", "MANAGER_RESTARTED")
# The reason with which the manager refuses a registration if it knows a newer epoch of the scheduler.
_REPLACED = "STALE_SCHEDULER"
_NO_EXECUTOR = "EXECUTOR"
_LOWEST_TIERS = {Tier.DEVICE: pb.TIER_DEVICE, Tier.HOST: pb.TIER_HOST, Tier.DISK: pb.TIER_UNSPECIFIED}

log = structlog.get_logger()

M = TypeVar("M")
A = TypeVar("A")


class CacheClient:
    """Makes one call at a time, so that the step loop gets answers in the order of the manager's decisions."""

    def __init__(
        self,
        stub: "rpc.CacheManagerServiceAsyncStub",
        queue: WaitingQueue,
        commands: CommandQueue,
        listener: AdmissionListener,
        metrics: EngineMetrics,
        *,
        scheduler_id: str,
        scheduler_epoch: int,
        executor_id: str,
        block_size: int,
        max_running: int,
        drafts: bool = False,
    ) -> None:
        self._stub = stub
        self._queue = queue
        self._commands = commands
        self._listener = listener
        self._metrics = metrics
        self._scheduler_id = scheduler_id
        # Part of its sequences' keys.
        self._tag = hashlib.blake2b(scheduler_id.encode(), digest_size=4).hexdigest()
        self._scheduler_epoch = scheduler_epoch
        self._executor_id = executor_id
        self._block_size = block_size
        self._max_running = max_running
        # Whether the executor can use the tokens that may follow a prompt.
        self._drafts = drafts
        self._manager_epoch = 0
        self._sync_number = 0
        # For the next sync.
        self._update = CacheUpdate()
        self._session = 0
        # Sequences that hold blocks: their ids by handle.
        self._live: dict[int, str] = {}
        self._lost = False
        self._given_up = asyncio.Event()
        # Set while the manager has all updates.
        self._reported = asyncio.Event()
        self._reported.set()
        self.registered = asyncio.Event()
        # Time of the first attempt of the unanswered call.
        self._asked_at: float | None = None
        self._lease = 1.0
        self._synced_at = 0.0
        self._missing_blocks = 0
        self._free_blocks = 0
        # The attempt that the manager had no blocks for, the time of the answer, and the number of free blocks then.
        self._refused: AdmissionAttempt | None = None
        self._refused_at = 0.0
        self._free_at_refusal = 0
        # Accounts whose quota the manager has reported as exhausted since `_full_since`.
        self._full: set[Account] = set()
        self._full_since = 0.0
        self._tier_costs = TierCosts(block_size)

    @property
    def silence(self) -> float:
        """Seconds for which the manager has not answered; 0 if no call is in flight."""
        return 0.0 if self._asked_at is None else time.monotonic() - self._asked_at

    def receive(self, update: CacheUpdate) -> None:
        """Takes the news of answered steps, for the next sync."""
        if update.session is not None:
            self._session = update.session
        if update.speed is not None:
            self._tier_costs.observe(update.speed, time.monotonic())
        if self._lost:
            if update.all_given_up:
                self._given_up.set()
        else:
            self._update.merge(update)
            for handle in update.released:
                self._live.pop(handle, None)
            self._queue.num_running = len(self._live)
            if self._update.is_urgent:
                self._reported.clear()
        self._queue.changed.set()

    async def report_all(self) -> None:
        """Waits until the manager has all updates."""
        await self._reported.wait()

    async def run(self) -> None:
        """Serves forever; waits while the manager is away or restarts.

        Raises SchedulerReplacedError, and ManagerLostError if the manager refuses a registration for another reason.
        """
        while True:
            await self._register()
            self.registered.set()
            try:
                while True:
                    await self._turn()
            except ManagerLostError as error:
                log.warning("cache manager lost", cause=str(error), sequences=len(self._live))
            await self._give_up()

    async def _register(self) -> None:
        # With a newer epoch, the manager frees the blocks of the older epoch, and syncs count from 1 again.
        self._scheduler_epoch += 1
        try:
            answer = await self._ask_to_register()
        except SchedulerReplacedError as error:
            if self.registered.is_set() or error.newest_epoch < self._scheduler_epoch:
                raise
            # A starting process is the newest, even if the clock that its epoch comes from was set back.
            self._scheduler_epoch = error.newest_epoch + 1
            answer = await self._ask_to_register()
        self._manager_epoch = answer.manager_epoch
        self._lease = answer.lease_duration.ToTimedelta().total_seconds()
        self._sync_number = 0
        self._synced_at = time.monotonic()
        self._commands.put(ManagerFound(self._manager_epoch))
        log.info("registered at the cache manager", manager_epoch=self._manager_epoch, lease_seconds=self._lease)

    async def _ask_to_register(self) -> pb.RegisterSchedulerResponse:
        message = pb.RegisterSchedulerRequest(scheduler_id=self._scheduler_id, scheduler_epoch=self._scheduler_epoch)
        return await self._call(self._stub.RegisterScheduler, message)

    async def _give_up(self) -> None:
        """Makes the step loop give up all sequences: they have lost their blocks."""
        self._lost = True
        self._given_up.clear()
        self._commands.put(ManagerLost())
        await self._given_up.wait()
        self._lost = False
        self._update = CacheUpdate()
        self._reported.set()
        self._live.clear()
        self._queue.num_running = 0
        self._missing_blocks = 0
        self._forget_refusals()

    def _forget_refusals(self) -> None:
        self._refused = None
        self._full.clear()

    async def _turn(self) -> None:
        if self._update.is_urgent or time.monotonic() >= self._next_sync:
            await self._sync()
        attempts = self._next_attempts()
        if attempts:
            await self._admit(attempts)
        elif not self._update.is_urgent:
            self._queue.changed.clear()
            try:
                async with asyncio.timeout(max(0.0, self._next_sync - time.monotonic())):
                    await self._queue.changed.wait()
            except TimeoutError:
                return

    @property
    def _next_sync(self) -> float:
        refused = self._refused is not None or self._full
        wanting = self._update.starving or self._update.evicting or self._missing_blocks or refused
        return self._synced_at + (min(POLL_SECONDS, self._lease / 3) if wanting else self._lease / 3)

    def _next_attempts(self) -> list[AdmissionAttempt]:
        """Returns the attempts to admit now, in one call. Running sequences that need blocks take precedence."""
        if self._session <= 0 or len(self._live) >= self._max_running or self._missing_blocks:
            return []
        now = time.monotonic()
        if self._full and now - self._full_since >= RETRY_REFUSED_SECONDS:
            self._full.clear()
        waiting = self._queue.first(min(MAX_ADMISSIONS, self._max_running - len(self._live)), self._full)
        if not waiting:
            return []
        head = waiting[0]
        if head is self._refused:
            waited = now - self._refused_at
            if self._free_blocks <= self._free_at_refusal and waited < RETRY_REFUSED_SECONDS:
                return []
        chosen, tokens = [head], len(head.token_ids)
        for attempt in waiting[1:]:
            tokens += len(attempt.token_ids)
            if head.parent or attempt.parent or tokens > MAX_ADMITTED_TOKENS:
                break
            chosen.append(attempt)
        return chosen

    async def _sync(self) -> None:
        update, self._update = self._update, CacheUpdate(step=self._update.step)
        self._sync_number += 1
        message = sync_request(
            update, self._scheduler_id, self._scheduler_epoch, self._manager_epoch, self._sync_number
        )
        session = self._session
        started = time.perf_counter()
        answer = await self._call(self._stub.SyncSequences, message)
        self._metrics.sync_seconds.observe(time.perf_counter() - started)
        if answer.manager_epoch != self._manager_epoch:
            raise ManagerLostError("the cache manager has restarted")
        self._synced_at = time.monotonic()
        self._lease = answer.lease_duration.ToTimedelta().total_seconds() or self._lease
        self._free_blocks = answer.free_blocks
        if answer.total_blocks:
            self._metrics.cache_usage.set(1 - answer.free_blocks / answer.total_blocks)
        self._missing_blocks = answer.missing_blocks
        if update.released:
            self._forget_refusals()
        if not self._update.is_urgent:
            self._reported.set()
        # An answer without blocks counts, too: it may say that no sequence misses blocks any more.
        self._commands.put(sync_answer(update, answer, session))

    async def _admit(self, attempts: Seq[AdmissionAttempt]) -> None:
        session, first = self._session, attempts[0]
        try:
            answered = await self._ask_for_blocks(attempts)
        except RemoteError as error:
            if error.reason in _FORGOTTEN:
                raise ManagerLostError(str(error)) from error
            if _NO_EXECUTOR in error.reason:
                log.info("the cache manager waits for the executor", cause=str(error))
                self._refuse(first)
            else:
                self._queue.remove(first.request.arrival)
                has_policy = first.request.cache.eviction_policy is not None
                self._listener.refused(first, refusal(error, has_policy=has_policy))
            return
        if any(answer.manager_epoch != self._manager_epoch for answer in answered):
            raise ManagerLostError("the cache manager has restarted")
        # Attempts without an answer are still in the queue.
        for attempt, answer in zip(attempts, answered, strict=False):
            self._answered(attempt, answer, session)

    async def _ask_for_blocks(self, attempts: Seq[AdmissionAttempt]) -> Seq[pb.AdmitSequenceResponse]:
        """Returns the first attempts' answers. A sample with a parent comes alone, and shares the parent's blocks."""
        if attempts[0].parent and (forked := await self._fork(attempts[0])):
            return [forked]
        message = pb.AdmitSequencesRequest(admissions=map(self._admission, attempts))
        return (await self._call(self._stub.AdmitSequences, message)).answers

    def _answered(self, attempt: AdmissionAttempt, answer: pb.AdmitSequenceResponse, session: int) -> None:
        if answer.HasField("full_account"):
            if not self._full:
                self._full_since = time.monotonic()
            self._full.add(attempt.request.cache.account(answer.full_account))
            return
        if not answer.admitted:
            self._refuse(attempt)
            return
        self._live[answer.sequence_handle] = attempt.sequence_id(self._tag)
        self._queue.num_running = len(self._live)
        sequence = _sequence(attempt, answer, self._block_size)
        self._commands.put(Admitted(sequence, session))
        if self._queue.remove(attempt.request.arrival):
            has_onloads = any(copy.is_onload for copy in sequence.copies)
            policy = answer.eviction_policy if answer.HasField("eviction_policy") else None
            admission = Admission(
                answer.cached_tokens,
                has_onloads,
                answer.receipts,
                answer.hint_answers,
                policy,
                written_tokens=max(0, answer.store_tokens - answer.cached_tokens),
                miss=_named(answer.miss) if answer.HasField("miss") else None,
            )
            self._listener.admitted(attempt, admission)
        else:
            # The request has ended during the call. The step loop must know its admission and its end all the same:
            # other sequences may share its blocks.
            self._commands.put(Cancel(attempt.request.arrival))

    async def _fork(self, attempt: AdmissionAttempt) -> pb.AdmitSequenceResponse | None:
        """Shares the parent's blocks. Returns None if this is impossible: the attempt is then admitted as usual."""
        if attempt.parent in self._update.progress:
            # Only blocks that the manager knows to be computed are shared.
            await self._sync()
        if attempt.parent not in self._live:
            return None
        message = pb.ForkSequenceRequest(
            parent_sequence_id=self._live[attempt.parent],
            sequence_id=attempt.sequence_id(self._tag),
            num_tokens=len(attempt.token_ids),
            scheduler_id=self._scheduler_id,
            scheduler_epoch=self._scheduler_epoch,
        )
        try:
            answer = await self._call(self._stub.ForkSequence, message)
        except RemoteError as error:
            log.info("a sample is not forked", cause=str(error))
            return None
        return pb.AdmitSequenceResponse(
            # Only the manager that admitted the parent can fork it.
            manager_epoch=self._manager_epoch,
            admitted=answer.admitted,
            sequence_handle=answer.sequence_handle,
            cached_tokens=answer.cached_tokens,
            block_tables=answer.block_tables,
            transfers=answer.transfers,
            full_account=answer.full_account if answer.HasField("full_account") else None,
        )

    def _refuse(self, attempt: AdmissionAttempt) -> None:
        self._refused = attempt
        self._refused_at = time.monotonic()
        self._free_at_refusal = self._free_blocks

    def _admission(self, attempt: AdmissionAttempt) -> pb.AdmitSequenceRequest:
        options = attempt.request.cache
        lowest = min(attempt.lowest_tier, self._tier_costs.lowest_tier(time.monotonic()))
        return pb.AdmitSequenceRequest(
            sequence_id=attempt.sequence_id(self._tag),
            scheduler_id=self._scheduler_id,
            scheduler_epoch=self._scheduler_epoch,
            executor_id=self._executor_id,
            token_ids=attempt.token_ids,
            salt=options.salt,
            adapter_id=attempt.request.adapter_id,
            session_id=options.session_id,
            request_id=attempt.request.request_id,
            num_prompt_tokens=len(attempt.request.prompt_ids),
            tenant_id=options.tenant_id,
            retention=options.retention,
            hints=options.hints,
            no_read=options.no_read,
            no_store=options.no_store,
            eviction_policy=options.eviction_policy,
            lowest_tier=_LOWEST_TIERS[lowest],
            traceparent=attempt.request.traceparent,
            max_continuation_tokens=min(attempt.request.max_tokens, MAX_CONTINUATION) if self._drafts else 0,
            explain_miss=options.explain_miss,
            store_tokens=options.store_tokens,
        )

    async def _call(self, method: Callable[..., Awaitable[A]], message: M) -> A:
        """Repeats an idempotent call until the manager answers.

        Raises RemoteError for admissions and forks, ManagerLostError for other calls, and SchedulerReplacedError.
        """
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
            registers = isinstance(message, pb.RegisterSchedulerRequest)
            # A manager that fails in a call starts again, and then registers the scheduler.
            if error.code not in _AWAY and not (registers and error.code is grpc.StatusCode.INTERNAL):
                if isinstance(message, pb.AdmitSequencesRequest | pb.ForkSequenceRequest):
                    raise error
                if registers and error.reason == _REPLACED:
                    raise SchedulerReplacedError(error.message, int(error.metadata.get("newest_epoch", 0)))
                if error.reason not in _FORGOTTEN:
                    await asyncio.sleep(backoff)
                raise ManagerLostError(str(error))
            log.info("waiting for the cache manager", cause=str(error), retry_seconds=backoff)
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, LONGEST_BACKOFF)


def _named(miss: common.PrefixMiss) -> common.PrefixMiss:
    """Returns the miss with the request's name instead of its sequence's."""
    miss.for_id = caller_id_of(miss.for_id)
    return miss


def _sequence(attempt: AdmissionAttempt, answer: pb.AdmitSequenceResponse, block_size: int) -> Sequence:
    """Builds the sequence of an admitted attempt."""
    eviction = None
    if answer.HasField("eviction_policy"):
        # The manager has checked that the model supports it.
        policy = parse(answer.eviction_policy, Layout(block_size, (None,), plain_rotary=True))
        eviction = None if policy is None else Eviction(policy, answer.eviction_policy, len(attempt.request.prompt_ids))
    tables = sorted(answer.block_tables, key=lambda table: table.group)
    return Sequence(
        attempt,
        answer.sequence_handle,
        cached_tokens=answer.cached_tokens,
        tables=[list(table.slots) for table in tables],
        block_size=block_size,
        wait_for=answer.wait_for_handle,
        copies=copies(answer.transfers),
        onload_deadline=time.monotonic() + attempt.request.onload_timeout,
        eviction=eviction,
        continuation=answer.continuation_token_ids,
    )
