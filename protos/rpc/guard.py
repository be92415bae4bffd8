"""Decides about every call: who makes it, whether the role may, and what is written down."""

import contextlib
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from protos.rpc.audit import Audit
from protos.rpc.authorized import AUTHORIZATION_KEY
from protos.rpc.identity import Identity, PermissionDeniedError
from protos.rpc.revocation import Holders
from protos.rpc.roles import is_audited, is_whole, roles_of
from protos.rpc.tokens import Tokens


class Guard:
    """One per process: a server asks it before each call, HTTP too. Without a tokens file everybody may do everything.

    Raises ValueError and OSError when the tokens file cannot be used.
    """

    def __init__(self, tokens_file: Path | None, audit_file: Path | None) -> None:
        self._tokens = None if tokens_file is None else Tokens(tokens_file)
        self._holders = Holders(self._tokens.identify) if self._tokens is not None else None
        self._audits = tokens_file is not None or audit_file is not None
        self.audit = Audit(audit_file)

    def identify(self, authorization: str) -> Identity | None:
        """Who sends this value of an Authorization header, empty for none; None where no tokens are needed.

        Raises UnauthenticatedError.
        """
        return None if self._tokens is None else self._tokens.identify(authorization)

    def allow(self, identity: Identity | None, method: str) -> None:
        """Raises PermissionDeniedError where role or tenant may not call "package.Service/Method"."""
        if identity is None:
            return
        if identity.role not in roles_of(method):
            raise PermissionDeniedError("the role of this token may not call this method")
        if identity.tenant and is_whole(method):
            raise PermissionDeniedError("this method is about all tenants, and the token about one")

    def holding(self, authorization: str, identity: Identity | None) -> AbstractContextManager[None]:
        """Around what a task does for somebody: UnauthenticatedError leaves the block when the token holds no more."""
        if self._holders is None or identity is None:
            return contextlib.nullcontext()
        return self._holders.holding(authorization, identity)

    def audits(self, method: str) -> bool:
        """Whether calls of a method leave a line."""
        return self._audits and is_audited(method)


def header(metadata: Iterable[tuple[str, Any]]) -> str:
    """The Authorization header of a gRPC call; empty where there is none or more than one."""
    sent = [value for key, value in metadata if key == AUTHORIZATION_KEY and isinstance(value, str)]
    return sent[0] if len(sent) == 1 else ""
