"""The errors that services raise instead of an answer. `protos.rpc.errors` maps an error's reason to its status."""

from collections.abc import Mapping
from typing import ClassVar


class ServiceError(Exception):
    """Base of every service's error tree. A subclass sets the reason that callers see.

    `fields` maps the path of a request's field to its fault; `metadata` is for programs; `retry_after` is in
    seconds.
    """

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
    """One field of the request has a value that can never be valid."""

    reason = "INVALID_FIELD"

    def __init__(self, field: str, description: str) -> None:
        super().__init__(f"{field} {description}", fields={field: description})
