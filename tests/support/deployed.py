"""What files of a deployment tell processes, held against what the processes understand."""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import certs
import helm_python as helm
import pytest
import yaml
from settings_table import PROCESSES

from protos.rpc.identity import Role
from protos.rpc.security import Security
from protos.rpc.settings import ProcessSettings, load
from tests.stack import ROOT
from tests.support.keyring import Keyring

CLASSES = {cls.process: cls for cls in PROCESSES}
# What a stack takes between its drain and its end, at least.
STOP_MARGIN_SECONDS = 5.0
COMPOSE = ROOT / "ops/deploy/compose"
CHART = ROOT / "ops/deploy/helm/kvkeep"
TOOLS = Path(sys.executable).parent
Manifest = dict[str, Any]


def tool(name: str, *arguments: str | Path) -> str:
    """What a tool of this environment prints."""
    if not (TOOLS / name).exists():
        pytest.skip(f"there is no {name} in this environment")
    done = subprocess.run([TOOLS / name, *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def composed(overlay: str, folder: Path = COMPOSE) -> dict[str, Any]:
    """The whole configuration as docker-compose understands it."""
    files = ["compose.yaml"] + ([f"compose.{overlay}.yaml"] if overlay != "plain" else [])
    options = [option for file in files for option in ("--file", folder / file)]
    result: dict[str, Any] = json.loads(tool("docker-compose", *options, "config", "--format", "json"))
    return result


def render(values: dict[str, Any]) -> list[Manifest]:
    """The chart as a release `demo` with these values."""
    with helm.Chart.load(str(CHART)) as chart:
        files = chart.render(values, name="demo", namespace="models")
    texts = (text for name, text in files.items() if name.endswith(".yaml"))
    return [manifest for text in texts for manifest in yaml.safe_load_all(text) if manifest]


def pods(manifests: list[Manifest]) -> Iterator[tuple[str, Manifest]]:
    """Of each process that is started: which it is, and its pod."""
    for manifest in manifests:
        if manifest["kind"] in ("Deployment", "StatefulSet"):
            template = manifest["spec"]["template"]
            yield template["metadata"]["labels"]["app.kubernetes.io/component"], template["spec"]


class Secrets:
    """Certificates and tokens under the names that a deployment gives them, in a folder in the place of its own."""

    def __init__(self, folder: Path, names: Mapping[str, str], role: Role = Role.SCHEDULER) -> None:
        """names: of each file that a process is given, by what it is: ca, certificate, key, token of a role, tokens."""
        self.folder = folder
        trusted, _ = (ca := certs.authority()).write(folder / "made", "ca")
        certificate, key = certs.certificate(ca, "process").write(folder / "made", "process")
        keyring = Keyring(folder / "made", Security())
        token = keyring.add(role).token_file
        assert token is not None
        files = {"ca": trusted, "certificate": certificate, "key": key, "token": token, "tokens": keyring.file}
        for what, name in names.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.symlink_to(files[what])


def understood(process: str, environment: Mapping[str, Any]) -> ProcessSettings:
    """The settings of a process that is given these variables. What it does not know ends the test."""
    ours = {name: str(value) for name, value in environment.items() if name.startswith("KVKEEP_")}
    return load(CLASSES[process], ours)


def shortest_stop(settings: ProcessSettings) -> float:
    """How long a supervisor must let a process run after SIGTERM."""
    return float(getattr(settings, "drain_seconds", 10.0)) + STOP_MARGIN_SECONDS
