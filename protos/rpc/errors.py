"""Errors that cross a process border: one base class, one mapping to statuses, and the way back on the client."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, ClassVar

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

DOMAIN = "kvkeep"

_DETAILS_KEY = "grpc-status-details-bin"
_CODES = {code.value[0]: code for code in grpc.StatusCode}


class ServiceError(Exception):
    """Base of every service's error tree. A subclass says which status and reason its callers see.

    `fields` maps the path of a request's field to what is wrong with it; `metadata` is for programs; `retry_after`
    is in seconds.
    """

    code: ClassVar[grpc.StatusCode]
    reason: ClassVar[str]

    def __init__(
        self,
        message: str,
        *,
        fields: Mapping[str, str] | None = None,
        metadata: Mapping[str, str] | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.fields = dict(fields or {})
        self.metadata = dict(metadata or {})
        self.retry_after = retry_after


class InvalidField(ServiceError):  # noqa: N818 - reads as a sentence where it is raised
    """One field of the request has a value that is never right."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    reason = "INVALID_FIELD"

    def __init__(self, field: str, description: str) -> None:
        super().__init__(f"{field} {description}", fields={field: description})


class MalformedMessageError(ServiceError):
    """The bytes of the request are not a message of its type."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    reason = "MALFORMED_MESSAGE"


class UnexpectedError(ServiceError):
    """A bug of ours; what it was is in the server's log only."""

    code = grpc.StatusCode.INTERNAL
    reason = "UNEXPECTED"


def to_status(error: ServiceError) -> Any:
    """The error as a google.rpc.Status with ErrorInfo and, where they apply, BadRequest and RetryInfo."""
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
    status = status_pb2.Status(code=error.code.value[0], message=error.message)
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    return status


class RemoteError(Exception):
    """What a server answered instead of a result. `reason` is empty when the server is not one of ours."""

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


def from_rpc_error(error: grpc.RpcError) -> RemoteError:
    """Reads the status and its details from a failed call, sync or aio."""
    call: Any = error
    remote = RemoteError(call.code(), call.details() or "")
    for key, value in call.trailing_metadata() or ():
        if key == _DETAILS_KEY:
            _read_details(remote, value)
    return remote


def _read_details(remote: RemoteError, serialized: bytes) -> None:
    status = status_pb2.Status.FromString(serialized)
    remote.code = _CODES.get(status.code, remote.code)
    info, bad, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
    for detail in status.details:
        if detail.Unpack(info):
            remote.reason = info.reason
            remote.metadata = dict(info.metadata)
        elif detail.Unpack(bad):
            remote.fields = {violation.field: violation.description for violation in bad.field_violations}
        elif detail.Unpack(retry):
            remote.retry_after = retry.retry_delay.ToTimedelta().total_seconds()
