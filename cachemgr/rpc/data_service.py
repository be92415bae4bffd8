"""The data plane's gRPC service: parse, call the manager, convert. Errors of a manager's method reach callers."""

import asyncio
from time import monotonic, perf_counter
from typing import Any

from cachemgr.errors import SchedulerFirstError
from cachemgr.persistence.redis_index import WAIT_SECONDS, IndexStore
from cachemgr.rpc import convert, convert_admin
from cachemgr.rpc.mutations import ServiceContext, logged, long_mutation, mutation
from cachemgr.sequences.registration import check_spec
from cachemgr.slices import SLICE_SECONDS, Slices
from cachemgr.types import AccountKey, ExecutorSpec, SchedulerEpoch
from protos.errors import InvalidField, ServiceError
from protos.kvcache.v1 import kvcache_pb2 as pb
from protos.kvcache.v1 import kvcache_pb2_grpc as pb_grpc
from protos.rpc import tracing
from protos.rpc.durations import duration, seconds
from protos.rpc.epochs import check_epoch

# gRPC passes every method its context, which is not needed here.
# ruff: noqa: N802, ARG002


# The limit on admissions of one call, which bounds the call's time. Other calls run between its slices.
MAX_ADMISSIONS = 256
# Limit on waiting for Redis while the executor's scheduler has not registered yet.
EARLY_SECONDS = 0.2


