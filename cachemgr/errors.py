"""Every error that the cache manager answers with. Running out of blocks is an answer, not an error."""

from protos.errors import ServiceError


class UnknownExecutorError(ServiceError):
    """No executor of this name is registered."""

    reason = "UNKNOWN_EXECUTOR"


class ExecutorLeaseError(ServiceError):
    """A renewal that does not fit to a registration: the executor must register again."""

    reason = "EXECUTOR_NOT_REGISTERED"


class StaleExecutorError(ServiceError):
    """A newer epoch of this executor is registered."""

    reason = "STALE_EXECUTOR"


class PoolSpecError(ServiceError):
    """An executor announces other pools than before under the same epoch."""

    reason = "EXECUTOR_POOLS_CHANGED"


class SchedulerFirstError(ServiceError):
    """What is remembered of the executor cannot be believed before a scheduler has given up its old sequences."""

    reason = "SCHEDULER_FIRST"

    def __init__(self) -> None:
        super().__init__("waiting for a scheduler: steps of before may still write into its blocks")


class UnknownSchedulerError(ServiceError):
    """The scheduler is not registered, or its lease ran out."""

    reason = "UNKNOWN_SCHEDULER"


class StaleSchedulerError(ServiceError):
    """Another epoch of this scheduler is registered."""

    reason = "STALE_SCHEDULER"


class ManagerRestartedError(ServiceError):
    """The caller's handles belong to an earlier manager process."""

    reason = "MANAGER_RESTARTED"


class ManagerFailedError(ServiceError):
    """An earlier call has failed inside: the process is ending, and starts again."""

    reason = "MANAGER_FAILED"


class SyncNumberError(ServiceError):
    """A sync that is neither the next one nor a repeat of the last."""

    reason = "SYNC_NUMBER"


class SequenceExistsError(ServiceError):
    """The id is taken by a sequence with other content."""

    reason = "SEQUENCE_EXISTS"


class UnknownSequenceError(ServiceError):
    """No sequence has this id."""

    reason = "UNKNOWN_SEQUENCE"


class VoidSequenceError(ServiceError):
    """The sequence's promised prefix will not come: it can only be released."""

    reason = "VOID_SEQUENCE"


class SequenceUnsettledError(ServiceError):
    """A fork of a sequence whose copies are open or whose promised prefix is still being computed."""

    reason = "SEQUENCE_UNSETTLED"


class SequenceEvictsError(ServiceError):
    """A fork or truncation of a sequence that is no longer its leading tokens, or a fork that would know no scores."""

    reason = "SEQUENCE_EVICTS"


class SequenceTooLongError(ServiceError):
    """More blocks than the pool has, or a quota allows: no waiting helps."""

    reason = "SEQUENCE_TOO_LONG"


class SharedBlockError(ServiceError):
    """A truncation that ends inside a block which others can read."""

    reason = "SHARED_BLOCK"


class WindowPassedError(ServiceError):
    """A truncation or fork to a length whose attention window is given back already."""

    reason = "WINDOW_PASSED"


class UnknownPoolError(ServiceError):
    """No pool has this name."""

    reason = "UNKNOWN_POOL"


class RuleExistsError(ServiceError):
    """A rule of this name exists."""

    reason = "RULE_EXISTS"


class UnknownRuleError(ServiceError):
    """No rule has this name."""

    reason = "UNKNOWN_RULE"


class RulePolicyError(ServiceError):
    """A rule gives the request an eviction policy that the executor's model cannot carry."""

    reason = "RULE_POLICY"


class StaleRuleError(ServiceError):
    """The rule has changed since the caller read it."""

    reason = "STALE_RULE"


class StalePoolError(ServiceError):
    """The pool has changed since the caller read it."""

    reason = "STALE_POOL"


class PoolInUseError(ServiceError):
    """A pool cannot become so small now."""

    reason = "POOL_IN_USE"


class QuotaTooLargeError(ServiceError):
    """Floors that no pool could keep together."""

    reason = "QUOTA_TOO_LARGE"


class UnknownQuotaError(ServiceError):
    """The account has no quota."""

    reason = "UNKNOWN_QUOTA"


class UnknownHoldError(ServiceError):
    """No hold or pin has this name."""

    reason = "UNKNOWN_HOLD"


class BlocksInUseError(ServiceError):
    """Blocks that should go are in use: nothing was changed."""

    reason = "BLOCKS_IN_USE"


class EventsGoneError(ServiceError):
    """The events behind this number are not kept any more, or do not exist yet: start with a snapshot."""

    reason = "EVENTS_GONE"


class StateChangesError(ServiceError):
    """A read that needs the state of one moment met changes every time: repeat it, or drain the schedulers first."""

    reason = "STATE_CHANGES"
