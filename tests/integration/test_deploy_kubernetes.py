"""The commands of the guide to Kubernetes, run in its order: with a chart that is rendered, and no cluster."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import kubernetes_validate
import pytest
import yaml
from cryptography import x509

from tests.integration.test_deploy_helm import KUBERNETES, names_in_certificates
from tests.stack import ROOT
from tests.support.deployed import Manifest, pods, processes, render, workloads
from tests.support.patience import patience

GUIDE, DEPLOYING = (ROOT / "docs" / name for name in ("kubernetes.md", "deploying.md"))
CODE = re.compile(r"^(?: {4}.*\n)+", re.MULTILINE)
FENCED = re.compile(r"^```yaml\n# (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# What needs a cluster, or the network, is written down instead.
RECORD = """
record() { printf '%s ' "${@@Q}" >> calls; echo >> calls; }
for name in docker helm kubectl; do eval "$name() { record $name \\"\\$@\\"; }"; done
"""
CHART = "ops/deploy/helm/kvkeep"


def code(page: Path, heading: str = "") -> list[str]:
    """The indented blocks of a page, or of one section of it, that are commands."""
    text = page.read_text()
    if heading:
        text = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    text = FENCED.sub("", text)
    return [block for block in CODE.findall(text) if not re.match(r" +(tcp|https?)://", block)]


def values_files() -> dict[str, str]:
    """The files of values that the page shows, each with its name in the first line."""
    blocks = FENCED.findall(GUIDE.read_text())
    assert len(blocks) == GUIDE.read_text().count("```yaml")
    return dict(blocks)


class Session(NamedTuple):
    """The files that the page's commands left, and the recorded calls, each as its words."""

    folder: Path
    calls: list[list[str]]

    def of(self, program: str, *words: str) -> list[list[str]]:
        """The words that follow these words in each call that begins with them."""
        begin = [program, *words]
        return [call[len(begin) :] for call in self.calls if call[: len(begin)] == begin]


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Session:
    folder = tmp_path_factory.mktemp("guide")
    (folder / "ops").symlink_to(ROOT / "ops")
    for name, text in values_files().items():
        (folder / name).write_text(text)
    _, make_tokens = code(DEPLOYING, "Secrets")
    blocks = code(GUIDE)
    # "Then the tokens": after the certificates, and before they become a secret.
    place = next(number for number, block in enumerate(blocks) if "demo-kvkeep-tokens" in block)
    script = "".join([RECORD, *blocks[:place], make_tokens, *blocks[place:]])
    done = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", script],
        cwd=folder,
        env={"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=patience(60),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return Session(folder, [shlex.split(line) for line in (folder / "calls").read_text().splitlines()])


def merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """As Helm does with one file of values after the other."""
    both = {key for key in below.keys() & above.keys() if isinstance(below[key], dict) and isinstance(above[key], dict)}
    return below | above | {key: merged(below[key], above[key]) for key in both}


def value(text: str) -> Any:
    """Of `--set`: a list in braces, or one word."""
    return [yaml.safe_load(one) for one in text[1:-1].split(",")] if text[0] == "{" else yaml.safe_load(text)


def values_of(folder: Path, words: list[str]) -> dict[str, Any]:
    """The values of `helm install` or `helm upgrade`."""
    found: dict[str, Any] = {}
    for option, given in zip(words[::2], words[1::2], strict=True):
        if option == "--values":
            found = merged(found, yaml.safe_load((folder / given).read_text()))
            continue
        assert option == "--set"
        for part in re.split(r",(?![^{]*\})", given):
            path, _, text = part.partition("=")
            made: Any = value(text)
            for key in reversed(path.split(".")):
                made = {key: made}
            found = merged(found, made)
    return found


def releases(session: Session) -> list[list[Manifest]]:
    """What each `helm install` and `helm upgrade` renders, in their order."""
    calls = [call for call in session.of("helm") if call[0] in ("install", "upgrade")]
    assert all(call[2] == CHART for call in calls)
    return [render(values_of(session.folder, call[3:])) for call in calls]


def secrets(session: Session) -> dict[str, dict[str, Path]]:
    """The files of each secret, by their keys in it."""
    made = {}
    for name, *options in session.of("kubectl", "create", "secret", "generic"):
        pairs = [option.removeprefix("--from-file=").rpartition("=") for option in options]
        made[name] = {key or Path(path).name: session.folder / path for key, _, path in pairs}
    return made


def test_what_the_page_installs_matches_the_schema_of_kubernetes(session: Session) -> None:
    rendered = releases(session)
    assert len(rendered) == 6
    manifests = {json.dumps(one): one for release in rendered for one in release}
    for manifest in manifests.values():
        if not manifest["apiVersion"].startswith("inference."):
            kubernetes_validate.validate(manifest, KUBERNETES[0], strict=True)


def test_the_fleet_is_the_one_that_the_page_describes(session: Session) -> None:
    fleet, _, images, larger, events, gateway = releases(session)
    sizes = {one["metadata"]["name"]: one["spec"].get("replicas") for one in workloads(fleet)}
    assert sizes == {
        "demo-kvkeep-cachemgr": 2,
        "demo-kvkeep-engine-0": 2,
        "demo-kvkeep-engine-1": 2,
        "demo-kvkeep-redis": 1,
        "demo-kvkeep-router": None,
    }
    (scaler,) = (one["spec"] for one in fleet if one["kind"] == "HorizontalPodAutoscaler")
    assert (scaler["minReplicas"], scaler["maxReplicas"]) == (2, 6)
    assert {container["image"] for container in processes(images).values()} == {
        "registry.example/team/kvkeep-cachemgr:0.1.0",
        "registry.example/team/kvkeep-executor-cuda:0.1.0",
        "registry.example/team/kvkeep-scheduler@sha256:" + "0123456789abcdef" * 4,
        "docker.io/valkey/valkey:8.1.3-alpine",
    }
    # Existing engines do not restart, but routers do.
    before, after = (
        {one["metadata"]["name"]: one["spec"]["template"] for one in workloads(release)} for release in (fleet, larger)
    )
    assert {name for name in after if before[name] != after[name]} == {"demo-kvkeep-router"}
    (service,) = (
        one for one in events if one["metadata"]["name"] == "demo-kvkeep-cachemgr" and one["kind"] == "Service"
    )
    shown = {int(port) for port in re.findall(r"tcp://demo-kvkeep-cachemgr-0\S+:(\d+)", GUIDE.read_text())}
    assert shown == {5558, 6558}
    assert shown <= {port["port"] for port in service["spec"]["ports"]}
    assert [one["spec"]["endpointPickerRef"]["name"] for one in gateway if one["kind"] == "InferencePool"] == ["picker"]


def test_the_images_that_the_page_builds_are_those_of_the_fleet(session: Session) -> None:
    stages = re.findall(r"^FROM \S+ AS (\S+)$", (ROOT / "ops/deploy/docker/Dockerfile").read_text(), re.MULTILINE)
    built = {}
    for _, file, _, target, _, tag, folder in session.of("docker", "build"):
        assert (ROOT / file).exists()
        assert target in stages
        assert folder == "."
        built[target] = tag
    assert [pushed for [pushed] in session.of("docker", "push")] == list(built.values())
    wanted = {container["image"] for container in processes(releases(session)[0]).values()}
    assert wanted - set(built.values()) == {"docker.io/valkey/valkey:8.1.3-alpine"}


def test_pods_find_all_secrets_that_the_page_makes(session: Session) -> None:
    made, used = secrets(session), set()
    assert all(path.stat().st_size for files in made.values() for path in files.values())
    release = releases(session)[0]
    tests = [one["spec"] for one in release if one["kind"] == "Pod"]
    for pod in [*(pod for _, pod in pods(release)), *tests]:
        for volume in pod["volumes"]:
            if secret := volume.get("secret"):
                used.add(secret["secretName"])
                keys = {item["key"] for item in secret.get("items", ())} or {"ca.crt", "tls.crt", "tls.key"}
                assert keys <= made[secret["secretName"]].keys()
    assert used == set(made)


def test_certificates_of_the_page_have_the_names_of_its_table(session: Session) -> None:
    made = secrets(session)
    for part, names in names_in_certificates().items():
        certificate = x509.load_pem_x509_certificate(made[f"demo-kvkeep-{part}-tls"]["tls.crt"].read_bytes())
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert set(names) <= set(found.get_values_for_type(x509.DNSName))


def test_operators_name_pods_and_engines_that_there_are(session: Session) -> None:
    release = releases(session)[0]
    engines = next(
        one["value"] for one in processes(release)["router"]["env"] if one["name"] == "KVKEEP_ROUTER_ENGINES"
    ).split(",")
    asked = session.of("kubectl", "exec")
    assert [pod for pod, *_ in asked] == ["demo-kvkeep-cachemgr-0", "demo-kvkeep-cachemgr-1"]
    assert asked[1][-1] in engines
