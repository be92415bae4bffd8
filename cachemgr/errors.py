"""The errors of the cache manager. Missing blocks are an answer, not an error."""

from protos.errors import ServiceError


class UnknownExecutorError(ServiceError):
    reason = "UNKNOWN_EXECUTOR"


class ExecutorLeaseError(ServiceError):
    """A renewal without a registration of this epoch: the executor must register again."""

    reason = "EXECUTOR_NOT_REGISTERED"


class StaleExecutorError(ServiceError):
    reason = "STALE_EXECUTOR"


class PoolSpecError(ServiceError):
    """An executor announces other pools than before under the same epoch."""

    reason = "EXECUTOR_POOLS_CHANGED"


class SchedulerFirstError(ServiceError):
    """Blocks of the executor cannot be restored before its scheduler has given up its sequences of before."""

    reason = "SCHEDULER_FIRST"

    def __init__(self) -> None:
        super().__init__("waiting for the executor's scheduler: its earlier steps may still write into the blocks")


class UnknownSchedulerError(ServiceError):
    """The scheduler is not registered, or its lease ran out."""

    reason = "UNKNOWN_SCHEDULER"


class StaleSchedulerError(ServiceError):
    reason = "STALE_SCHEDULER"


class ManagerRestartedError(ServiceError):
    """The caller's handles belong to an earlier manager process."""

    reason = "MANAGER_RESTARTED"


class ManagerFailedError(ServiceError):
    """An earlier call has failed unexpectedly: the process ends and starts again."""

    reason = "MANAGER_FAILED"


class SyncNumberError(ServiceError):
    """The sync is neither the next one nor a repeat of the last."""

    reason = "SYNC_NUMBER"


class SequenceExistsError(ServiceError):
    """The id is in use for a sequence with other content."""

    reason = "SEQUENCE_EXISTS"


class UnknownSequenceError(ServiceError):
    reason = "UNKNOWN_SEQUENCE"


class VoidSequenceError(ServiceError):
    """The shared pending blocks of the sequence will not be computed: it can only be released."""

    reason = "VOID_SEQUENCE"


class SequenceUnsettledError(ServiceError):
    """A fork of a sequence with open copies or shared pending blocks."""

    reason = "SEQUENCE_UNSETTLED"


class SequenceEvictsError(ServiceError):
    """A fork or truncation of a sequence that has evicted tokens, or a fork that would lack scores."""

    reason = "SEQUENCE_EVICTS"


class SequenceTooLongError(ServiceError):
    """The sequence needs more blocks than the pool has, or a quota allows: waiting does not help."""

    reason = "SEQUENCE_TOO_LONG"


class SharedBlockError(ServiceError):
    """A truncation that ends inside a block which other sequences can read."""

    reason = "SHARED_BLOCK"


class WindowPassedError(ServiceError):
    """A truncation or fork to a length whose attention window was released already."""

    reason = "WINDOW_PASSED"


class UnknownPoolError(ServiceError):
    reason = "UNKNOWN_POOL"


class RuleExistsError(ServiceError):
    reason = "RULE_EXISTS"


class UnknownRuleError(ServiceError):
    reason = "UNKNOWN_RULE"


class RulePolicyError(ServiceError):
    """A rule gives the request an eviction policy that the model of the executor cannot carry."""

    reason = "RULE_POLICY"


class StaleRuleError(ServiceError):
    reason = "STALE_RULE"


class StalePoolError(ServiceError):
    reason = "STALE_POOL"


class PoolInUseError(ServiceError):
    """A pool cannot become so small now."""

    reason = "POOL_IN_USE"


class QuotaTooLargeError(ServiceError):
    """No pool could keep these floors together."""

    reason = "QUOTA_TOO_LARGE"


class UnknownQuotaError(ServiceError):
    reason = "UNKNOWN_QUOTA"


class UnknownHoldError(ServiceError):
    reason = "UNKNOWN_HOLD"


class BlocksInUseError(ServiceError):
    """Blocks to remove are in use: nothing was changed."""

    reason = "BLOCKS_IN_USE"


class EventsGoneError(ServiceError):
    """The events after this number are not kept any more, or do not exist yet: begin with a snapshot."""

    reason = "EVENTS_GONE"


class StateChangesError(ServiceError):
    """A read of the state at one moment met changes every time: repeat it, or drain the schedulers first."""

    reason = "STATE_CHANGES"