class CacheManagerService(pb_grpc.CacheManagerServiceServicer):
    """The data plane. Only a registration ever waits for Redis."""

    def __init__(self, context: ServiceContext) -> None:
        self.context = context
        self._manager = context.manager

    async def RegisterExecutor(self, request: pb.RegisterExecutorRequest, context: Any) -> pb.RegisterExecutorResponse:
        """Registers an executor; restores stored blocks if the manager itself does not know the executor."""
        store = self.context.store
        check_epoch("executor_epoch", request.executor_epoch)
        spec = convert.executor_spec(request)
        check_spec(spec)
        if store is not None and self._manager.is_too_large_to_carry_over(spec):
            await self._end_epoch(spec, store)
        known = self._manager.queries.knows_executor(spec.executor_id)
        if store is None:
            answer = self.register(request, spec)
        elif known:
            answer = self.register(request, spec)
            store.registered(spec.executor_id, spec.executor_epoch)
        else:
            answer = await self._recall(request, spec, store)
        self.context.feed.notify()
        return answer

    def register(
        self, request: pb.RegisterExecutorRequest, spec: ExecutorSpec, *, later: bool = False
    ) -> pb.RegisterExecutorResponse:
        """Registers an executor; `later`: stored blocks are added by `restore_blocks` until `end_recovery`.

        `spec` is `request`, converted: converting very many slots a second time would take long.
        """
        manager = self._manager
        restored = self.context.mutations.run(
            "RegisterExecutor", request, lambda: manager.register_executor(spec, later=later), later=later
        )
        return pb.RegisterExecutorResponse(
            manager_epoch=manager.epoch,
            lease_duration=duration(manager.config.lease_seconds),
            restored_blocks=restored.device_blocks,
            restored_lower_blocks=restored.lower_blocks,
        )

    async def _end_epoch(self, spec: ExecutorSpec, store: IndexStore) -> None:
        """Ends the epoch of a restarted executor with very many blocks; its lower tiers are read from the store."""
        # If Redis lacks blocks of the index, the epoch goes on: the registration takes long, but loses no block.
        is_stored = await store.flush_soon()
        if is_stored and self._manager.is_too_large_to_carry_over(spec):
            self.context.mutations.end_epoch(spec.executor_id, store.epoch_of(spec.executor_id))

    async def _recall(
        self, request: pb.RegisterExecutorRequest, spec: ExecutorSpec, store: IndexStore
    ) -> pb.RegisterExecutorResponse:
        """Registers an executor and waits a moment for its stored blocks, which may enter the index later.

        Raises SchedulerFirstError if sequences that an earlier manager admitted may still write to stored blocks.
        """
        executor_id, begin = spec.executor_id, monotonic()
        has_old_writers = self._manager.has_old_writers(spec)
        # An executor that is refused registers again, and would wait for a slow Redis twice.
        is_early = has_old_writers and spec.has_contents
        reading = await store.recall(executor_id, EARLY_SECONDS if is_early else WAIT_SECONDS)
        is_empty = reading.is_complete.is_set() and not reading.num_blocks
        has_blocks = not is_empty and (reading.is_complete.is_set() or spec.has_contents)
        if has_blocks and has_old_writers:
            raise SchedulerFirstError
        answer = self.register(request, spec, later=not is_empty)
        store.registered(executor_id, spec.executor_epoch)
        await store.recover(reading, max(0.0, begin + WAIT_SECONDS - monotonic()))
        restored = self._manager.cached_blocks(executor_id)
        answer.restored_blocks, answer.restored_lower_blocks = restored.device_blocks, restored.lower_blocks
        return answer

    @mutation
    def RenewExecutor(self, request: pb.RenewExecutorRequest) -> pb.RenewExecutorResponse:
        manager = self._manager
        manager.renew_executor(request.executor_id, request.executor_epoch, request.manager_epoch)
        return pb.RenewExecutorResponse(
            manager_epoch=manager.epoch,
            lease_duration=duration(manager.config.lease_seconds),
            transfers=convert.transfers(manager.queries.executor_transfers(request.executor_id)),
            scheduler_ids=manager.queries.scheduler_ids(),
        )

    @long_mutation
    def UpdateWeights(self, request: pb.UpdateWeightsRequest) -> Slices[pb.UpdateWeightsResponse]:
        others = yield from self._manager.update_weights(
            request.executor_id, request.executor_epoch, request.weight_version
        )
        return pb.UpdateWeightsResponse(other_blocks=others)

    @mutation
    def RegisterScheduler(self, request: pb.RegisterSchedulerRequest) -> pb.RegisterSchedulerResponse:
        """Registers a scheduler, and frees everything that an older epoch held."""
        manager = self._manager
        newest = manager.queries.scheduler_epoch(request.scheduler_id)
        check_epoch("scheduler_epoch", request.scheduler_epoch, newest)
        manager.register_scheduler(request.scheduler_id, request.scheduler_epoch)
        return pb.RegisterSchedulerResponse(
            manager_epoch=manager.epoch, lease_duration=duration(manager.config.lease_seconds)
        )

    async def AdmitSequences(self, request: pb.AdmitSequencesRequest, context: Any) -> pb.AdmitSequencesResponse:
        """Admits sequences in order. Other calls run between slices.

        The answers end before the first sequence that fails, or with the first sequence that finds no room. A sequence
        whose quota is full does not stop later sequences. Raises InvalidField for a wrong number of admissions, and
        errors of `admissions[0]`.
        """
        if not 1 <= len(request.admissions) <= MAX_ADMISSIONS:
            raise InvalidField("admissions", f"must have 1 to {MAX_ADMISSIONS} entries")
        answers: list[pb.AdmitSequenceResponse] = []
        # By executor and account with a full quota: the answer, which later admissions of the account get at once.
        full: dict[tuple[str, AccountKey | None], pb.AdmitSequenceResponse] = {}
        end = perf_counter() + SLICE_SECONDS
        for admission in request.admissions:
            if perf_counter() >= end:
                await asyncio.sleep(0)
                end = perf_counter() + SLICE_SECONDS
            answer = full.get(self._spender(admission)) if full else None
            try:
                answer = answer or self._AdmitSequence(admission)
            except ServiceError as error:
                if answers:
                    break
                error.fields = {f"admissions[0].{field}": text for field, text in error.fields.items()}
                raise
            answers.append(answer)
            if answer.HasField("full_account"):
                full[self._spender(admission)] = answer
            elif not answer.admitted:
                break
        return pb.AdmitSequencesResponse(answers=answers)

    @logged
    def _AdmitSequence(self, request: pb.AdmitSequenceRequest) -> pb.AdmitSequenceResponse:
        """Admits a sequence. Schedulers repeat calls that find no room; only the call that admits records a span."""
        span = tracing.join("kvcache.v1.CacheManagerService/AdmitSequences", request.traceparent)
        admission = self._manager.admit(convert.admit_request(request))
        if admission.admitted and span is not tracing.OFF:
            span.end({"kvkeep.tokens": len(request.token_ids), "kvkeep.cached_tokens": admission.cached_tokens})
        return convert.admit_response(self._manager.epoch, admission)

    def _spender(self, admission: pb.AdmitSequenceRequest) -> tuple[str, AccountKey | None]:
        """The executor and the account of an admission."""
        tenant_id = admission.tenant_id if admission.HasField("tenant_id") else None
        salt = admission.salt if admission.HasField("salt") else None
        return admission.executor_id, self._manager.queries.account_of(tenant_id, salt)

    @mutation
    def SyncSequences(self, request: pb.SyncSequencesRequest) -> pb.SyncSequencesResponse:
        manager = self._manager
        answer = manager.sync(convert.sync_request(request))
        return convert.sync_response(manager.epoch, answer, duration(manager.config.lease_seconds))

    @mutation
    def TruncateSequence(self, request: pb.TruncateSequenceRequest) -> pb.TruncateSequenceResponse:
        """Drops tokens from the end of a sequence."""
        freed = self._manager.truncate(_caller(request), request.sequence_id, request.num_tokens)
        return pb.TruncateSequenceResponse(found=freed.found, freed_blocks=freed.freed_blocks)

    @mutation
    def ForkSequence(self, request: pb.ForkSequenceRequest) -> pb.ForkSequenceResponse:
        """Shares a sequence's blocks with a second sequence."""
        num_tokens = request.num_tokens if request.HasField("num_tokens") else None
        return convert.fork_response(
            self._manager.fork(_caller(request), request.parent_sequence_id, request.sequence_id, num_tokens)
        )

    @mutation
    def HoldSequence(self, request: pb.HoldSequenceRequest) -> pb.HoldSequenceResponse:
        """Keeps a sequence's blocks after the sequence has ended."""
        held = self._manager.hold(_caller(request), request.sequence_id, request.owner, seconds(request.duration))
        return pb.HoldSequenceResponse(held_blocks=held)

    @mutation
    def ConfirmTransfers(self, request: pb.ConfirmTransfersRequest) -> pb.ConfirmTransfersResponse:
        unknown = self._manager.confirm_transfers(
            request.executor_id, request.executor_epoch, request.tickets, request.failed_tickets, request.step
        )
        return pb.ConfirmTransfersResponse(unknown_tickets=unknown)

    @mutation
    def SendHints(self, request: pb.SendHintsRequest) -> pb.SendHintsResponse:
        session_id = request.session_id if request.HasField("session_id") else None
        answers, begun = self._manager.operators.hint(
            convert_admin.prefix(request.prefix), convert.hints(request.hints), session_id
        )
        return pb.SendHintsResponse(
            answers=[convert.hint_answer(answer) for answer in answers], transfers=convert.transfers(begun)
        )


def _caller(request: Any) -> SchedulerEpoch:
    return SchedulerEpoch(request.scheduler_id, request.scheduler_epoch)
