"""Every error in OpenAI's shape: one mapping from the errors of the service, and one of the framework's own."""

import math
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

import grpc
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from typing_extensions import TypedDict

from protos.rpc.errors import InvalidField, ServiceError, UnexpectedError, status_code

_STATUSES = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.OUT_OF_RANGE: 400,
    grpc.StatusCode.FAILED_PRECONDITION: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.ALREADY_EXISTS: 409,
    grpc.StatusCode.ABORTED: 409,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.UNIMPLEMENTED: 501,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class ErrorBody(TypedDict):
    """What went wrong. param: the field at fault, such as "messages[0].role". code: for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(TypedDict):
    """Every answer with a status of 400 and more, and the last event of a stream that failed."""

    error: ErrorBody


class FieldError(InvalidField):
    """A field of a request, under the name that the request has for it."""


class ApiError(Exception):
    """An error as a caller sees it. retry_after: in seconds."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})
        if retry_after is not None:
            self.headers["Retry-After"] = str(math.ceil(retry_after))
        kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
        self.body: ErrorAnswer = {"error": {"message": message, "type": kind, "param": param, "code": code}}

    @property
    def reason(self) -> str:
        """As the access log and the metrics have it."""
        return (self.body["error"]["code"] or "").upper()

    def response(self) -> JSONResponse:
        """The answer."""
        return JSONResponse(self.body, self.status, self.headers)


def from_service(error: ServiceError, names: Sequence[tuple[str, str]] = ()) -> ApiError:
    """An error of the service. names: what fields of its messages are called in the request, most special first."""
    param, message = None, error.message
    for field in error.fields:
        renamed = field if isinstance(error, FieldError) else rename(field, names)
        message = message.replace(field, renamed, 1)
        param = param or renamed
    status = _STATUSES.get(status_code(error), 500)
    return ApiError(status, message, param=param, code=error.reason.lower(), retry_after=error.retry_after)


def rename(field: str, names: Sequence[tuple[str, str]]) -> str:
    """A field's path with what it begins with replaced where that is called otherwise over HTTP."""
    for ours, theirs in names:
        rest = field.removeprefix(ours)
        # Whole parts of a path: chat_template is no part of chat.
        if field.startswith(ours) and (ours.endswith((".", "_")) or rest[:1] in ("", ".", "[")):
            # Wishes have short names, but for the range that they stand in.
            return (theirs + rest).replace("].retention_", "].")
    return field


def from_validation(error: RequestValidationError) -> ApiError:
    """A body that is no request; of several faults the first. What the caller sent is never repeated."""
    first: dict[str, Any] = error.errors()[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first['ctx']['error']}", code="invalid_json")
    param = _param(first["loc"][1:])
    if not param and first["type"] != "value_error":
        return ApiError(400, "the body must be a JSON object, with Content-Type: application/json", code="invalid_body")
    if first["type"] == "missing":
        return ApiError(400, f"{param} is missing", param=param, code="invalid_field")
    said = str(first["msg"]).removeprefix("Value error, ").removeprefix("Input ")
    said = f"{param or 'the body'} {said[:1].lower()}{said[1:]}"
    return ApiError(400, said, param=param or None, code="invalid_field")


def _param(path: Sequence[str | int]) -> str:
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).removeprefix(".")


def from_http(error: HTTPException) -> ApiError:
    """No such path, a wrong method, a body that is too long."""
    code = HTTPStatus(error.status_code).phrase.lower().replace(" ", "_")
    return ApiError(error.status_code, error.detail, code=code, headers=error.headers)


def unexpected() -> ApiError:
    """A bug of ours."""
    return from_service(UnexpectedError("the server met an error of its own; its log says which"))
