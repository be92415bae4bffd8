"""Bearer tokens: a file of their identities, by hash. `python -m protos.rpc.tokens new` makes a token.

The file has a JSON object per line; empty lines and lines that begin with # are comments. A changed file is read
again.
"""

import argparse
import hashlib
import hmac
import json
import secrets
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Self

from pydantic import AwareDatetime, BaseModel, ConfigDict, StringConstraints, ValidationError, model_validator

from protos.rpc.files import Reloaded, read_secret
from protos.rpc.identity import Identity, Role, UnauthenticatedError

# A prefix, for scanners that look for secrets in files.
_PREFIX = "kvk_"
_TOKEN_BYTES = 32
# Longer values are refused without hashing.
_MAX_TOKEN = 256

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
Tenant = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{0,64}$")]
Salt = Annotated[str, StringConstraints(min_length=1, max_length=128)]
Id = Annotated[str, StringConstraints(min_length=1, max_length=256)]
Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


# Roles of processes that the cache manager knows by id.
_PROCESSES = (Role.SCHEDULER, Role.EXECUTOR)


class Entry(BaseModel):
    """A line of the file. `expires`: with a time zone."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Name
    role: Role
    tenant: Tenant = ""
    salts: tuple[Salt, ...] = ()
    ids: tuple[Id, ...] = ()
    expires: AwareDatetime | None = None
    sha256: Digest

    @model_validator(mode="after")
    def _check_role(self) -> Self:
        if self.role is Role.CALLER and not self.tenant:
            raise ValueError("a caller needs a tenant")
        if self.role in _PROCESSES and self.tenant:
            raise ValueError(f"the role {self.role} has no tenant")
        if self.salts and self.role is not Role.CALLER:
            raise ValueError("only a caller has salts")
        if self.ids and self.role not in _PROCESSES:
            raise ValueError("only a scheduler or an executor has ids")
        return self

    @property
    def identity(self) -> Identity:
        """The identity of the token."""
        return Identity(self.name, self.role, self.tenant, self.salts, self.ids)


class Tokens:
    """The known tokens. Raises ValueError and OSError when the file cannot be used."""

    def __init__(self, path: Path) -> None:
        self._entries = Reloaded((path,), lambda: _read(path))

    def identify(self, authorization: str) -> Identity:
        """The identity of an Authorization header, "Bearer TOKEN". Raises UnauthenticatedError."""
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() != "bearer" or not token or len(token) > _MAX_TOKEN:
            raise UnauthenticatedError
        digest = _digest(token)
        found = None
        # All entries are compared, each as a whole, so that the time does not depend on the tokens.
        for entry in self._entries.get():
            if hmac.compare_digest(entry.sha256, digest):
                found = entry
        if found is None or (found.expires is not None and found.expires <= datetime.now(UTC)):
            raise UnauthenticatedError
        return found.identity


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode(errors="replace")).hexdigest()


def _read(path: Path) -> list[Entry]:
    """Reads the entries of a file. Errors never quote the file."""
    entries: list[Entry] = []
    for number, line in enumerate(read_secret(path).splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            entry = Entry.model_validate_json(line)
        except ValidationError as error:
            fault = error.errors(include_input=False, include_url=False)[0]
            where = ".".join(map(str, fault["loc"]))
            what = fault["msg"] if fault["type"] != "json_invalid" else "is no JSON object"
            raise ValueError(f"{path}, line {number}: {where + ': ' if where else ''}{what}") from None
        for other in entries:
            for field in ("name", "sha256"):
                if getattr(other, field) == getattr(entry, field):
                    raise ValueError(f"{path}, line {number}: {field}: is that of another line")
            if entry.role is other.role and entry.role in _PROCESSES and not (entry.ids and other.ids):
                # Otherwise, the holder of one token could register as another token's process.
                raise ValueError(
                    f"{path}, line {number}: ids: are needed where several tokens have the role {entry.role}"
                )
        entries.append(entry)
    return entries


def new(
    role: Role,
    tenant: str,
    salts: tuple[str, ...] = (),
    lifetime: timedelta | None = None,
    name: str = "",
    ids: tuple[str, ...] = (),
) -> tuple[str, Entry]:
    """Makes a token and its line for the file. Raises ValidationError."""
    token = _PREFIX + secrets.token_urlsafe(_TOKEN_BYTES)
    expires = None if lifetime is None else (datetime.now(UTC) + lifetime).replace(microsecond=0)
    name = name or f"{tenant or role}-{secrets.token_hex(3)}"
    digest = _digest(token)
    return token, Entry(name=name, role=role, tenant=tenant, salts=salts, ids=ids, expires=expires, sha256=digest)


def main() -> int:
    """Makes a token, which is shown only this once."""
    parser = argparse.ArgumentParser(prog="python -m protos.rpc.tokens", description="Makes bearer tokens.")
    make = parser.add_subparsers(required=True).add_parser("new", help="make a token and its line for the tokens file")
    make.add_argument("--role", required=True, choices=[role.value for role in Role])
    make.add_argument("--tenant", default="", help="tenant of a caller's, operator's or viewer's token")
    make.add_argument("--salt", action="append", default=[], help="a salt that a caller may name; default: all salts")
    make.add_argument("--id", action="append", default=[], help="an id of the executor or scheduler; default: any id")
    make.add_argument("--days", type=float, help="days until the token expires; default: never")
    make.add_argument("--name", default="", help="the token's name in logs; default: a random name")
    asked = parser.parse_args()
    lifetime = None if asked.days is None else timedelta(days=asked.days)
    try:
        token, entry = new(Role(asked.role), asked.tenant, tuple(asked.salt), lifetime, asked.name, tuple(asked.id))
    except ValidationError as error:
        faults = error.errors(include_url=False)
        sys.exit("; ".join(f"{''.join(map(str, fault['loc'][:1]))} {fault['msg']}".strip() for fault in faults))
    # The token can be piped into a file; the other text is for people.
    sys.stdout.write(f"{token}\n")
    line = json.dumps(entry.model_dump(mode="json", exclude_defaults=True))
    sys.stderr.write(f"The token is shown this once. The line for KVKEEP_TOKENS_FILE:\n{line}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
