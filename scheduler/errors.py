"""Errors of the scheduler. Callers see the ServiceErrors; the others stay inside."""

from protos.errors import InvalidField, ServiceError
from protos.rpc.errors import RemoteError


class ModelNotFoundError(ServiceError):
    reason = "MODEL_NOT_FOUND"


class UnknownAdapterError(ServiceError):
    """No adapter is loaded under this name."""

    reason = "UNKNOWN_ADAPTER"


class AdapterLeavesError(ServiceError):
    """The adapter of this name is still used by requests that began before it was unloaded."""

    reason = "ADAPTER_LEAVES"


class AdapterLostError(ServiceError):
    """The executor has restarted without the request's adapter; at a router, no engine has the adapter any more."""

    reason = "ADAPTER_LOST"


class LoadedElsewhereError(ServiceError):
    """This process has no executor that could load anything."""

    reason = "LOADED_ELSEWHERE"


class ContextLengthError(InvalidField):
    """The prompt or the output is too long for the model. The reason is OpenAI's."""

    reason = "CONTEXT_LENGTH_EXCEEDED"


class RequestExistsError(ServiceError):
    reason = "REQUEST_EXISTS"


class UnknownRequestError(ServiceError):
    """No live request of the caller has this id."""

    reason = "UNKNOWN_REQUEST"


class QueueFullError(ServiceError):
    reason = "QUEUE_FULL"


class TenantBusyError(ServiceError):
    reason = "TENANT_BUSY"


class DeadlineError(ServiceError):
    reason = "DEADLINE_EXCEEDED"


class NotReadyError(ServiceError):
    """The process waits for its neighbours (a router: for an engine), or an obstacle fails its HTTP health check."""

    reason = "NOT_READY"


class DrainingError(ServiceError):
    """The scheduler is about to stop, or an operator is draining it."""

    reason = "DRAINING"


class StepLoopError(ServiceError):
    """The step loop ended with a defect."""

    reason = "STEP_LOOP_FAILED"


class ExecutorReplacedError(ServiceError):
    """The executor registered again with another name, model or block layout, or with smaller pools."""

    reason = "EXECUTOR_REPLACED"


class ExecutorFailsError(ServiceError):
    """The executor was lost repeatedly while it computed the request."""

    reason = "EXECUTOR_FAILS"


class RequestTooLargeError(ServiceError):
    """The request needs more blocks than it can ever have."""

    reason = "REQUEST_TOO_LARGE"


class FormTooComplexError(ServiceError):
    """The grammar of a structured output became too complex to continue the output."""

    reason = "FORM_TOO_COMPLEX"

    def __init__(self, tokens: int) -> None:
        """tokens: of the output so far."""
        super().__init__(
            f"the output's form became too complex to be followed after {tokens} tokens: "
            "simplify the schema, the pattern or the grammar"
        )


class RulePolicyError(ServiceError):
    """An operator's rule gives the request an impossible eviction policy."""

    reason = "RULE_POLICY"


class AdmissionError(ServiceError):
    """The cache manager refuses the request for an unexpected reason."""

    reason = "ADMISSION_FAILED"

    def __init__(self, cause: RemoteError) -> None:
        super().__init__(f"the cache manager refused the request: {cause.message}", metadata={"cause": cause.reason})


# Fields of an admission under their names in a request.
_FIELDS = {"token_ids": "input", "eviction_policy": "eviction_policy"}


def refusal(cause: RemoteError, *, has_policy: bool) -> ServiceError:
    """The error for a caller whose admission the cache manager refused.

    has_policy: whether the request itself has an eviction policy.
    """
    # The fields are those of the message's first admission.
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
    """The executor's model cannot be served; the message is one sentence for operators."""


class ExecutorLostError(Exception):
    """The session with the executor is over or could not be opened; steps in flight will not be answered.

    is_planned: the executor ended the session for an operator, and accepts the next session at once.
    is_out_of_memory: the executor had no memory for a step, and accepts the next session at once.
    """

    def __init__(self, message: str, *, is_planned: bool = False, is_out_of_memory: bool = False) -> None:
        super().__init__(message)
        self.is_planned = is_planned
        self.is_out_of_memory = is_out_of_memory


class ExecutorChangedError(Exception):
    """The process was set up for another executor: only a new process can go on."""


class ManagerLostError(Exception):
    """The cache manager no longer knows this scheduler or its sequences, or has refused a sync or a registration."""


class SchedulerReplacedError(Exception):
    """A scheduler of the same name has registered with a newer epoch: only a new process can go on."""

    def __init__(self, message: str, newest_epoch: int) -> None:
        """newest_epoch: the other scheduler's epoch, 0 if it is not known."""
        super().__init__(message)
        self.newest_epoch = newest_epoch
