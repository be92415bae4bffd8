"""The gRPC services: parse, call the manager, convert. Whatever a manager's method raises reaches the caller."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from time import monotonic, perf_counter
from typing import Any

from cachemgr.errors import SchedulerFirstError
from cachemgr.manager import CacheManager
from cachemgr.oplog.operations import Operations
from cachemgr.persistence.recoveries import Recoveries
from cachemgr.persistence.redis_index import WAIT_SECONDS, IndexStore
from cachemgr.rpc import convert, convert_admin
from cachemgr.rpc.event_batches import MAX_EVENTS, Batches, Wanted, pack
from cachemgr.rpc.event_feed import EventFeed
from cachemgr.rpc.slices import SLICE_SECONDS, sliced
from cachemgr.sequences.clients import check_spec
from cachemgr.types import AccountKey, ExecutorSpec, SchedulerEpoch
from cachemgr.validation import check_id
from protos.errors import InvalidField, ServiceError
from protos.kvcache.v1 import kvcache_pb2 as pb
from protos.kvcache.v1 import kvcache_pb2_grpc as pb_grpc
from protos.rpc import tracing

# gRPC hands every method its context, of which nothing is needed here.
# ruff: noqa: N802, ARG002


# Others wait for so many at most.
MAX_ADMISSIONS = 256


@dataclass(frozen=True)
class Domain:
    """What all services share."""

    operations: Operations
    store: IndexStore
    recoveries: Recoveries
    feed: EventFeed

    @property
    def manager(self) -> CacheManager:
        """To read from; operations change it."""
        return self.operations.manager

    def run(self, method: str, request: Any) -> Any:
        """Answers a call that changes something, and tells the watchers."""
        answer = self.operations.run(method, request)
        self.feed.ring()
        return answer

    async def run_in_slices(self, method: str, request: Any) -> Any:
        """As `run`, for a call that may touch very many blocks: others are answered meanwhile."""
        try:
            return await self.operations.run_in_slices(method, request)
        finally:
            self.feed.ring()


class CacheManagerService(pb_grpc.CacheManagerServiceServicer):
    """The data plane. Only a registration ever waits for Redis."""

    def __init__(self, domain: Domain) -> None:
        self._domain = domain
        self._manager = domain.manager
        self._run = domain.run

    async def RegisterExecutor(self, request: pb.RegisterExecutorRequest, context: Any) -> pb.RegisterExecutorResponse:
        """Brings back what the store remembers, when the manager itself does not know the executor."""
        domain = self._domain
        spec = convert.executor_spec(request)
        check_spec(spec)
        if self._manager.is_too_large_to_carry_over(spec):
            await self._end_epoch(spec)
        known = self._manager.knows_executor(spec.executor_id)
        # Asked before the wait: the request tells what was written up to now, and a scheduler that comes meanwhile may
        # have given up steps that wrote after it.
        scheduler_came = self._manager.scheduler_came
        if known:
            answer = domain.operations.register_executor(request, spec)
            domain.store.registered(spec.executor_id, spec.executor_epoch)
        else:
            answer = await self._recall(request, spec, scheduler_came=scheduler_came)
        domain.feed.ring()
        return answer

    async def _end_epoch(self, spec: ExecutorSpec) -> None:
        """An executor has started again with very many blocks: what outlives its device is read from the store."""
        domain, executor_id = self._domain, spec.executor_id
        # Else Redis lacks what the index has: to hold everybody up is better than to lose it.
        is_stored = await domain.store.flush_soon()
        if is_stored and self._manager.is_too_large_to_carry_over(spec):
            domain.operations.end_epoch(executor_id, domain.store.epoch_of(executor_id))

    async def _recall(
        self, request: pb.RegisterExecutorRequest, spec: ExecutorSpec, *, scheduler_came: bool
    ) -> pb.RegisterExecutorResponse:
        """Registers an executor; it waits a moment for what the store remembers, which comes into the index later then.

        Raises SchedulerFirstError when there may be something, and sequences of an earlier manager may be writing yet.
        """
        domain, executor_id, begin = self._domain, spec.executor_id, monotonic()
        reading = await domain.store.recall(executor_id)
        is_empty = reading.is_complete.is_set() and not reading.num_blocks
        if not scheduler_came and not is_empty and (reading.is_complete.is_set() or spec.tells_of_contents):
            raise SchedulerFirstError
        answer = domain.operations.register_executor(request, spec, later=not is_empty)
        domain.store.registered(executor_id, spec.executor_epoch)
        domain.recoveries.begin(reading)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, begin + WAIT_SECONDS - monotonic())):
                await reading.has_been_taken.wait()
        restored = self._manager.cached_blocks(executor_id)
        answer.restored_blocks, answer.restored_lower_blocks = restored.device_blocks, restored.lower_blocks
        return answer

    async def RenewExecutor(self, request: pb.RenewExecutorRequest, context: Any) -> Any:
        """Keeps a lease."""
        return self._run("RenewExecutor", request)

    async def RegisterScheduler(self, request: pb.RegisterSchedulerRequest, context: Any) -> Any:
        """Frees what an older epoch held."""
        return self._run("RegisterScheduler", request)

    async def AdmitSequence(self, request: pb.AdmitSequenceRequest, context: Any) -> Any:
        """Matches, claims and allocates."""
        return self._admit_traced(request)

    def _admit_traced(self, request: pb.AdmitSequenceRequest) -> Any:
        """Asked again and again while it waits for blocks, a request has a span for the time that it got them."""
        span = tracing.join("kvcache.v1.CacheManagerService/AdmitSequence", request.traceparent)
        answer = self._run("AdmitSequence", request)
        if answer.admitted and span is not tracing.OFF:
            span.end({"kvkeep.tokens": len(request.token_ids), "kvkeep.cached_tokens": answer.cached_tokens})
        return answer

    async def AdmitSequences(self, request: pb.AdmitSequencesRequest, context: Any) -> pb.AdmitSequencesResponse:
        """Admits as many as it can; the first one's error is the call's. Others may be answered between two of them."""
        if not 1 <= len(request.admissions) <= MAX_ADMISSIONS:
            raise InvalidField("admissions", f"must have 1 to {MAX_ADMISSIONS} entries")
        answers: list[pb.AdmitSequenceResponse] = []
        # By executor and account: the answer to the first admission that waits for its quota, for those behind it.
        full: dict[tuple[str, AccountKey | None], pb.AdmitSequenceResponse] = {}
        end = perf_counter() + SLICE_SECONDS
        for admission in request.admissions:
            if perf_counter() >= end:
                await asyncio.sleep(0)
                end = perf_counter() + SLICE_SECONDS
            spender = (admission.executor_id, self._account(admission))
            try:
                answer = full[spender] if spender in full else self._admit_traced(admission)
            except ServiceError as error:
                if answers:
                    break
                error.fields = {f"admissions[0].{field}": text for field, text in error.fields.items()}
                raise
            answers.append(answer)
            if answer.HasField("full_account"):
                full[spender] = answer
            elif not answer.admitted:
                break
        return pb.AdmitSequencesResponse(answers=answers)

    def _account(self, admission: pb.AdmitSequenceRequest) -> AccountKey | None:
        tenant_id = admission.tenant_id if admission.HasField("tenant_id") else None
        return self._manager.queries.account_of(tenant_id, admission.salt if admission.HasField("salt") else None)

    async def SyncSequences(self, request: pb.SyncSequencesRequest, context: Any) -> Any:
        """Takes progress, gives capacity."""
        return self._run("SyncSequences", request)

    async def ExtendSequence(self, request: pb.ExtendSequenceRequest, context: Any) -> Any:
        """Grows one sequence."""
        return self._run("ExtendSequence", request)

    async def TruncateSequence(self, request: pb.TruncateSequenceRequest, context: Any) -> Any:
        """Forgets tokens."""
        return self._run("TruncateSequence", request)

    async def ForkSequence(self, request: pb.ForkSequenceRequest, context: Any) -> Any:
        """Shares a sequence's blocks with a second one."""
        return self._run("ForkSequence", request)

    async def HoldSequence(self, request: pb.HoldSequenceRequest, context: Any) -> Any:
        """Keeps blocks beyond their sequence."""
        return self._run("HoldSequence", request)

    async def ReleaseSequence(self, request: pb.ReleaseSequenceRequest, context: Any) -> Any:
        """Gives blocks back."""
        return self._run("ReleaseSequence", request)

    async def ConfirmTransfers(self, request: pb.ConfirmTransfersRequest, context: Any) -> Any:
        """Ends copies."""
        return self._run("ConfirmTransfers", request)

    async def SendHints(self, request: pb.SendHintsRequest, context: Any) -> Any:
        """Carries out hints."""
        return self._run("SendHints", request)

    async def PreviewAdmission(self, request: pb.PreviewAdmissionRequest, context: Any) -> pb.PreviewAdmissionResponse:
        """Looks without touching."""
        try:
            admission = convert.admit_request(request.admission)
            found = self._manager.queries.preview(admission, request.max_new_tokens)
        except ServiceError as error:
            error.fields = {
                field if field == "max_new_tokens" else f"admission.{field}": text
                for field, text in error.fields.items()
            }
            raise
        return convert_admin.preview(found)

    async def EstimateSequence(self, request: pb.EstimateSequenceRequest, context: Any) -> pb.EstimateSequenceResponse:
        """Counts without touching."""
        step = request.step_tokens if request.HasField("step_tokens") else None
        caller = SchedulerEpoch(request.scheduler_id, request.scheduler_epoch)
        found = self._manager.queries.estimate(caller, request.sequence_id, step, request.max_new_tokens)
        return pb.EstimateSequenceResponse(estimates=[convert_admin.estimate(one) for one in found])


