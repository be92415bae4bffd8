"""Settings say which variable is wrong, and know each other's."""

from pathlib import Path
from typing import ClassVar

import pytest
from pydantic import ValidationError

from cachemgr import settings as cachemgr_settings
from executor.settings import ExecutorSettings
from protos.rpc.settings import MetricsAddress, ProcessSettings, SettingsError, load, variable
from scheduler.router.settings import RouterSettings
from scheduler.settings import SchedulerSettings

ALL = (cachemgr_settings.CachemgrSettings, ExecutorSettings, SchedulerSettings, RouterSettings)


class CachemgrSettings(ProcessSettings):
    process: ClassVar[str] = "cachemgr"
    metrics_address: MetricsAddress = "127.0.0.1:9102"
    lease_seconds: float = 10.0


def test_defaults_need_no_environment() -> None:
    settings = load(CachemgrSettings, {})
    assert settings.cachemgr_address == "127.0.0.1:50052"
    assert settings.redis_url == ""
    assert settings.state_dir.parts[-2:] == ("state", "kvkeep")


def test_shared_and_own_variables_are_read() -> None:
    environ = {
        "KVKEEP_INSECURE": "1",
        "KVKEEP_CACHEMGR_ADDRESS": "unix:/run/m",
        "KVKEEP_CACHEMGR_LEASE_SECONDS": "2.5",
        "KVKEEP_CACHEMGR_METRICS_ADDRESS": "",
        "XDG_STATE_HOME": "/var/state",
    }
    settings = load(CachemgrSettings, environ)
    assert settings.insecure
    assert settings.cachemgr_address == "unix:/run/m"
    assert settings.lease_seconds == 2.5
    assert settings.metrics_address == ""
    assert settings.state_dir == Path("/var/state/kvkeep")


@pytest.mark.parametrize("cls", ALL, ids=lambda cls: cls.__name__)
def test_an_empty_variable_is_no_file(cls: type[ProcessSettings]) -> None:
    optional = [name for name, field in cls.model_fields.items() if field.annotation == Path | None]
    assert {"tls_cert_file", "audit_file"} <= {*optional}
    settings = load(cls, {variable(cls, name): "" for name in optional})
    assert {name: getattr(settings, name) for name in optional} == dict.fromkeys(optional)


def test_settings_do_not_change() -> None:
    with pytest.raises(ValidationError):
        load(CachemgrSettings, {}).insecure = True  # type: ignore[misc]


def test_an_unknown_variable_ends_the_start_and_suggests_the_right_one() -> None:
    with pytest.raises(SettingsError, match=r"KVKEEP_REDISURL: did you mean KVKEEP_REDIS_URL\?"):
        load(CachemgrSettings, {"KVKEEP_REDISURL": "redis://x"})
    with pytest.raises(SettingsError, match=r"did you mean KVKEEP_CACHEMGR_LEASE_SECONDS\?"):
        load(CachemgrSettings, {"KVKEEP_CACHEMGR_LEASE_SECOND": "1"})


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("KVKEEP_FOO", ""),
        ("KVKEEP_CACHEMGR_FOO", ""),
        ("KVKEEP_DEBUG", ""),
        ("KVKEEP_LOGLEVEL", "KVKEEP_LOG_LEVEL"),
        ("KVKEEP_CACHEMGR_LOGLEVEL", "KVKEEP_CACHEMGR_LOG_LEVEL"),
        ("KVKEEP_LEASE_SECONDS", "KVKEEP_CACHEMGR_LEASE_SECONDS"),
        ("KVKEEP_CACHEMRG_LEASE_SECONDS", "KVKEEP_CACHEMGR_LEASE_SECONDS"),
    ],
)
def test_only_a_name_that_is_close_beside_the_prefix_is_suggested(name: str, meant: str) -> None:
    with pytest.raises(SettingsError) as refused:
        load(CachemgrSettings, {name: "1"})
    assert str(refused.value) == f"unknown setting {name}" + (f": did you mean {meant}?" if meant else "")


def test_a_shared_setting_may_be_another_for_one_process() -> None:
    environ = {"KVKEEP_LOG_LEVEL": "error", "KVKEEP_CACHEMGR_LOG_LEVEL": "debug", "KVKEEP_EXECUTOR_LOG_LEVEL": "info"}
    assert load(CachemgrSettings, environ).log_level == "debug"
    with pytest.raises(SettingsError, match="KVKEEP_CACHEMGR_LOG_LEVEL"):
        load(CachemgrSettings, {"KVKEEP_CACHEMGR_LOG_LEVEL": "loud"})


def test_variables_of_other_processes_are_theirs() -> None:
    load(CachemgrSettings, {"KVKEEP_SCHEDULER_WHATEVER": "1", "KVKEEP_EXECUTOR_MODEL": "x", "PATH": "/bin"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("KVKEEP_CACHEMGR_LEASE_SECONDS", "soon"),
        ("KVKEEP_CACHEMGR_ADDRESS", "localhost"),
        ("KVKEEP_CACHEMGR_ADDRESS", "unix:relative"),
        ("KVKEEP_CACHEMGR_ADDRESS", "[::1]:99999"),
        ("KVKEEP_CACHEMGR_METRICS_ADDRESS", "unix:/tmp/x"),
        ("KVKEEP_LOG_LEVEL", "loud"),
        ("KVKEEP_REDIS_URL", "localhost:6379"),
    ],
)
def test_a_bad_value_names_its_variable(name: str, value: str) -> None:
    with pytest.raises(SettingsError, match=name):
        load(CachemgrSettings, {name: value})


def test_a_port_that_no_machine_has_is_named() -> None:
    with pytest.raises(SettingsError, match=r"^KVKEEP_CACHEMGR_ADDRESS: must have a port of at most 65535, not 99999$"):
        load(CachemgrSettings, {"KVKEEP_CACHEMGR_ADDRESS": "127.0.0.1:99999"})
