"""Every call that changes a manager, by its name: a message in, a message out.

The services, the operation log and its replay all go through here, so that a log holds what happened and nothing else
can happen.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import Message

from cachemgr import convert, convert_admin
from cachemgr.api import SchedulerEpoch
from cachemgr.errors import InvalidField, ManagerFailedError
from cachemgr.manager import CacheManager
from cachemgr.operator_records import PinRecord
from cachemgr.oplog import END_RECOVERY, PUT_BACK, OperationLog
from cachemgr.records import BlockRecord
from protos.kvcache.v1 import kvcache_pb2 as pb
from protos.rpc.errors import ServiceError

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Operation:
    """How a request of one type reaches the manager."""

    request: type[Message]
    run: Callable[[CacheManager, Any], Message]


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

    def run(self, method: str, request: Message) -> Any:
        """Answers a request. Raises what the manager raises; the log has the attempt, too, as it moves the time."""
        operation = OPERATIONS[method]
        self._note(method, request)
        return self._whole(method, lambda: operation.run(self.manager, request))

    def register_executor(
        self, request: pb.RegisterExecutorRequest, *, later: bool = False
    ) -> pb.RegisterExecutorResponse:
        """As RegisterExecutor; `later` says that remembered blocks come by `put_back` until `end_recovery`."""
        self._note("RegisterExecutor", request, later=later)
        return self._whole("RegisterExecutor", lambda: _register_executor(self.manager, request, later=later))

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
    ) -> None:
        if self.failed:
            raise ManagerFailedError("an earlier call has failed inside: the cache manager ends and starts again")
        # What a store tells is as of the time that the clock shows: the time since would come on top of each lease.
        now = self._clock.now if method in (PUT_BACK, END_RECOVERY) else self._clock.advance()
        if self._log is not None:
            self._log.write(now, method, request, remembered, pins, later=later)


def _register_executor(
    manager: CacheManager, request: pb.RegisterExecutorRequest, *, later: bool = False
) -> pb.RegisterExecutorResponse:
    restored = manager.register_executor(convert.executor_spec(request), later=later)
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
        transfers=convert.transfers(manager.executor_transfers(request.executor_id)),
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


def _purge(manager: CacheManager, request: pb.PurgeBlocksRequest) -> pb.PurgeBlocksResponse:
    selected = convert_admin.block_filter(request.filter)
    purged = manager.purge(selected, validate_only=request.validate_only, skip_used=request.skip_used)
    return pb.PurgeBlocksResponse(purged_blocks=purged.purged_blocks, used_blocks=purged.used_blocks)


def _forget(manager: CacheManager, request: pb.ForgetBlocksRequest) -> pb.ForgetBlocksResponse:
    target = convert_admin.forget_target(request)
    return convert_admin.forgotten(manager.forget(target, validate_only=request.validate_only))


def _update_pool(manager: CacheManager, request: pb.UpdatePoolRequest) -> pb.UpdatePoolResponse:
    for index, path in enumerate(request.update_mask.paths):
        if path != "total_blocks":
            raise InvalidField(f"update_mask.paths[{index}]", "must be total_blocks")
    if not request.pool.pool_id:
        raise InvalidField("pool.pool_id", "must name a pool as ListPools gives it")
    given = request.pool
    view = manager.update_pool(given.pool_id, given.total_blocks, given.etag, validate_only=request.validate_only)
    return pb.UpdatePoolResponse(pool=convert.pool(view))


def _create_rule(manager: CacheManager, request: pb.CreateRetentionRuleRequest) -> pb.CreateRetentionRuleResponse:
    rule, matching = manager.create_rule(convert_admin.rule(request.rule), validate_only=request.validate_only)
    return pb.CreateRetentionRuleResponse(rule=convert_admin.rule_message(rule), matching_blocks=matching)


def _update_rule(manager: CacheManager, request: pb.UpdateRetentionRuleRequest) -> pb.UpdateRetentionRuleResponse:
    rule, leases, matching = manager.update_rule(
        convert_admin.rule(request.rule), tuple(request.update_mask.paths), validate_only=request.validate_only
    )
    return pb.UpdateRetentionRuleResponse(
        rule=convert_admin.rule_message(rule), changed_leases=leases, matching_blocks=matching
    )


def _delete_rule(manager: CacheManager, request: pb.DeleteRetentionRuleRequest) -> pb.DeleteRetentionRuleResponse:
    ended = manager.delete_rule(request.name, request.etag, validate_only=request.validate_only)
    return pb.DeleteRetentionRuleResponse(ended_leases=ended)


def _set_quota(manager: CacheManager, request: pb.SetQuotaRequest) -> pb.SetQuotaResponse:
    quota = manager.set_quota(convert_admin.quota(request.quota), validate_only=request.validate_only)
    return pb.SetQuotaResponse(quota=convert_admin.quota_message(quota))


def _delete_quota(manager: CacheManager, request: pb.DeleteQuotaRequest) -> pb.DeleteQuotaResponse:
    manager.delete_quota(convert_admin.account(request))
    return pb.DeleteQuotaResponse()


def _pin(manager: CacheManager, request: pb.PinPrefixRequest) -> pb.PinPrefixResponse:
    seconds = convert.seconds(request.duration)
    prefix = convert_admin.prefix(request.prefix)
    return convert_admin.pinned(manager.pin_prefix(prefix, request.owner, seconds, validate_only=request.validate_only))


def _release_hold(manager: CacheManager, request: pb.ReleaseHoldRequest) -> pb.ReleaseHoldResponse:
    return pb.ReleaseHoldResponse(freed_blocks=manager.release_hold(request.name))


def _hint(manager: CacheManager, request: pb.SendHintsRequest) -> pb.SendHintsResponse:
    session_id = request.session_id if request.HasField("session_id") else None
    answers, begun = manager.hint(convert_admin.prefix(request.prefix), convert.hints(request.hints), session_id)
    return pb.SendHintsResponse(
        answers=[convert.hint_answer(answer) for answer in answers], transfers=convert.transfers(begun)
    )


def _restore_operators(manager: CacheManager, request: pb.RememberedOperators) -> Message:
    manager.restore_operators(
        [convert_admin.rule(rule) for rule in request.rules],
        [convert_admin.quota(quota) for quota in request.quotas],
        [convert_admin.share(share) for share in request.shares],
    )
    return Empty()


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
    "PurgeBlocks": Operation(pb.PurgeBlocksRequest, _purge),
    "ForgetBlocks": Operation(pb.ForgetBlocksRequest, _forget),
    "UpdatePool": Operation(pb.UpdatePoolRequest, _update_pool),
    "CreateRetentionRule": Operation(pb.CreateRetentionRuleRequest, _create_rule),
    "UpdateRetentionRule": Operation(pb.UpdateRetentionRuleRequest, _update_rule),
    "DeleteRetentionRule": Operation(pb.DeleteRetentionRuleRequest, _delete_rule),
    "SetQuota": Operation(pb.SetQuotaRequest, _set_quota),
    "DeleteQuota": Operation(pb.DeleteQuotaRequest, _delete_quota),
    "PinPrefix": Operation(pb.PinPrefixRequest, _pin),
    "ReleaseHold": Operation(pb.ReleaseHoldRequest, _release_hold),
    # No method of a service: what the store remembers, once it could be asked.
    "RestoreOperators": Operation(pb.RememberedOperators, _restore_operators),
}
