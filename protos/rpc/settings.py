"""Settings: one frozen object per process, read once from the environment.

Shared settings are variables KVKEEP_<NAME>; a process's own settings are KVKEEP_<PROCESS>_<NAME>, which also override
a shared setting for one process. An unknown variable is an error, so that a typo never passes silently. Variables that
begin with the name of another process are left to that process.
"""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import fields
from functools import cached_property
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self, TypeVar
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from protos.rpc import addresses
from protos.rpc.security import Security

PREFIX = "KVKEEP_"
PROCESSES = ("scheduler", "cachemgr", "executor", "console", "router")
# Default metrics addresses under `make run-stack`; a process that is started alone serves no metrics by default.
STACK_METRICS = {
    "scheduler": "127.0.0.1:9101",
    "cachemgr": "127.0.0.1:9102",
    "executor": "127.0.0.1:9103",
    "router": "127.0.0.1:9104",
}

Address = Annotated[str, AfterValidator(addresses.validate)]


def _validate_metrics(address: str) -> str:
    if address:
        if addresses.socket_path(address) is not None:
            raise ValueError("must be host:port")
        addresses.split_host_port(address)
    return address


MetricsAddress = Annotated[str, AfterValidator(_validate_metrics)]


OptionalPath = Annotated[Path | None, BeforeValidator(lambda value: value or None)]

# The minimum similarity, from 0 to 1, of a name that is suggested.
_CLOSE = 0.65

_CLUSTER_SCHEMES = {"redis+cluster": "redis", "rediss+cluster": "rediss"}


def cluster_nodes(url: str) -> tuple[str, list[tuple[str, int]]]:
    """Returns the URL of a Redis cluster's first node, and all nodes that the URL names; no nodes if it is no cluster.

    Raises ValueError, which never quotes the URL, as it may contain a password.
    """
    scheme, _, rest = url.partition("://")
    if scheme not in _CLUSTER_SCHEMES:
        return url, []
    place, mark, query = rest.partition("?")
    user, at, hosts = place.rpartition("@")
    nodes = []
    for node in hosts.rstrip("/").split(","):
        host, _, port = node.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise ValueError("must name the nodes of a cluster as host:port,host:port")
        nodes.append((host.strip("[]"), int(port)))
    first = hosts.partition(",")[0].rstrip("/")
    return f"{_CLUSTER_SCHEMES[scheme]}://{user}{at}{first}{mark}{query}", nodes


def _validate_redis_url(url: str) -> str:
    if url and not url.startswith(("redis://", "rediss://", "unix://", "redis+cluster://", "rediss+cluster://")):
        raise ValueError("must begin with redis://, rediss://, unix://, redis+cluster:// or rediss+cluster://")
    plain, _ = cluster_nodes(url)
    try:
        # A property that parses the number.
        _ = urlsplit(plain).port
    except ValueError as error:
        # The library's message quotes the password if it contains a slash.
        raise ValueError("has a port that is no number; write / ? # in a password as %2F %3F %23") from error
    return url


class SettingsError(SystemExit):
    """The environment does not describe a valid configuration; ends the process with its message on stderr."""


