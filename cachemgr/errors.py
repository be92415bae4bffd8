"""The errors of the cache manager. Missing blocks are an answer, not an error."""

from protos.errors import ServiceError


class UnknownExecutorError(ServiceError):
    reason = "UNKNOWN_EXECUTOR"


class ExecutorLeaseError(ServiceError):
    """The executor renewed a lease for an unregistered epoch; it must register again."""

    reason = "EXECUTOR_NOT_REGISTERED"


class StaleExecutorError(ServiceError):
    reason = "STALE_EXECUTOR"


class PoolSpecError(ServiceError):
    """The executor announces a different model, memory or pools under an epoch that it has already registered."""

    reason = "EXECUTOR_POOLS_CHANGED"


class SchedulerFirstError(ServiceError):
    """The executor's blocks cannot be restored until its scheduler has given up its earlier sequences."""

    reason = "SCHEDULER_FIRST"

    def __init__(self) -> None:
        super().__init__("waiting for the executor's scheduler: its earlier steps may still write into the blocks")


class UnknownSchedulerError(ServiceError):
    """The scheduler is not registered, or its lease ran out."""

    reason = "UNKNOWN_SCHEDULER"


class StaleSchedulerError(ServiceError):
    reason = "STALE_SCHEDULER"


class ManagerRestartedError(ServiceError):
    """The caller's registration or handles belong to another manager process."""

    reason = "MANAGER_RESTARTED"


class ManagerFailedError(ServiceError):
    """An earlier call failed unexpectedly, so the process ends and starts again."""

    reason = "MANAGER_FAILED"


class SyncNumberError(ServiceError):
    """The number of the sync is neither the next number nor a repeat of the last number."""

    reason = "SYNC_NUMBER"


class SequenceExistsError(ServiceError):
    """The id is in use for a sequence with different content, or of another scheduler."""

    reason = "SEQUENCE_EXISTS"


class UnknownSequenceError(ServiceError):
    reason = "UNKNOWN_SEQUENCE"


class VoidSequenceError(ServiceError):
    """The sequence can only be released, since some of its blocks will never hold their tokens.

    Its executor ended or restarted, a copy into its blocks failed, or shared pending blocks will not be computed.
    """

    reason = "VOID_SEQUENCE"


class SequenceUnsettledError(ServiceError):
    """The sequence has open copies or shared pending blocks and cannot be forked."""

    reason = "SEQUENCE_UNSETTLED"


class SequenceEvictsError(ServiceError):
    """The sequence cannot be forked or truncated: it has evicted tokens, or may soon evict tokens in place.

    Also raised for a fork that would lack the attention scores by which its parent evicts.
    """

    reason = "SEQUENCE_EVICTS"


class SequenceTooLongError(ServiceError):
    """The sequence needs more blocks than the pool has or a quota allows; waiting does not help."""

    reason = "SEQUENCE_TOO_LONG"


class SharedBlockError(ServiceError):
    """The truncation would end inside a block that other sequences can read."""

    reason = "SHARED_BLOCK"


class WindowPassedError(ServiceError):
    """The attention window at that length has been released, so the sequence cannot be forked or truncated there."""

    reason = "WINDOW_PASSED"


class UnknownPoolError(ServiceError):
    reason = "UNKNOWN_POOL"


class RuleExistsError(ServiceError):
    reason = "RULE_EXISTS"


class UnknownRuleError(ServiceError):
    reason = "UNKNOWN_RULE"


class RulePolicyError(ServiceError):
    """A rule gives the request an eviction policy that the executor's model does not support."""

    reason = "RULE_POLICY"


class StaleRuleError(ServiceError):
    reason = "STALE_RULE"


class StalePoolError(ServiceError):
    reason = "STALE_POOL"


class PoolInUseError(ServiceError):
    """A pool cannot shrink or grow to this size now: blocks are in use, protected or not yet freed."""

    reason = "POOL_IN_USE"


class QuotaTooLargeError(ServiceError):
    """The quota floors add up to more blocks than a pool has."""

    reason = "QUOTA_TOO_LARGE"


class UnknownQuotaError(ServiceError):
    reason = "UNKNOWN_QUOTA"


class UnknownHoldError(ServiceError):
    reason = "UNKNOWN_HOLD"


class BlocksInUseError(ServiceError):
    """Blocks to remove are in use; nothing was changed."""

    reason = "BLOCKS_IN_USE"


class EventsGoneError(ServiceError):
    """The events after this number are no longer kept, do not exist yet, or are of another manager process.

    Begin with a snapshot.
    """

    reason = "EVENTS_GONE"


class StateChangesError(ServiceError):
    """The state kept changing, so no consistent snapshot could be read. Retry, or drain the schedulers first."""

    reason = "STATE_CHANGES"
