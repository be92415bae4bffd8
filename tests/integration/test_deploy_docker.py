"""Images and compose files: the linter and docker-compose take them, and processes understand their settings."""

import re
import shutil
from pathlib import Path

import pytest

from tests.stack import MODULES, ROOT
from tests.support.deployed import COMPOSE, ONE_ENGINE, Secrets, composed, shortest_stop, tool, understood
from tests.support.names import unknown_settings

FOLDER = ROOT / "ops/deploy"
DOCKERFILE = FOLDER / "docker/Dockerfile"
OVERLAYS = ("plain", "gpu", "tls")
SECRETS = Path("/run/secrets")


def seconds(text: str) -> float:
    """A duration such as 1m30s."""
    return sum(float(n) * {"h": 3600, "m": 60, "s": 1}[unit] for n, unit in re.findall(r"([\d.]+)([hms])", text))


def test_linter_finds_nothing_in_the_dockerfile() -> None:
    tool("hadolint", DOCKERFILE)


def test_every_setting_is_one() -> None:
    for path in (DOCKERFILE, ROOT / "docs/deploying.md", *FOLDER.glob("compose/*.yaml")):
        assert not unknown_settings(path.read_text()), path


def test_every_image_can_send_traces() -> None:
    installed = [set(extras.split(",")) for extras in re.findall(r'"/src\[(.*)\]"', DOCKERFILE.read_text())]
    assert {process for extras in installed for process in extras & set(ONE_ENGINE)} == set(MODULES)
    assert all("tracing" in extras for extras in installed)


def test_the_build_context_has_all_sources_of_images() -> None:
    sent = {line[1:] for line in (FOLDER / "docker/Dockerfile.dockerignore").read_text().splitlines() if line[0] == "!"}
    copied: set[str] = set()
    for line in re.findall(r"^COPY (.*) \S+$", DOCKERFILE.read_text(), flags=re.MULTILINE):
        copied |= set(line.split())
    assert copied == sent
    assert all((ROOT / name).exists() for name in copied)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_compose_files_set_only_known_settings(overlay: str, tmp_path: Path) -> None:
    services = composed(overlay)["services"]
    for process in ONE_ENGINE:
        service = services[process]
        Secrets(tmp_path / process, {one["target"].split("-")[-1]: one["target"] for one in service.get("secrets", ())})
        environment = {
            name: value.replace(str(SECRETS), str(tmp_path / process)) for name, value in service["environment"].items()
        }
        settings = understood(process, environment)
        assert settings.security.serves_tls is (overlay == "tls")
        assert settings.insecure is (overlay != "tls")
        assert seconds(service["stop_grace_period"]) >= shortest_stop(settings)
        target = service["build"]["target"]
        assert f" AS {target}\n" in DOCKERFILE.read_text()
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_setting_may_stand_in_the_file_beside_compose(overlay: str, tmp_path: Path) -> None:
    folder = shutil.copytree(COMPOSE, tmp_path / "compose")
    given = {
        "KVKEEP_LOG_LEVEL": "debug",
        "KVKEEP_CACHEMGR_PIN_BUDGET": "0.25",
        "KVKEEP_SCHEDULER_MAX_RUNNING": "8",
        "KVKEEP_EXECUTOR_MODEL": "owner/name",
        "KVKEEP_EXECUTOR_BLOCK_SIZE": "32",
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4317",
        "HF_TOKEN": "hf_secret",
        # What compose.yaml itself must decide.
        "KVKEEP_SCHEDULER_ADDRESS": "127.0.0.1:1",
    }
    (folder / ".env").write_text("".join(f"{name}={value}\n" for name, value in given.items()))
    services = composed(overlay, folder)["services"]
    address = given.pop("KVKEEP_SCHEDULER_ADDRESS")
    for process in ONE_ENGINE:
        assert given.items() <= services[process]["environment"].items()
    assert services["scheduler"]["environment"]["KVKEEP_SCHEDULER_ADDRESS"] != address
    assert not given.keys() & services["redis"].get("environment", {}).keys()


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_only_the_scheduler_is_open_to_other_machines(overlay: str) -> None:
    whole = composed(overlay)
    opened = {
        (name, port["target"])
        for name, service in whole["services"].items()
        for port in service.get("ports", ())
        if port.get("host_ip") != "127.0.0.1"
    }
    assert opened == ({("scheduler", 8000), ("scheduler", 50051)} if overlay == "tls" else set())
    assert whole["networks"]["inside"]["internal"] is True
    for name in ("redis", "prometheus"):
        assert list(whole["services"][name]["networks"]) == ["inside"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_console_is_on_this_machine(overlay: str) -> None:
    service = composed(overlay)["services"]["console"]
    _, _, port = service["environment"]["KVKEEP_CONSOLE_ADDRESS"].rpartition(":")
    (published,) = service["ports"]
    assert (published["host_ip"], published["published"], published["target"]) == ("127.0.0.1", port, int(port))
    # What is only in a network without a way out is not published.
    assert "outside" in service["networks"]


def test_files_that_compose_mounts_are_there() -> None:
    for service in composed("plain")["services"].values():
        for volume in service.get("volumes", ()):
            if volume["type"] == "bind":
                assert Path(volume["source"]).exists(), volume
