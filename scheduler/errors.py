"""What can go wrong in the scheduler. A caller sees the ServiceErrors; the others stay inside."""

import grpc

from protos.rpc.errors import InvalidField, RemoteError, ServiceError


class ModelNotFoundError(ServiceError):
    """The request names a model that is not served."""

    code = grpc.StatusCode.NOT_FOUND
    reason = "MODEL_NOT_FOUND"


class ContextLengthError(InvalidField):
    """The prompt, or what is to come behind it, is too long for the model. Clients know OpenAI's name for it."""

    reason = "CONTEXT_LENGTH_EXCEEDED"


class RequestExistsError(ServiceError):
    """A running request has the same request_id."""

    code = grpc.StatusCode.ALREADY_EXISTS
    reason = "REQUEST_EXISTS"


class QueueFullError(ServiceError):
    """As many requests wait as may."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "QUEUE_FULL"


class TenantBusyError(ServiceError):
    """As many requests of the tenant are live as may be."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "TENANT_BUSY"


class DeadlineError(ServiceError):
    """The caller's deadline passed."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED
    reason = "DEADLINE_EXCEEDED"


class NotReadyError(ServiceError):
    """The executor or the cache manager has not been reached yet."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = "NOT_READY"


class DrainingError(ServiceError):
    """The scheduler is about to stop, or an operator drains it."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = "DRAINING"


class StepLoopError(ServiceError):
    """The step loop died of a defect of ours."""

    code = grpc.StatusCode.INTERNAL
    reason = "STEP_LOOP_FAILED"


class ExecutorReplacedError(ServiceError):
    """The executor serves another model or other pools than the request was made for."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = "EXECUTOR_REPLACED"


class ExecutorFailsError(ServiceError):
    """The executor fails whenever it computes the request."""

    code = grpc.StatusCode.INTERNAL
    reason = "EXECUTOR_FAILS"


class RequestTooLargeError(ServiceError):
    """The request needs more blocks at once than it can ever have: no waiting helps."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    reason = "REQUEST_TOO_LARGE"


class RulePolicyError(ServiceError):
    """An operator's rule gives the request an eviction policy that cannot be followed."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "RULE_POLICY"


class AdmissionError(ServiceError):
    """The cache manager refuses the request for good, and nobody knows why it should."""

    code = grpc.StatusCode.INTERNAL
    reason = "ADMISSION_FAILED"

    def __init__(self, cause: RemoteError) -> None:
        super().__init__(f"the cache manager refused the request: {cause.message}", metadata={"cause": cause.reason})


# What fields of an admission are called in a request.
_FIELDS = {"token_ids": "input", "eviction_policy": "eviction_policy"}


def refusal(cause: RemoteError, *, has_policy: bool) -> ServiceError:
    """What a caller is told whom the cache manager refused: it alone knows its blocks and rules, and reads hints.

    has_policy: whether the request itself says how it evicts tokens.
    """
    # It names the first admission of its message.
    fields = {field.partition("].")[2]: description for field, description in cause.fields.items()}
    if cause.reason == RulePolicyError.reason or ("eviction_policy" in fields and not has_policy):
        return RulePolicyError(cause.message)
    if cause.reason == "SEQUENCE_TOO_LONG":
        return RequestTooLargeError(cause.message, fields={_FIELDS[field]: fields[field] for field in fields})
    for field, description in fields.items():
        if field.startswith("hints"):
            return InvalidField(f"cache.kv_{field}", description)
    return AdmissionError(cause)


class UnusableModelError(Exception):
    """The executor's model cannot be served to callers; the message is one sentence for people."""


class ExecutorLostError(Exception):
    """The session with the executor is over; what was in flight will not be answered."""


class ExecutorChangedError(Exception):
    """The executor is not the one that this process was set up for: only a new process can go on."""


class ManagerLostError(Exception):
    """The cache manager no longer knows this scheduler or its sequences."""


class SchedulerReplacedError(Exception):
    """A scheduler of the same name has registered with a newer epoch: only a new process can go on."""

    def __init__(self, message: str, newest_epoch: int) -> None:
        """newest_epoch: that of the other scheduler, 0 where it is not known."""
        super().__init__(message)
        self.newest_epoch = newest_epoch