class CacheEventService(pb_grpc.CacheEventServiceServicer):
    """List, then watch."""

    def __init__(self, domain: Domain) -> None:
        self._manager = domain.manager
        self._feed = domain.feed
        self._batches = Batches()

    async def WatchEvents(self, request: pb.WatchEventsRequest, context: Any) -> AsyncIterator[pb.WatchEventsResponse]:
        """A snapshot unless told where to continue, then every event. A consumer too slow gets OUT_OF_RANGE."""
        if request.HasField("salt"):
            check_id("salt", request.salt)
        if request.pool_id:
            self._manager.queries.pool(request.pool_id)
        wanted = Wanted.of(request)
        if request.HasField("after_event_number"):
            number = request.after_event_number
        else:
            with contextlib.closing(self._manager.queries.views_in_slices()) as snapshot:
                async for _ in sliced(snapshot.steps()):
                    snapshot.catch_up()
            number = snapshot.number
            async for events in sliced(snapshot.events()):
                for message in pack(wanted, (event for event in events if event is not None), snapshot=True):
                    yield message
        while True:
            while happened := self._manager.queries.events_after(number, MAX_EVENTS):
                for message in self._batches.of(wanted, happened):
                    yield message
                number = happened[-1].number
                # A filter may leave nothing to send of many events.
                await asyncio.sleep(0)
            await self._feed.wait_for_events(number)
