"""The identity of a caller: a role and, where a token has one, a tenant with salts and sessions of its own."""

from __future__ import annotations

import enum
from contextvars import ContextVar
from dataclasses import dataclass

import grpc

from protos.errors import InvalidField, ServiceError

# Of a call's metadata, and as a header of HTTP.
AUTHORIZATION_KEY = "authorization"
# Longest salt, tenant or session in bytes, also once it is bound to a tenant.
MAX_NAME_BYTES = 256
# No tenant's name has it, so that no two tenants' names run together.
_SEPARATOR = "/"


class Role(enum.StrEnum):
    """The role of a token."""

    CALLER = "caller"
    ROUTER = "router"
    SCHEDULER = "scheduler"
    EXECUTOR = "executor"
    OPERATOR = "operator"
    VIEWER = "viewer"


class UnauthenticatedError(ServiceError):
    """There is no token, or none that is known. Which of these is not said."""

    code = grpc.StatusCode.UNAUTHENTICATED
    reason = "UNAUTHENTICATED"

    def __init__(self) -> None:
        super().__init__("a valid token is needed: authorization: Bearer TOKEN")


class PermissionDeniedError(ServiceError):
    """The token is valid and not for this."""

    code = grpc.StatusCode.PERMISSION_DENIED
    reason = "PERMISSION_DENIED"


@dataclass(frozen=True, slots=True)
class Identity:
    """The identity of a token. `name` is the token's in logs; no tenant means all of them.

    `salts` are the only ones that a caller may name, all for none; `ids` are the only executors or schedulers that a
    token of these roles may speak as, any for none.
    """

    name: str
    role: Role
    tenant: str = ""
    salts: tuple[str, ...] = ()
    ids: tuple[str, ...] = ()

    def check_id(self, given: str, field: str) -> None:
        """Raises PermissionDeniedError where an executor or a scheduler speaks as another of its kind."""
        if self.ids and given not in self.ids:
            raise PermissionDeniedError(
                f"the token is of another {self.role}", fields={field: "is not one of the token's ids"}
            )

    def bound_salt(self, salt: str | None, field: str = "cache.salt") -> str | None:
        """The salt that the cache is asked with instead of the one given: without a tenant it is the same.

        Raises InvalidField for one that is too long, PermissionDeniedError for one that the token does not have.
        """
        if self.salts:
            salt = self.salts[0] if salt is None else salt
            if salt not in self.salts:
                raise PermissionDeniedError(
                    "the token may not use this salt", fields={field: "is not one of the token's"}
                )
        return self.bound_name(salt, field) if salt is not None else self.tenant or None

    def bound_name(self, name: str, field: str) -> str:
        """A salt, session or request of the tenant, by a name that no other tenant can give. Raises InvalidField."""
        if not self.tenant:
            return name
        if not name:
            raise InvalidField(field, "must not be empty when given")
        bound = f"{self.tenant}{_SEPARATOR}{name}"
        if len(bound.encode()) > MAX_NAME_BYTES:
            most = MAX_NAME_BYTES - len(self.tenant) - len(_SEPARATOR)
            raise InvalidField(field, f"has more than {most} bytes")
        return bound

    def owns(self, bound: str | None) -> bool:
        """Whether a bound salt or session belongs to the tenant; all do without one."""
        if not self.tenant:
            return True
        return bound is not None and (bound == self.tenant or bound.startswith(self.tenant + _SEPARATOR))


_current: ContextVar[Identity | None] = ContextVar("identity", default=None)


def current() -> Identity | None:
    """The identity of the call being served; None where no tokens are needed."""
    return _current.get()


def assume(identity: Identity | None) -> None:
    """Sets the identity of this call, for the rest of its task."""
    _current.set(identity)
