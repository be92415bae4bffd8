"""Errors in OpenAI's shape, made from errors of the service and of the framework."""

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

import grpc
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
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
# An error suggests a path with at least this similarity to an unknown path: 0..1, as difflib measures it.
_CLOSE_PATH = 0.7
# Most characters of a path that an error shows and compares.
_SHOWN_CHARACTERS = 128
# By a missing field: a field that a caller may have sent instead, and the path to which that field belongs.
_ELSEWHERE = {"messages": ("prompt", "/v1/completions"), "prompt": ("messages", "/v1/chat/completions")}
# Kinds of pydantic errors about a value that is not an object.
_NO_OBJECT = ("dict_type", "model_attributes_type", "model_type")
# The framework's words for a wrong value, and our replacements.
_SUBJECT = re.compile(r"^(?:Input|List|Dictionary|String) should ")
_WORDS = (("greater than or equal to", "at least"), ("less than or equal to", "at most"))
# Why the framework cannot read a body, by its parser's error.
_UNREADABLE: Mapping[type[BaseException], str] = {
    UnicodeDecodeError: "the text is not UTF-8",
    RecursionError: "its values are nested too deeply",
    ValueError: "a number has too many digits",
}
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class ErrorBody(TypedDict):
    """An error. param: the invalid field, such as "messages[0].role". code: for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(TypedDict):
    """Every answer with a status of 400 and more, and the last event of a stream that failed."""

    error: ErrorBody


class FieldError(InvalidField):
    """An invalid field under its name in the request."""


class ApiError(Exception):
    """An error with its status. retry_after: in seconds."""

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
        """The error's reason in the access log and the metrics."""
        return (self.body["error"]["code"] or "").upper()

    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, self.headers)


def from_service(error: ServiceError, names: Sequence[tuple[str, str]] = ()) -> ApiError:
    """Converts an error of the service. names: fields of messages and their names over HTTP, most specific first."""
    param, message = None, error.message
    for field in error.fields:
        renamed = field if isinstance(error, FieldError) else rename(field, names)
        message = message.replace(field, renamed, 1)
        param = param or renamed
    status = _STATUSES.get(status_code(error), 500)
    return ApiError(status, message, param=param, code=error.reason.lower(), retry_after=error.retry_after)


def rename(field: str, names: Sequence[tuple[str, str]]) -> str:
    """Returns a field's path under its HTTP name."""
    for ours, theirs in names:
        rest = field.removeprefix(ours)
        # Only whole parts of a path match: chat is no prefix of chat_template.
        if field.startswith(ours) and (ours.endswith((".", "_")) or rest[:1] in ("", ".", "[")):
            # Fields of a range and of a structural tag have short names over HTTP.
            return (theirs + rest).replace("].retention_", "].").replace("].json_schema", "].schema")
    return field


def from_validation(error: RequestValidationError) -> ApiError:
    """Converts the first error of an invalid body. Values that the caller sent are never repeated."""
    first: dict[str, Any] = error.errors()[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first['ctx']['error']}", code="invalid_json")
    param = _param(first["loc"][1:])
    if not param and first["type"] != "value_error":
        return ApiError(400, "the body must be a JSON object, with Content-Type: application/json", code="invalid_body")
    said = f"{param or 'the body'} {_said(first, param)}"
    return ApiError(400, said, param=param or None, code="invalid_field")


def _said(error: Mapping[str, Any], param: str) -> str:
    """Returns what is wrong with a field, as it follows the field's name."""
    if error["type"] == "missing":
        sent, route = _ELSEWHERE.get(param, ("", ""))
        return f"is missing: {sent} belongs to {route}" if sent and sent in error["input"] else "is missing"
    if error["type"] in _NO_OBJECT:
        return "must be an object"
    said = _SUBJECT.sub("must ", str(error["msg"]).removeprefix("Value error, "))
    for theirs, ours in _WORDS:
        said = said.replace(theirs, ours)
    return f"{said[:1].lower()}{said[1:]}"


def _param(path: Sequence[str | int]) -> str:
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).removeprefix(".")


def from_http(error: HTTPException, request: Request, routes: Sequence[APIRoute]) -> ApiError:
    """Converts errors of the framework and of BodyLimits: of the path, the method or the body. routes: of the API."""
    code = HTTPStatus(error.status_code).phrase.lower().replace(" ", "_")
    message, headers = error.detail, dict(error.headers or {})
    if error.status_code == HTTPStatus.NOT_FOUND:
        message = _no_path(request, routes)
    elif error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        # The framework names the methods of the first route only.
        found = [route for route in routes if route.path_regex.match(request.scope["path"])]
        allowed = {method for route in found for method in route.methods or ()}
        headers["Allow"] = ", ".join(sorted(allowed))
        message = f"this path takes {' and '.join(sorted(allowed))} only"
    elif error.status_code == HTTPStatus.BAD_REQUEST and error.__cause__ is not None:
        cause = _UNREADABLE.get(type(error.__cause__), "it cannot be read")
        message, code = f"the body cannot be taken: {cause}", "invalid_json"
    return ApiError(error.status_code, message, code=code, headers=headers)


def _no_path(request: Request, routes: Sequence[APIRoute]) -> str:
    # As it was sent: a decoded path may hold any character.
    path = request.scope["raw_path"].decode("ascii", "backslashreplace").partition("?")[0][:_SHOWN_CHARACTERS]
    paths = {route.path for route in routes if "{" not in route.path}
    close = difflib.get_close_matches(path, sorted(paths), n=1, cutoff=_CLOSE_PATH)
    hint = f"did you mean {close[0]}?" if close else "/openapi.json lists what there is"
    return f"there is no {path} here: {hint}"


def unexpected() -> ApiError:
    """Returns the error for a defect of the server."""
    return from_service(UnexpectedError("internal error of the server: see the log of the server"))
