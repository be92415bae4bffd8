"""Every error that the cache manager answers with. Running out of blocks is an answer, not an error."""

import grpc

from protos.rpc.errors import InvalidField, ServiceError

__all__ = [
    "BlocksInUseError",
    "EventsGoneError",
    "ExecutorLeaseError",
    "InvalidField",
    "ManagerRestartedError",
    "PoolInUseError",
    "PoolSpecError",
    "QuotaTooLargeError",
    "RuleExistsError",
    "RulePolicyError",
    "SequenceEvictsError",
    "SequenceExistsError",
    "SequenceTooLongError",
    "SequenceUnsettledError",
    "SharedBlockError",
    "StaleExecutorError",
    "StalePoolError",
    "StaleRuleError",
    "StaleSchedulerError",
    "StateChangesError",
    "SyncNumberError",
    "UnknownExecutorError",
    "UnknownHoldError",
    "UnknownPoolError",
    "UnknownQuotaError",
    "UnknownRuleError",
    "UnknownSchedulerError",
    "UnknownSequenceError",
    "VoidSequenceError",
    "WindowPassedError",
]


class UnknownExecutorError(ServiceError):
    """No executor of this name is registered."""

    code = grpc.StatusCode.NOT_FOUND
    reason = "UNKNOWN_EXECUTOR"


class ExecutorLeaseError(ServiceError):
    """A renewal that does not fit to a registration: the executor must register again."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "EXECUTOR_NOT_REGISTERED"


class StaleExecutorError(ServiceError):
    """A newer epoch of this executor is registered."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "STALE_EXECUTOR"


class PoolSpecError(ServiceError):
    """An executor announces other pools than before under the same epoch."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "EXECUTOR_POOLS_CHANGED"


class SchedulerFirstError(ServiceError):
    """What is remembered of the executor cannot be believed before a scheduler has given up its old sequences."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "SCHEDULER_FIRST"

    def __init__(self) -> None:
        super().__init__("waiting for a scheduler: steps of before may still write into its blocks")


class UnknownSchedulerError(ServiceError):
    """The scheduler is not registered, or its lease ran out."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "UNKNOWN_SCHEDULER"


class StaleSchedulerError(ServiceError):
    """Another epoch of this scheduler is registered."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "STALE_SCHEDULER"


class ManagerRestartedError(ServiceError):
    """The caller's handles belong to an earlier manager process."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "MANAGER_RESTARTED"


class ManagerFailedError(ServiceError):
    """An earlier call has failed inside: the process is ending, and starts again."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = "MANAGER_FAILED"


class SyncNumberError(ServiceError):
    """A sync that is neither the next one nor a repeat of the last."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "SYNC_NUMBER"


class SequenceExistsError(ServiceError):
    """The id is taken by a sequence with other content."""

    code = grpc.StatusCode.ALREADY_EXISTS
    reason = "SEQUENCE_EXISTS"


class UnknownSequenceError(ServiceError):
    """No sequence has this id."""

    code = grpc.StatusCode.NOT_FOUND
    reason = "UNKNOWN_SEQUENCE"


class VoidSequenceError(ServiceError):
    """The sequence's promised prefix will not come: it can only be released."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "VOID_SEQUENCE"


class SequenceUnsettledError(ServiceError):
    """A fork of a sequence whose copies are open or whose promised prefix is still being computed."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "SEQUENCE_UNSETTLED"


class SequenceEvictsError(ServiceError):
    """A fork or truncation of a sequence that is no longer its leading tokens, or a fork that would know no scores."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "SEQUENCE_EVICTS"


class SequenceTooLongError(ServiceError):
    """More blocks than the pool has, or a quota allows: no waiting helps."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    reason = "SEQUENCE_TOO_LONG"


class SharedBlockError(ServiceError):
    """A truncation that ends inside a block which others can read."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "SHARED_BLOCK"


class WindowPassedError(ServiceError):
    """A truncation or fork to a length whose attention window is given back already."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "WINDOW_PASSED"


class UnknownPoolError(ServiceError):
    """No pool has this name."""

    code = grpc.StatusCode.NOT_FOUND
    reason = "UNKNOWN_POOL"


class RuleExistsError(ServiceError):
    """A rule of this name exists."""

    code = grpc.StatusCode.ALREADY_EXISTS
    reason = "RULE_EXISTS"


class UnknownRuleError(ServiceError):
    """No rule has this name."""

    code = grpc.StatusCode.NOT_FOUND
    reason = "UNKNOWN_RULE"


class RulePolicyError(ServiceError):
    """A rule gives the request an eviction policy that the executor's model cannot carry."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "RULE_POLICY"


class StaleRuleError(ServiceError):
    """The rule has changed since the caller read it."""

    code = grpc.StatusCode.ABORTED
    reason = "STALE_RULE"


class StalePoolError(ServiceError):
    """The pool has changed since the caller read it."""

    code = grpc.StatusCode.ABORTED
    reason = "STALE_POOL"


class PoolInUseError(ServiceError):
    """A pool cannot become so small now."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "POOL_IN_USE"


class QuotaTooLargeError(ServiceError):
    """Floors that no pool could keep together."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "QUOTA_TOO_LARGE"


class UnknownQuotaError(ServiceError):
    """The account has no quota."""

    code = grpc.StatusCode.NOT_FOUND
    reason = "UNKNOWN_QUOTA"


class UnknownHoldError(ServiceError):
    """No hold or pin has this name."""

    code = grpc.StatusCode.NOT_FOUND
    reason = "UNKNOWN_HOLD"


class BlocksInUseError(ServiceError):
    """Blocks that should go are in use: nothing was changed."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "BLOCKS_IN_USE"


class EventsGoneError(ServiceError):
    """The events behind this number are not kept any more, or do not exist yet: start with a snapshot."""

    code = grpc.StatusCode.OUT_OF_RANGE
    reason = "EVENTS_GONE"


class StateChangesError(ServiceError):
    """A read that needs the state of one moment met changes every time: repeat it, or drain the schedulers first."""

    code = grpc.StatusCode.ABORTED
    reason = "STATE_CHANGES"
