"""The identity of a caller: a role and, if the token has one, a tenant with separate salts and sessions."""

from __future__ import annotations

import enum
from contextvars import ContextVar
from dataclasses import dataclass

import grpc

from protos.errors import InvalidField, ServiceError

# The key in a call's metadata, and the HTTP header.
AUTHORIZATION_KEY = "authorization"
# The limit in bytes on a salt, tenant or session, even once bound to a tenant.
MAX_NAME_BYTES = 256
# No tenant's name contains it, so that names of two tenants are never equal.
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
    """There is no token, or it is unknown; callers do not learn which."""

    code = grpc.StatusCode.UNAUTHENTICATED
    reason = "UNAUTHENTICATED"

    def __init__(self) -> None:
        super().__init__("a valid token is needed: authorization: Bearer TOKEN")


class PermissionDeniedError(ServiceError):
    """The token is valid, but does not allow this."""

    code = grpc.StatusCode.PERMISSION_DENIED
    reason = "PERMISSION_DENIED"


@dataclass(frozen=True, slots=True)
class Identity:
    """The identity of a token. `name` is the token's name in logs; no tenant means all tenants.

    `salts` are the only salts that a caller may name; `ids` are the only executors or schedulers as which a token of
    these roles may speak. If empty, all are allowed.
    """

    name: str
    role: Role
    tenant: str = ""
    salts: tuple[str, ...] = ()
    ids: tuple[str, ...] = ()

    def check_id(self, given: str, field: str) -> None:
        """Raises PermissionDeniedError if an executor or scheduler uses another's id."""
        if self.ids and given not in self.ids:
            raise PermissionDeniedError(
                f"the token is of another {self.role}", fields={field: "is not one of the token's ids"}
            )

    def bound_salt(self, salt: str | None, field: str = "cache.salt") -> str | None:
        """The salt that the cache gets instead of the given salt; without a tenant, it is the same.

        For None, the token's first salt, else the tenant's name, else None. Raises InvalidField if the salt is empty or
        too long, and PermissionDeniedError if the token does not have it.
        """
        if self.salts:
            salt = self.salts[0] if salt is None else salt
            if salt not in self.salts:
                raise PermissionDeniedError(
                    "the token may not use this salt", fields={field: "is not one of the token's"}
                )
        return self.bound_name(salt, field) if salt is not None else self.tenant or None

    def bound_name(self, name: str, field: str) -> str:
        """A name for the tenant's salt, session or request that no other tenant can produce. Raises InvalidField."""
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
        """Whether a bound salt or session belongs to the tenant; without a tenant, all do."""
        if not self.tenant:
            return True
        return bound is not None and (bound == self.tenant or bound.startswith(self.tenant + _SEPARATOR))


_current: ContextVar[Identity | None] = ContextVar("identity", default=None)


def current() -> Identity | None:
    """The identity of the call being served; None if the call needs no token."""
    return _current.get()


def assume(identity: Identity | None) -> None:
    """Sets the identity of the current call, for the rest of its task."""
    _current.set(identity)
