"""The errors of the executor, and the status that callers get."""

import grpc

from protos.rpc.errors import ServiceError


class ModelError(Exception):
    """The model cannot be run; the message is one sentence for operators."""


class FamilyError(ModelError):
    """The executor cannot run models of this family; the message says which families it runs."""

    def __init__(self, message: str) -> None:
        super().__init__(
            f"{message}, which the executor does not run; choose a decoder with full or sliding-window attention in "
            "every layer, such as Llama, Qwen3, Mistral, Gemma or gpt-oss"
        )


class UnsuitableError(Exception):
    """A faster forward pass cannot compute a model; the message says why."""


def first_line(error: BaseException) -> str:
    """Returns an exception's type and the first line of its text, on one line; only the type if there is no text."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].strip().rstrip('.;:')}" if lines else type(error).__name__


class CacheFileError(Exception):
    """A lower tier's file cannot be opened or has no space; the message is one sentence and names the setting."""


class BrokenStorageError(CacheFileError):
    """The storage under a tier no longer accepts writes; the executor can serve without the tier."""


class AdapterError(ServiceError):
    """An adapter's files cannot be used with this model; the message says why."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    reason = "INVALID_ADAPTER"


class AdapterExistsError(ServiceError):
    """Another adapter is loaded under this name."""

    code = grpc.StatusCode.ALREADY_EXISTS
    reason = "ADAPTER_EXISTS"


class TooManyAdaptersError(ServiceError):
    """As many adapters are loaded as the executor's setting allows."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "TOO_MANY_ADAPTERS"


class UnknownAdapterError(ServiceError):
    """No adapter is loaded under this name."""

    code = grpc.StatusCode.NOT_FOUND
    reason = "UNKNOWN_ADAPTER"


class AdaptersFixedError(ServiceError):
    """The executor's settings allow no loading or unloading of adapters at run time."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "ADAPTERS_FIXED"


class WeightsFixedError(ServiceError):
    """The executor's settings allow no other weights at run time."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "WEIGHTS_FIXED"


class WeightsError(ServiceError):
    """Weights cannot replace the executor's; the message says why, and the previous weights stay."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    reason = "INVALID_WEIGHTS"


class GrammarError(ServiceError):
    """The form of an output cannot be compiled; the message says why and, for a JSON Schema, where if that is known."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    reason = "INVALID_GRAMMAR"


class ExecutorError(ServiceError):
    """Base of the errors that end a session."""


class InvalidStepError(ExecutorError):
    """A step contradicts itself, the model or the pools, or a form is missing or wrong; no part of it was applied."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    reason = "INVALID_STEP"


class UnknownSequenceError(ExecutorError):
    """A step names a sequence that is not in the running set; no part of it was applied."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "UNKNOWN_SEQUENCE"


class CapacityExceededError(ExecutorError):
    """A sequence would compute tokens beyond its block tables' slots or the model's positions; nothing was applied."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "CAPACITY_EXCEEDED"


class StepOutOfOrderError(ExecutorError):
    """A step's number is not one more than that of the last step."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "STEP_OUT_OF_ORDER"


class SessionNotOpenError(ExecutorError):
    """The first message of a session must open the session, and no later message may."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "SESSION_NOT_OPEN"


class StaleSchedulerError(ExecutorError):
    """A newer scheduler has already opened a session."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "STALE_SCHEDULER_EPOCH"


class WrongExecutorEpochError(ExecutorError):
    """The scheduler plans for an earlier or later process of this executor."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "WRONG_EXECUTOR_EPOCH"


class ExecutorInUseError(ExecutorError):
    """The executor runs steps for another scheduler, whose lease with the cache manager may still be valid."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = "EXECUTOR_IN_USE"


class SessionReplacedError(ExecutorError):
    """A later session took over."""

    code = grpc.StatusCode.ABORTED
    reason = "SESSION_REPLACED"


class SchedulerLeftError(ExecutorError):
    """The scheduler's lease has ended since it opened the session, so that its blocks may belong to other schedulers.

    Also if the cache manager has started again and the scheduler has not registered with it in time.
    """

    code = grpc.StatusCode.ABORTED
    reason = "SCHEDULER_LEFT"


class StoppingError(ExecutorError):
    """The executor is shutting down."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = "STOPPING"


class UpdatingWeightsError(ExecutorError):
    """The executor is about to compute with other weights."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = "UPDATING_WEIGHTS"


class StepFailedError(ExecutorError):
    """The model failed on a step; the running set is lost."""

    code = grpc.StatusCode.INTERNAL
    reason = "STEP_FAILED"


class OutOfMemoryError(StepFailedError):
    """The device had no memory for a step; a step with fewer tokens may succeed."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "OUT_OF_MEMORY"
