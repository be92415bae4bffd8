"""Errors that cross a process border: conversion to statuses, and back on the client."""

from datetime import timedelta
from typing import Any

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

from protos.errors import InvalidField as InvalidField
from protos.errors import ServiceError as ServiceError

DOMAIN = "kvkeep"

_DETAILS_KEY = "grpc-status-details-bin"
_CODES = {code.value[0]: code for code in grpc.StatusCode}
# The status by the reason of an error; callers see both.
_REASONS = {
    grpc.StatusCode.NOT_FOUND: (
        "UNKNOWN_EXECUTOR",
        "UNKNOWN_SEQUENCE",
        "UNKNOWN_POOL",
        "UNKNOWN_RULE",
        "UNKNOWN_QUOTA",
        "UNKNOWN_HOLD",
        "MODEL_NOT_FOUND",
        "UNKNOWN_ADAPTER",
        "UNKNOWN_REQUEST",
    ),
    grpc.StatusCode.FAILED_PRECONDITION: (
        "EXECUTOR_NOT_REGISTERED",
        "STALE_EXECUTOR",
        "EXECUTOR_POOLS_CHANGED",
        "SCHEDULER_FIRST",
        "UNKNOWN_SCHEDULER",
        "STALE_SCHEDULER",
        "MANAGER_RESTARTED",
        "SYNC_NUMBER",
        "VOID_SEQUENCE",
        "SEQUENCE_UNSETTLED",
        "SEQUENCE_EVICTS",
        "SHARED_BLOCK",
        "WINDOW_PASSED",
        "RULE_POLICY",
        "POOL_IN_USE",
        "QUOTA_TOO_LARGE",
        "BLOCKS_IN_USE",
        "LOADED_ELSEWHERE",
    ),
    grpc.StatusCode.UNAVAILABLE: (
        "MANAGER_FAILED",
        "NOT_READY",
        "DRAINING",
        "EXECUTOR_REPLACED",
        "ADAPTER_LEAVES",
        "ADAPTER_LOST",
    ),
    grpc.StatusCode.ALREADY_EXISTS: ("SEQUENCE_EXISTS", "RULE_EXISTS", "REQUEST_EXISTS"),
    grpc.StatusCode.INVALID_ARGUMENT: ("INVALID_FIELD", "SEQUENCE_TOO_LONG", "REQUEST_TOO_LARGE", "FORM_TOO_COMPLEX"),
    grpc.StatusCode.ABORTED: (
        "STALE_RULE",
        "STALE_POOL",
        "STATE_CHANGES",
    ),
    grpc.StatusCode.OUT_OF_RANGE: ("EVENTS_GONE",),
    grpc.StatusCode.RESOURCE_EXHAUSTED: (
        "QUEUE_FULL",
        "TENANT_BUSY",
    ),
    grpc.StatusCode.DEADLINE_EXCEEDED: ("DEADLINE_EXCEEDED",),
    grpc.StatusCode.INTERNAL: (
        "STEP_LOOP_FAILED",
        "EXECUTOR_FAILS",
        "ADMISSION_FAILED",
    ),
}
_STATUSES = {reason: code for code, reasons in _REASONS.items() for reason in reasons}


class MalformedMessageError(ServiceError):
    """The bytes of the request are not a message of its type."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    reason = "MALFORMED_MESSAGE"


class UnexpectedError(ServiceError):
    """A bug of the server, which only its log describes."""

    code = grpc.StatusCode.INTERNAL
    reason = "UNEXPECTED"


def status_code(error: ServiceError | type[ServiceError]) -> grpc.StatusCode:
    """The status that callers see: the class's own, else the status of the nearest reason among it and its bases."""
    kind = error if isinstance(error, type) else type(error)
    own: grpc.StatusCode | None = getattr(error, "code", None)
    reasons = (getattr(base, "reason", "") for base in kind.__mro__)
    return own or next(_STATUSES[reason] for reason in reasons if reason in _STATUSES)


def to_status(error: ServiceError) -> Any:
    """Converts the error to a google.rpc.Status with ErrorInfo and, if they apply, BadRequest and RetryInfo."""
    details: list[Any] = [
        error_details_pb2.ErrorInfo(domain=DOMAIN, reason=error.reason, metadata=error.metadata),
    ]
    if error.fields:
        violations = [
            error_details_pb2.BadRequest.FieldViolation(field=field, description=description)
            for field, description in error.fields.items()
        ]
        details.append(error_details_pb2.BadRequest(field_violations=violations))
    if error.retry_after is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromTimedelta(timedelta(seconds=error.retry_after))
        details.append(retry)
    status = status_pb2.Status(code=status_code(error).value[0], message=error.message)
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    return status


class RemoteError(Exception):
    """The error of a failed call. `reason` is empty if gRPC itself failed, or for a server of another project."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.reason = ""
        self.fields: dict[str, str] = {}
        self.metadata: dict[str, str] = {}
        self.retry_after: float | None = None

    def __str__(self) -> str:
        return f"{self.reason or self.code.name}: {self.message}"


class PassedOnError(ServiceError):
    """Passes another server's error on to a caller of this server, with the original code and reason.

    An error without a reason gets the reason UNEXPECTED.
    """

    code = grpc.StatusCode.INTERNAL
    reason = "PASSED_ON"

    def __init__(self, cause: RemoteError) -> None:
        super().__init__(cause.message, fields=cause.fields, metadata=cause.metadata, retry_after=cause.retry_after)
        self.reason = cause.reason or UnexpectedError.reason  # type: ignore[misc]
        self.code = cause.code


def from_status(status: status_pb2.Status) -> RemoteError:
    """Converts a status from a message to an error."""
    remote = RemoteError(_CODES.get(status.code, grpc.StatusCode.UNKNOWN), status.message)
    _read_details(remote, status)
    return remote


def from_rpc_error(error: grpc.RpcError) -> RemoteError:
    """Converts the status and details of a failed call, sync or aio, to an error."""
    call: Any = error
    remote = RemoteError(call.code(), call.details() or "")
    for key, value in call.trailing_metadata() or ():
        if key == _DETAILS_KEY:
            status = status_pb2.Status.FromString(value)
            remote.code = _CODES.get(status.code, remote.code)
            _read_details(remote, status)
    return remote


def _read_details(remote: RemoteError, status: status_pb2.Status) -> None:
    info, bad, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
    for detail in status.details:
        if detail.Unpack(info):
            remote.reason = info.reason
            remote.metadata = dict(info.metadata)
        elif detail.Unpack(bad):
            remote.fields = {violation.field: violation.description for violation in bad.field_violations}
        elif detail.Unpack(retry):
            remote.retry_after = retry.retry_delay.ToTimedelta().total_seconds()
