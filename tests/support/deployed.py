"""The settings in files of a deployment, compared with the settings that the processes know."""

import json
import re
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
from tests.support.patience import patience

CLASSES = {cls.process: cls for cls in PROCESSES}
# The processes of compose and systemd: one engine, without a router.
ONE_ENGINE = [process for process in CLASSES if process != "router"]
# The least time of a stack between its drain and its end.
STOP_MARGIN_SECONDS = 5.0
COMPOSE = ROOT / "ops/deploy/compose"
CHART = ROOT / "ops/deploy/helm/kvkeep"
TOOLS = Path(sys.executable).parent
Manifest = dict[str, Any]


def tool(name: str, *arguments: str | Path) -> str:
    """The output of a tool of this environment."""
    if not (TOOLS / name).exists():
        pytest.skip(f"there is no {name} in this environment")
    done = subprocess.run([TOOLS / name, *arguments], capture_output=True, text=True, timeout=patience(60), check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def composed(overlay: str, folder: Path = COMPOSE) -> dict[str, Any]:
    """The whole configuration as docker-compose understands it."""
    files = ["compose.yaml"] + ([f"compose.{overlay}.yaml"] if overlay != "plain" else [])
    options = [option for file in files for option in ("--file", folder / file)]
    result: dict[str, Any] = json.loads(tool("docker-compose", *options, "config", "--format", "json"))
    return result


def render(values: dict[str, Any], chart: Path = CHART) -> list[Manifest]:
    """The chart as a release `demo` with these values."""
    with helm.Chart.load(str(chart)) as loaded:
        files = loaded.render(values, name="demo", namespace="models")
    texts = (text for name, text in files.items() if name.endswith(".yaml"))
    return [manifest for text in texts for manifest in yaml.safe_load_all(text) if manifest]


def workloads(manifests: list[Manifest]) -> list[Manifest]:
    """The workloads whose pods stay."""
    return [manifest for manifest in manifests if manifest["kind"] in ("Deployment", "StatefulSet")]


def pods(manifests: list[Manifest]) -> Iterator[tuple[str, Manifest]]:
    """Each workload's part of the stack, and its pod."""
    for manifest in workloads(manifests):
        template = manifest["spec"]["template"]
        yield template["metadata"]["labels"]["app.kubernetes.io/component"], template["spec"]


def containers(pod: Manifest) -> list[Manifest]:
    """The containers of a pod that run as long as the pod, in the order in which they start."""
    return [*pod.get("initContainers", ()), *pod["containers"]]


def processes(manifests: list[Manifest]) -> dict[str, Manifest]:
    """One container of each process, by the process's name."""
    return {container["name"]: container for _, pod in pods(manifests) for container in containers(pod)}


def addressed(manifests: list[Manifest]) -> dict[str, Manifest]:
    """The pod template of each pod of a StatefulSet, by the pod's name in the cluster's DNS."""
    return {
        f"{one['metadata']['name']}-{number}.{one['spec']['serviceName']}.models.svc": one["spec"]["template"]
        for one in workloads(manifests)
        if one["kind"] == "StatefulSet"
        for number in range(one["spec"]["replicas"])
    }


def variables(container: Manifest, pod: str = "pod-0") -> dict[str, str]:
    """The variables of a container in a pod of this name; the value `secret` stands for values from secrets."""
    found: dict[str, str] = {}
    for variable in container["env"]:
        match variable.get("valueFrom"):
            case None:
                value = re.sub(r"\$\((\w+)\)", lambda name: found.get(name[1], name[0]), variable["value"])
            case {"secretKeyRef": _}:
                value = "secret"
            case {"fieldRef": {"fieldPath": "metadata.name"}}:
                value = pod
            case {"fieldRef": {"fieldPath": "metadata.labels['apps.kubernetes.io/pod-index']"}}:
                value = pod.rpartition("-")[2]
            case source:
                raise AssertionError(f"{variable['name']} comes from {source}")
        found[variable["name"]] = value
    return found


class Secrets:
    """Certificates and tokens under the names that a deployment gives them, in a folder that replaces its own."""

    def __init__(self, folder: Path, names: Mapping[str, str], role: Role = Role.SCHEDULER) -> None:
        """names: of each file of a process, by kind: ca, certificate, key, token of a role, tokens."""
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
    """The settings of a process with these variables. An unknown variable ends the test."""
    ours = {name: str(value) for name, value in environment.items() if name.startswith("KVKEEP_")}
    return load(CLASSES[process], ours)


def shortest_stop(settings: ProcessSettings) -> float:
    """How long a supervisor must let a process run after SIGTERM."""
    return float(getattr(settings, "drain_seconds", 10.0)) + STOP_MARGIN_SECONDS