class ProcessSettings(BaseSettings):
    """Settings that every process has. Subclasses add their own fields and name their process."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid")

    process: ClassVar[str] = ""
    # Fields whose addresses the process itself listens on.
    listens_on: ClassVar[tuple[str, ...]] = ()

    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least level that is logged.")
    insecure: bool = Field(
        False,
        description="Allow without TLS: addresses that other machines can reach, Redis on another machine, and tokens "
        "sent to another machine.",
    )
    scheduler_address: Address = Field("127.0.0.1:50051", description="Where the scheduler serves generation.")
    cachemgr_address: Address = Field("127.0.0.1:50052", description="Where the cache manager serves its data plane.")
    cachemgr_admin_address: Address = Field(
        "127.0.0.1:50062", description="Where the cache manager serves operators and event watchers."
    )
    executor_address: Address = Field("127.0.0.1:50053", description="Where the executor serves.")
    redis_url: Annotated[str, AfterValidator(_validate_redis_url)] = Field(
        "",
        description="Redis that keeps a copy of the index and has the index by key for routers. Empty: no copy, but "
        "`make run-stack` starts a Redis server.",
        repr=False,
    )
    state_dir: Path = Field(
        default_factory=lambda: Path("~/.local/state/kvkeep").expanduser(),
        description="Folder for state that outlives restarts.",
    )
    tls_cert_file: OptionalPath = Field(
        None, description="PEM certificate chain of this process; empty serves without TLS."
    )
    tls_key_file: OptionalPath = Field(None, description="Key of the certificate; other users may not read the file.")
    tls_ca_file: OptionalPath = Field(
        None, description="PEM certificates of the authorities of servers; empty calls without TLS."
    )
    tls_client_ca_file: OptionalPath = Field(
        None, description="PEM certificates of the authorities of callers; if set, every caller needs a certificate."
    )

    token_file: OptionalPath = Field(
        None, description="File with the token that this process sends in calls; other users may not read the file."
    )

    tokens_file: OptionalPath = Field(
        None,
        description="File with tokens of callers, made by `python -m protos.rpc.tokens new`; empty asks for no token.",
    )
    audit_file: OptionalPath = Field(
        None, description="File for the audit log: operators' calls and refused callers, also in the log."
    )

    @cached_property
    def security(self) -> Security:
        """The settings that servers and channels share."""
        return Security(**{field.name: getattr(self, field.name) for field in fields(Security)})

    @property
    def serves_anybody(self) -> bool:
        """Whether neither TLS nor tokens keep out foreign callers, such as a page of another site."""
        return not self.security.serves_tls and self.tokens_file is None

    @property
    def listening(self) -> dict[str, str]:
        """Addresses that the process listens on, by the variable that chooses each; "" is off."""
        return {variable(type(self), field): getattr(self, field) for field in self.listens_on}

    @model_validator(mode="after")
    def _check_addresses(self) -> Self:
        try:
            addresses.check_distinct(self.listening)
        except addresses.AddressError as error:
            raise ValueError(str(error)) from error
        return self

    @model_validator(mode="after")
    def _check_security(self) -> Self:
        self.security.check()
        try:
            for address in (self.scheduler_address, self.cachemgr_address, self.executor_address):
                self.security.check_target(address)
        except addresses.AddressError as error:
            raise ValueError(str(error)) from error
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Uses only the values of `load`, as nothing below __main__ reads the environment."""
        return (init_settings,)


S = TypeVar("S", bound=ProcessSettings)


def variable(cls: type[ProcessSettings], field: str) -> str:
    """Name of the environment variable of a field."""
    own = field not in ProcessSettings.model_fields
    return f"{PREFIX}{cls.process.upper()}_{field.upper()}" if own else f"{PREFIX}{field.upper()}"


def load(cls: type[S], environ: Mapping[str, str]) -> S:
    """The settings that an environment describes. Raises SettingsError, naming the variable at fault."""
    known = {variable(cls, field): field for field in cls.model_fields}
    if cls.process:
        known |= {f"{PREFIX}{cls.process.upper()}_{field.upper()}": field for field in ProcessSettings.model_fields}
    _refuse_unknown(known, environ, cls.process)
    values: dict[str, object] = {field: environ[name] for name, field in known.items() if name in environ}
    if "state_dir" not in values and environ.get("XDG_STATE_HOME"):
        values["state_dir"] = Path(environ["XDG_STATE_HOME"], "kvkeep")
    try:
        return cls(**values)  # type: ignore[arg-type]
    except ValidationError as error:
        given = {field: name for name, field in known.items() if name in environ}
        faults = [_fault(given, fault["loc"], fault["msg"]) for fault in error.errors()]
        raise SettingsError("; ".join(faults)) from error


def _fault(given: Mapping[str, str], path: tuple[int | str, ...], message: str) -> str:
    """Describes the fault of a field by the variable that set it; a fault of several fields names them itself."""
    message = message.removeprefix("Value error, ")
    return f"{given[str(path[0])]}: {message}" if path else message


def _refuse_unknown(known: Mapping[str, str], environ: Mapping[str, str], process: str) -> None:
    others = tuple(f"{PREFIX}{other.upper()}_" for other in PROCESSES if other != process)
    for name in sorted(environ):
        if not name.startswith(PREFIX) or name in known or name.startswith(others):
            continue
        meant = _closest(name, known, process)
        raise SettingsError(f"unknown setting {name}" + (f": did you mean {meant}?" if meant else ""))


def _closest(name: str, known: Iterable[str], process: str) -> str:
    """The known variable that was probably meant, or nothing. Compares names without their common prefixes."""

    its_own = f"{PREFIX}{process.upper()}_"

    def own(variable: str) -> str:
        return variable.removeprefix(its_own).removeprefix(PREFIX)

    # Both forms of a shared setting are known; the form with the same prefix is suggested.
    ordered = sorted(known, key=lambda one: one.startswith(its_own) == name.startswith(its_own))
    by_own = {own(one): one for one in ordered}
    close = difflib.get_close_matches(own(name), by_own, n=1, cutoff=_CLOSE)
    return by_own[close[0]] if close else ""
