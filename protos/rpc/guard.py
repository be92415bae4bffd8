"""Decides about every call: its identity, whether the role may make it, and whether it is in the audit log."""

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from protos.rpc.audit import Audit
from protos.rpc.identity import AUTHORIZATION_KEY, Identity, PermissionDeniedError, UnauthenticatedError
from protos.rpc.roles import is_audited, is_whole, roles_of
from protos.rpc.tokens import Tokens

# How often the tokens of running calls are checked.
LOOK_SECONDS = 1.0


class Guard:
    """One per process: a server asks it before each call, HTTP too. Without a tokens file, every call is allowed.

    Raises ValueError and OSError if the tokens file cannot be used.
    """

    def __init__(self, tokens_file: Path | None, audit_file: Path | None) -> None:
        self._tokens = None if tokens_file is None else Tokens(tokens_file)
        self._running = _RunningCalls(self._tokens.identify) if self._tokens is not None else None
        self._audits = tokens_file is not None or audit_file is not None
        self.audit = Audit(audit_file)

    def identify(self, authorization: str) -> Identity | None:
        """The identity of an Authorization header (empty for none); None if no tokens are needed.

        Raises UnauthenticatedError.
        """
        return None if self._tokens is None else self._tokens.identify(authorization)

    def allow(self, identity: Identity | None, *methods: str) -> None:
        """Raises PermissionDeniedError if role or tenant may call none of these "package.Service/Method"."""
        if identity is None:
            return
        allowed = [method for method in methods if identity.role in roles_of(method)]
        if not allowed:
            raise PermissionDeniedError("the role of this token may not call this method")
        if identity.tenant and all(map(is_whole, allowed)):
            raise PermissionDeniedError("this method concerns all tenants, but the token belongs to one tenant")

    def cancel_if_revoked(self, authorization: str, identity: Identity | None) -> AbstractContextManager[None]:
        """Wraps a task's work for a token: UnauthenticatedError leaves the block if the token is revoked."""
        if self._running is None or identity is None:
            return contextlib.nullcontext()
        return self._running.cancel_if_revoked(authorization, identity)

    def audits(self, method: str) -> bool:
        """Whether calls of a method leave a line in the audit log."""
        return self._audits and is_audited(method)


def header(metadata: Iterable[tuple[str, Any]]) -> str:
    """The Authorization header of a gRPC call; empty if there is none or more than one."""
    sent = [value for key, value in metadata if key == AUTHORIZATION_KEY and isinstance(value, str)]
    return sent[0] if len(sent) == 1 else ""


class _Call:
    """A running call, in its task."""

    def __init__(self, task: asyncio.Task[object]) -> None:
        self.task = task
        self.is_revoked = False


class _RunningCalls:
    """Running calls by token; ends calls whose token is removed, changed or expired."""

    def __init__(self, identify: Callable[[str], Identity]) -> None:
        """identify: returns the identity of an Authorization header; raises UnauthenticatedError."""
        self._identify = identify
        self._calls: dict[tuple[str, Identity], set[_Call]] = {}
        self._timer: asyncio.TimerHandle | None = None

    @contextlib.contextmanager
    def cancel_if_revoked(self, authorization: str, identity: Identity) -> Iterator[None]:
        """Cancels the task in the block once the header has a different identity or none.

        UnauthenticatedError then leaves the block.
        """
        task = asyncio.current_task()
        assert task is not None
        call, cancelling = _Call(task), task.cancelling()
        calls = self._calls.setdefault((authorization, identity), set())
        calls.add(call)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LOOK_SECONDS, self._check)
        try:
            yield
        except asyncio.CancelledError:
            # Unless it was also cancelled for a different reason.
            if call.is_revoked and task.uncancel() <= cancelling:
                raise UnauthenticatedError from None
            raise
        finally:
            calls.remove(call)
            if not calls:
                self._calls.pop((authorization, identity), None)

    def _check(self) -> None:
        self._timer = None
        for (authorization, identity), calls in self._calls.items():
            if not self._is_valid(authorization, identity):
                for call in calls:
                    if not call.is_revoked:
                        call.is_revoked = True
                        call.task.cancel()
        if self._calls:
            self._timer = asyncio.get_running_loop().call_later(LOOK_SECONDS, self._check)

    def _is_valid(self, authorization: str, identity: Identity) -> bool:
        try:
            return self._identify(authorization) == identity
        except UnauthenticatedError:
            return False
