"""Exit statuses, and errors in one line."""

import re
from enum import IntEnum

import grpc

from protos.rpc.errors import RemoteError


class Status(IntEnum):
    """Exit statuses; `kvctl --help` lists all but BROKEN_PIPE."""

    OK = 0
    FOUND = 1
    USAGE = 2
    UNREACHABLE = 3
    REFUSED = 4
    FAULT = 5
    INTERRUPTED = 130
    # The status of a process that SIGPIPE ends.
    BROKEN_PIPE = 141


EXIT_STATUSES = (
    "Exit status: 0 done; 1 something wrong was found; 2 wrong usage, or a value that is never right; "
    "3 a service cannot be reached or answers too late; 4 refused, not found, or not confirmed; "
    "5 a fault of a service; 130 interrupted."
)

_STATUSES = {
    grpc.StatusCode.UNAVAILABLE: Status.UNREACHABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED: Status.UNREACHABLE,
    grpc.StatusCode.INVALID_ARGUMENT: Status.USAGE,
    grpc.StatusCode.INTERNAL: Status.FAULT,
    grpc.StatusCode.UNKNOWN: Status.FAULT,
    grpc.StatusCode.DATA_LOSS: Status.FAULT,
    grpc.StatusCode.UNIMPLEMENTED: Status.FAULT,
}

# gRPC's message about a server that answers in HTTP/1.
_OTHER_PROTOCOL = re.compile(r"http1\.x|HTTP/2")


class CommandError(Exception):
    """A command has failed; the message is one line for people.

    is_missing: whether the error says that the requested object does not exist. is_denied: whether the error says that
    the caller needs another token.
    """

    def __init__(self, message: str, status: Status, *, is_missing: bool = False, is_denied: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.is_missing = is_missing
        self.is_denied = is_denied


def command_error(error: RemoteError, address: str) -> CommandError:
    """The error of a failed call, for people. address: of the called server, or several addresses in words."""
    status = _STATUSES.get(error.code, Status.REFUSED)
    if error.code is grpc.StatusCode.UNAVAILABLE and not error.reason:
        if _OTHER_PROTOCOL.search(error.message):
            return CommandError(f"{address} does not speak gRPC: is it an address for HTTP or metrics?", status)
        return CommandError(f"no answer at {address}: is the stack running?", status)
    if error.code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return CommandError(f"{address} did not answer in time (--timeout)", status)
    message, is_missing = error.message or error.code.name, error.code is grpc.StatusCode.NOT_FOUND
    # The message names the kind of a missing thing already.
    unnamed = [] if is_missing else [field for field in error.fields if field not in message]
    message = f"{', '.join(unnamed)}: {message}" if unnamed else message
    is_denied = error.code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
    return CommandError(message, status, is_missing=is_missing, is_denied=is_denied)
