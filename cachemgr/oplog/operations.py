"""Every call that changes a manager, by its name: a message in, a message out.

The services, the operation log and its replay all go through here, so that a log holds what happened and nothing else
can happen.
"""

import asyncio
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any, TypeVar

from google.protobuf.empty_pb2 import Empty
from google.protobuf.field_mask_pb2 import FieldMask
from google.protobuf.message import Message

from cachemgr.blocks.block_record import BlockRecord
from cachemgr.errors import ManagerFailedError
from cachemgr.manager import CacheManager
from cachemgr.oplog.writer import END_EPOCH, END_RECOVERY, GO_ON, PUT_BACK, OperationLog
from cachemgr.rpc import convert, convert_admin
from cachemgr.rpc.slices import SLICE_SECONDS
from cachemgr.steps import Steps, at_once
from cachemgr.types import ExecutorSpec, PinRecord, SchedulerEpoch
from protos.errors import InvalidField, ServiceError
from protos.kvcache.v1 import kvcache_pb2 as pb

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Operation:
    """How a request of one type reaches the manager."""

    request: type[Message]
    run: Callable[[CacheManager, Any], Message]
    # Of calls that may touch very many blocks: the same in steps.
    steps: Callable[[CacheManager, Any], Steps[Message]] | None = None


class ManagerClock:
    """The manager's time. It stands still within an operation, so that the log can say what the operation saw."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.now = clock()

    def __call__(self) -> float:
        return self.now

    def advance(self) -> float:
        """Reads the clock behind it."""
        self.now = self._clock()
        return self.now


# Between two looks at what has ended by time.
EXPIRE_SECONDS = 0.5


class Operations:
    """The one way to change a manager.

    A call that fails with anything but a ServiceError after the manager has begun it may have done half of its work.
    `on_failure` hears of that, with the method, and every later call is refused with ManagerFailedError.
    """

    def __init__(
        self,
        manager: CacheManager,
        clock: ManagerClock,
        log: OperationLog | None = None,
        on_failure: Callable[[str, Exception], None] | None = None,
    ) -> None:
        self.manager = manager
        self.failed = False
        self._on_failure = on_failure
        self._clock = clock
        self._log = log
        self._expired_at = clock.now
        # The call that is carried out in steps, with its method; its answer behind the last step.
        self._long_call: tuple[str, Steps[Message]] | None = None
        self.answer: Message | None = None
        self._one_at_a_time = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()

    def run(self, method: str, request: Message) -> Any:
        """Answers a request. Raises what the manager raises; the log has the attempt, too, as it moves the time."""
        operation = OPERATIONS[method]
        self._note(method, request)
        return self._whole(method, lambda: operation.run(self.manager, request))

    async def run_in_slices(self, method: str, request: Message) -> Any:
        """As `run`; a call that may touch very many blocks lets others be answered meanwhile, one such call at a time.

        It goes on when its caller has gone.
        """
        if OPERATIONS[method].steps is None:
            return self.run(method, request)
        task = asyncio.create_task(self._run_in_slices(method, request))
        self._tasks.add(task)
        task.add_done_callback(self._has_ended)
        return await asyncio.shield(task)

    def _has_ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            # A caller that has gone does not look at it.
            task.exception()

    async def _run_in_slices(self, method: str, request: Message) -> Any:
        async with self._one_at_a_time:
            self.begin(method, request)
            end = perf_counter() + SLICE_SECONDS
            while not self.go_on():
                if perf_counter() >= end:
                    await asyncio.sleep(0)
                    end = perf_counter() + SLICE_SECONDS
            return self.answer

    def begin(self, method: str, request: Message) -> None:
        """Begins a call whose steps `go_on` takes; none may be under way."""
        steps = OPERATIONS[method].steps
        assert steps is not None
        self._note(method, request, in_steps=True)
        self._long_call = method, steps(self.manager, request)
        self.answer = None

    def go_on(self) -> bool:
        """Takes a step of the call that has begun; whether it was the last. Raises what the call raises."""
        self._note(GO_ON, None)
        if self._long_call is None:
            return True
        method, steps = self._long_call
        ended = False
        try:
            ended = self._whole(method, lambda: self._step(steps))
        except BaseException:
            ended = True
            raise
        finally:
            if ended:
                self._long_call = None
        return ended

    def _step(self, steps: Steps[Message]) -> bool:
        if inspect.getgeneratorstate(steps) == inspect.GEN_SUSPENDED:
            self.manager.go_on()
        try:
            next(steps)
        except StopIteration as ended:
            self.answer = ended.value
            return True
        return False

    def register_executor(
        self, request: pb.RegisterExecutorRequest, spec: ExecutorSpec | None = None, *, later: bool = False
    ) -> pb.RegisterExecutorResponse:
        """As RegisterExecutor; `later` says that remembered blocks come by `put_back` until `end_recovery`.

        `spec` is what the request says, if that is known: to read it again takes long where there are very many slots.
        """
        self._note("RegisterExecutor", request, later=later)
        return self._whole("RegisterExecutor", lambda: _register_executor(self.manager, request, spec, later=later))

    def end_epoch(self, executor_id: str, executor_epoch: int) -> None:
        """The executor has started again with more than one call can keep of this epoch: the store tells it again."""
        self._note(END_EPOCH, pb.RecoveringExecutor(executor_id=executor_id, executor_epoch=executor_epoch))
        self._whole(END_EPOCH, lambda: self.manager.end_epoch(executor_id, executor_epoch))

    def put_back(self, executor_id: str, executor_epoch: int, remembered: list[BlockRecord]) -> None:
        """A part of the blocks that the store remembers."""
        executor = pb.RecoveringExecutor(executor_id=executor_id, executor_epoch=executor_epoch)
        self._note(PUT_BACK, executor, remembered)
        self._whole(PUT_BACK, lambda: self.manager.put_back(executor_id, executor_epoch, remembered))

    def end_recovery(self, executor_id: str, executor_epoch: int, pins: list[PinRecord]) -> None:
        """The store remembers no more blocks, and these pins."""
        executor = pb.RecoveringExecutor(executor_id=executor_id, executor_epoch=executor_epoch)
        self._note(END_RECOVERY, executor, pins=pins)
        self._whole(END_RECOVERY, lambda: self.manager.end_recovery(executor_id, executor_epoch, pins))

    def expire(self) -> None:
        """Does what time alone does; due every EXPIRE_SECONDS.

        A call that comes later tells of a pause of the process, or of a long call. It follows from the times in the
        log, so a replay sees the same pauses.
        """
        self._note("Expire", None)
        late = max(0.0, self._clock.now - self._expired_at - EXPIRE_SECONDS)
        self._expired_at = self._clock.now
        self._whole("Expire", lambda: self.manager.expire(late))

    def _whole(self, method: str, call: Callable[[], Answer]) -> Answer:
        """Answers nothing from a state that a call has left half changed."""
        begun = self.manager.begun
        try:
            return call()
        except ServiceError:
            raise
        except Exception as error:
            # A request that could not even be read has changed nothing.
            if self.manager.begun > begun:
                self.failed = True
                if self._on_failure is not None:
                    self._on_failure(method, error)
            raise

    def _note(
        self,
        method: str,
        request: Message | None,
        remembered: Iterable[BlockRecord] = (),
        pins: Iterable[PinRecord] = (),
        *,
        later: bool = False,
        in_steps: bool = False,
    ) -> None:
        if self.failed:
            raise ManagerFailedError("an earlier call has failed inside: the cache manager ends and starts again")
        # What a store tells is as of the time that the clock shows: the time since would come on top of each lease.
        now = self._clock.now if method in (PUT_BACK, END_RECOVERY) else self._clock.advance()
        if self._log is not None:
            self._log.write(now, method, request, remembered, pins, later=later, in_steps=in_steps)


def _register_executor(
    manager: CacheManager, request: pb.RegisterExecutorRequest, spec: ExecutorSpec | None = None, *, later: bool = False
) -> pb.RegisterExecutorResponse:
    restored = manager.register_executor(spec or convert.executor_spec(request), later=later)
    return pb.RegisterExecutorResponse(
        manager_epoch=manager.epoch,
        lease_duration=_lease(manager),
        restored_blocks=restored.device_blocks,
        restored_lower_blocks=restored.lower_blocks,
    )


def _lease(manager: CacheManager) -> Any:
    return convert.duration(manager.config.lease_seconds)


def _renew_executor(manager: CacheManager, request: pb.RenewExecutorRequest) -> pb.RenewExecutorResponse:
    manager.renew_executor(request.executor_id, request.executor_epoch, request.manager_epoch)
    return pb.RenewExecutorResponse(
        manager_epoch=manager.epoch,
        lease_duration=_lease(manager),
        transfers=convert.transfers(manager.queries.executor_transfers(request.executor_id)),
        scheduler_ids=manager.queries.scheduler_ids(),
    )


def _register_scheduler(manager: CacheManager, request: pb.RegisterSchedulerRequest) -> pb.RegisterSchedulerResponse:
    manager.register_scheduler(request.scheduler_id, request.scheduler_epoch)
    return pb.RegisterSchedulerResponse(manager_epoch=manager.epoch, lease_duration=_lease(manager))


def _admit(manager: CacheManager, request: pb.AdmitSequenceRequest) -> pb.AdmitSequenceResponse:
    return convert.admit_response(manager.epoch, manager.admit(convert.admit_request(request)))


def _sync(manager: CacheManager, request: pb.SyncSequencesRequest) -> pb.SyncSequencesResponse:
    return convert.sync_response(manager.epoch, manager.sync(convert.sync_request(request)), _lease(manager))


def _caller(request: Any) -> SchedulerEpoch:
    return SchedulerEpoch(request.scheduler_id, request.scheduler_epoch)


def _extend(manager: CacheManager, request: pb.ExtendSequenceRequest) -> pb.ExtendSequenceResponse:
    return convert.extend_response(manager.extend(_caller(request), request.sequence_id, request.capacity_tokens))


def _truncate(manager: CacheManager, request: pb.TruncateSequenceRequest) -> pb.TruncateSequenceResponse:
    freed = manager.truncate(_caller(request), request.sequence_id, request.num_tokens)
    return pb.TruncateSequenceResponse(found=freed.found, freed_blocks=freed.freed_blocks)


def _fork(manager: CacheManager, request: pb.ForkSequenceRequest) -> pb.ForkSequenceResponse:
    num_tokens = request.num_tokens if request.HasField("num_tokens") else None
    return convert.fork_response(
        manager.fork(_caller(request), request.parent_sequence_id, request.sequence_id, num_tokens)
    )


def _hold(manager: CacheManager, request: pb.HoldSequenceRequest) -> pb.HoldSequenceResponse:
    held = manager.hold(_caller(request), request.sequence_id, request.owner, convert.seconds(request.duration))
    return pb.HoldSequenceResponse(held_blocks=held)


def _release(manager: CacheManager, request: pb.ReleaseSequenceRequest) -> pb.ReleaseSequenceResponse:
    freed = manager.release(_caller(request), request.sequence_id)
    return pb.ReleaseSequenceResponse(found=freed.found, freed_blocks=freed.freed_blocks)


def _confirm(manager: CacheManager, request: pb.ConfirmTransfersRequest) -> pb.ConfirmTransfersResponse:
    unknown = manager.confirm_transfers(
        request.executor_id, request.executor_epoch, request.tickets, request.failed_tickets, request.step
    )
    return pb.ConfirmTransfersResponse(unknown_tickets=unknown)


def _purge(manager: CacheManager, request: pb.PurgeBlocksRequest) -> Steps[pb.PurgeBlocksResponse]:
    selected = convert_admin.block_filter(request.filter)
    purged = yield from manager.operators.purge_in_steps(
        selected, validate_only=request.validate_only, skip_used=request.skip_used
    )
    return pb.PurgeBlocksResponse(purged_blocks=purged.purged_blocks, used_blocks=purged.used_blocks)


def _forget(manager: CacheManager, request: pb.ForgetBlocksRequest) -> Steps[pb.ForgetBlocksResponse]:
    target = convert_admin.forget_target(request)
    forgotten = yield from manager.operators.forget_in_steps(target, validate_only=request.validate_only)
    return convert_admin.forgotten(forgotten)


def _paths(update_mask: FieldMask) -> tuple[str, ...]:
    """The fields that change. Raises InvalidField for none: to change all of them by an oversight may cost leases."""
    if not update_mask.paths:
        raise InvalidField("update_mask", "must name at least one field")
    return tuple(update_mask.paths)


def _update_pool(manager: CacheManager, request: pb.UpdatePoolRequest) -> Steps[pb.UpdatePoolResponse]:
    for index, path in enumerate(_paths(request.update_mask)):
        if path != "total_blocks":
            raise InvalidField(f"update_mask.paths[{index}]", "must be total_blocks")
    if not request.pool.pool_id:
        raise InvalidField("pool.pool_id", "must name a pool as ListPools gives it")
    given = request.pool
    view = yield from manager.operators.update_pool_in_steps(
        given.pool_id, given.total_blocks, given.etag, validate_only=request.validate_only
    )
    return pb.UpdatePoolResponse(pool=convert.pool(view))


def _create_rule(
    manager: CacheManager, request: pb.CreateRetentionRuleRequest
) -> Steps[pb.CreateRetentionRuleResponse]:
    given = convert_admin.rule(request.rule)
    rule, matching = yield from manager.operators.create_rule_in_steps(given, validate_only=request.validate_only)
    return pb.CreateRetentionRuleResponse(rule=convert_admin.rule_message(rule), matching_blocks=matching)


def _update_rule(
    manager: CacheManager, request: pb.UpdateRetentionRuleRequest
) -> Steps[pb.UpdateRetentionRuleResponse]:
    rule, leases, matching = yield from manager.operators.update_rule_in_steps(
        convert_admin.rule(request.rule), _paths(request.update_mask), validate_only=request.validate_only
    )
    return pb.UpdateRetentionRuleResponse(
        rule=convert_admin.rule_message(rule), changed_leases=leases, matching_blocks=matching
    )


def _delete_rule(
    manager: CacheManager, request: pb.DeleteRetentionRuleRequest
) -> Steps[pb.DeleteRetentionRuleResponse]:
    ended = yield from manager.operators.delete_rule_in_steps(
        request.name, request.etag, validate_only=request.validate_only
    )
    return pb.DeleteRetentionRuleResponse(ended_leases=ended)


def _set_quota(manager: CacheManager, request: pb.SetQuotaRequest) -> Steps[pb.SetQuotaResponse]:
    given = convert_admin.quota(request.quota)
    quota = yield from manager.operators.set_quota_in_steps(given, validate_only=request.validate_only)
    return pb.SetQuotaResponse(quota=convert_admin.quota_message(quota))


def _delete_quota(manager: CacheManager, request: pb.DeleteQuotaRequest) -> Steps[pb.DeleteQuotaResponse]:
    yield from manager.operators.delete_quota_in_steps(convert_admin.account(request))
    return pb.DeleteQuotaResponse()


def _pin(manager: CacheManager, request: pb.PinPrefixRequest) -> pb.PinPrefixResponse:
    seconds = convert.seconds(request.duration)
    prefix = convert_admin.prefix(request.prefix)
    return convert_admin.pinned(
        manager.operators.pin_prefix(prefix, request.owner, seconds, validate_only=request.validate_only)
    )


def _release_hold(manager: CacheManager, request: pb.ReleaseHoldRequest) -> pb.ReleaseHoldResponse:
    return pb.ReleaseHoldResponse(freed_blocks=manager.operators.release_hold(request.name))


def _hint(manager: CacheManager, request: pb.SendHintsRequest) -> pb.SendHintsResponse:
    session_id = request.session_id if request.HasField("session_id") else None
    answers, begun = manager.operators.hint(
        convert_admin.prefix(request.prefix), convert.hints(request.hints), session_id
    )
    return pb.SendHintsResponse(
        answers=[convert.hint_answer(answer) for answer in answers], transfers=convert.transfers(begun)
    )


def _restore_operators(manager: CacheManager, request: pb.RememberedOperators) -> Message:
    manager.operators.restore(
        [convert_admin.rule(rule) for rule in request.rules],
        [convert_admin.quota(quota) for quota in request.quotas],
        [convert_admin.share(share) for share in request.shares],
    )
    return Empty()


def _long(request: type[Message], steps: Callable[[CacheManager, Any], Steps[Message]]) -> Operation:
    return Operation(request, lambda manager, message: at_once(steps(manager, message)), steps)


OPERATIONS: Mapping[str, Operation] = {
    "RegisterExecutor": Operation(pb.RegisterExecutorRequest, _register_executor),
    "RenewExecutor": Operation(pb.RenewExecutorRequest, _renew_executor),
    "RegisterScheduler": Operation(pb.RegisterSchedulerRequest, _register_scheduler),
    "AdmitSequence": Operation(pb.AdmitSequenceRequest, _admit),
    "SyncSequences": Operation(pb.SyncSequencesRequest, _sync),
    "ExtendSequence": Operation(pb.ExtendSequenceRequest, _extend),
    "TruncateSequence": Operation(pb.TruncateSequenceRequest, _truncate),
    "ForkSequence": Operation(pb.ForkSequenceRequest, _fork),
    "HoldSequence": Operation(pb.HoldSequenceRequest, _hold),
    "ReleaseSequence": Operation(pb.ReleaseSequenceRequest, _release),
    "ConfirmTransfers": Operation(pb.ConfirmTransfersRequest, _confirm),
    "SendHints": Operation(pb.SendHintsRequest, _hint),
    "PurgeBlocks": _long(pb.PurgeBlocksRequest, _purge),
    "ForgetBlocks": _long(pb.ForgetBlocksRequest, _forget),
    "UpdatePool": _long(pb.UpdatePoolRequest, _update_pool),
    "CreateRetentionRule": _long(pb.CreateRetentionRuleRequest, _create_rule),
    "UpdateRetentionRule": _long(pb.UpdateRetentionRuleRequest, _update_rule),
    "DeleteRetentionRule": _long(pb.DeleteRetentionRuleRequest, _delete_rule),
    "SetQuota": _long(pb.SetQuotaRequest, _set_quota),
    "DeleteQuota": _long(pb.DeleteQuotaRequest, _delete_quota),
    "PinPrefix": Operation(pb.PinPrefixRequest, _pin),
    "ReleaseHold": Operation(pb.ReleaseHoldRequest, _release_hold),
    # No method of a service: what the store remembers, once it could be asked.
    "RestoreOperators": Operation(pb.RememberedOperators, _restore_operators),
}
