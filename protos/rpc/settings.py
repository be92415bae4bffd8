"""Settings: one frozen object per process, read once from the environment.

Shared settings are variables KVKEEP_<NAME>, a process's own ones KVKEEP_<PROCESS>_<NAME>. A variable that no process
knows is an error, so that a typing mistake never passes silently.
"""

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, Field, ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from protos.rpc import addresses

PREFIX = "KVKEEP_"
PROCESSES = ("scheduler", "cachemgr", "executor")

Address = Annotated[str, AfterValidator(addresses.validate)]


def _validate_metrics(address: str) -> str:
    if address:
        if addresses.socket_path(address) is not None:
            raise ValueError("must be host:port")
        addresses.split_host_port(address)
    return address


MetricsAddress = Annotated[str, AfterValidator(_validate_metrics)]


def _validate_redis_url(url: str) -> str:
    if url and not url.startswith(("redis://", "rediss://", "unix://")):
        raise ValueError("must begin with redis://, rediss:// or unix://")
    return url


class SettingsError(SystemExit):
    """The environment does not describe a valid configuration; ends the process with its message on stderr."""


class ProcessSettings(BaseSettings):
    """What every process knows. Subclasses add their own fields and name their process."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid")

    process: ClassVar[str] = ""

    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least level that is logged.")
    insecure: bool = Field(False, description="Allow addresses that other machines can reach, without TLS.")
    scheduler_address: Address = Field("127.0.0.1:50051", description="Where the scheduler serves generation.")
    cachemgr_address: Address = Field("127.0.0.1:50052", description="Where the cache manager serves its data plane.")
    cachemgr_admin_address: Address = Field(
        "127.0.0.1:50062", description="Where the cache manager serves operators and event watchers."
    )
    executor_address: Address = Field("127.0.0.1:50053", description="Where the executor serves.")
    redis_url: Annotated[str, AfterValidator(_validate_redis_url)] = Field(
        "", description="Redis that keeps the index; empty starts an embedded server."
    )
    state_dir: Path = Field(
        default_factory=lambda: Path("~/.local/state/kvkeep").expanduser(), description="Folder for state that stays."
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only what `load` passes in: nothing below __main__ reads the environment."""
        return (init_settings,)


S = TypeVar("S", bound=ProcessSettings)


def variable(cls: type[ProcessSettings], field: str) -> str:
    """Name of the environment variable of a field."""
    own = field not in ProcessSettings.model_fields
    return f"{PREFIX}{cls.process.upper()}_{field.upper()}" if own else f"{PREFIX}{field.upper()}"


def load(cls: type[S], environ: Mapping[str, str]) -> S:
    """The settings that an environment describes. Raises SettingsError naming the variable at fault."""
    fields = {variable(cls, field): field for field in cls.model_fields}
    _refuse_unknown(fields, environ, cls.process)
    values: dict[str, object] = {field: environ[name] for name, field in fields.items() if name in environ}
    if "state_dir" not in values and environ.get("XDG_STATE_HOME"):
        values["state_dir"] = Path(environ["XDG_STATE_HOME"], "kvkeep")
    try:
        return cls(**values)  # type: ignore[arg-type]
    except ValidationError as error:
        faults = [f"{variable(cls, str(fault['loc'][0]))}: {fault['msg']}" for fault in error.errors()]
        raise SettingsError("; ".join(faults)) from error


def _refuse_unknown(known: Mapping[str, str], environ: Mapping[str, str], process: str) -> None:
    others = tuple(f"{PREFIX}{other.upper()}_" for other in PROCESSES if other != process)
    for name in sorted(environ):
        if not name.startswith(PREFIX) or name in known or name.startswith(others):
            continue
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
        raise SettingsError(f"unknown setting {name}" + (f": did you mean {close[0]}?" if close else ""))
