"""Tokens of a test."""

from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from protos.rpc import tokens
from protos.rpc.identity import Role
from protos.rpc.security import PLAIN, Security

TENANT = {Role.CALLER: "acme"}


class Keyring:
    """A tokens file, and a file with the token of each role."""

    def __init__(self, folder: Path, security: Security = PLAIN) -> None:
        """security: of callers, in addition to a token."""
        self.folder, self.file, self.tokens = folder, folder / "tokens", dict[str, str]()
        self._security = security
        self.file.touch(mode=0o600)

    def add(
        self,
        role: Role,
        tenant: str = "",
        lifetime: timedelta | None = None,
        salts: tuple[str, ...] = (),
        ids: tuple[str, ...] = (),
    ) -> Security:
        """A new token; settings of a process that shows it."""
        token, entry = tokens.new(role, tenant or TENANT.get(role, ""), salts, lifetime, ids=ids)
        with self.file.open("a") as file:
            file.write(entry.model_dump_json() + "\n")
        path = self.folder / entry.name
        path.touch(mode=0o600)
        path.write_text(token)
        self.tokens[entry.name] = token
        return replace(self._security, token_file=path)
