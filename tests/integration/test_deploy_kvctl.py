"""The deployed kvctl, beside the cache manager: it finds a real cache manager and has an operator's rights."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from protos.rpc.identity import Role
from tests.stack import ROOT
from tests.support.deployed import Manifest, Secrets, addressed, composed, processes, render, variables
from tests.support.patience import patience
from tests.support.ports import free_address

PLAIN = {"tls": {"enabled": False}, "tokens": {"enabled": False}, "insecure": True}
FILES = ("tls/ca.crt", "tls/tls.crt", "tls/tls.key", "tokens/tokens", "tokens/operator.token")
WHAT = ("ca", "certificate", "key", "tokens", "token")


def given_by(deployment: str) -> tuple[dict[str, str], set[str], tuple[str, ...]]:
    """Of a cache manager: its variables, where its deployment has servers, and the names of its secrets."""
    kind, _, how = deployment.partition(" ")
    if kind == "compose":
        services = composed(how)["services"]
        return services["cachemgr"]["environment"], {*services, "localhost"}, WHAT
    manifests = render(PLAIN if how == "plain" else {})
    given = variables(processes(manifests)["cachemgr"], "demo-kvkeep-cachemgr-0")
    return given, {*addressed(manifests), "localhost"}, FILES


def kvctl(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvctl", *arguments]
    return subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=patience(60), check=False
    )


@pytest.mark.parametrize("deployment", ["compose plain", "compose tls", "chart plain", "chart tls"])
def test_operators_have_kvctl_beside_the_cache_manager(deployment: str, tmp_path: Path) -> None:
    given, servers, names = given_by(deployment)
    Secrets(tmp_path, dict(zip(WHAT, names, strict=True)), Role.OPERATOR)
    moved = {"/run/secrets": str(tmp_path), "/var/lib/kvkeep": str(tmp_path)}
    moved |= {f":{port}": ":" + free_address().rpartition(":")[2] for port in (50052, 50062, 9102, 9112)}
    environment = {"PATH": os.environ["PATH"], "KVKEEP_STATE_DIR": "/var/lib/kvkeep"} | given | {"KVKEEP_REDIS_URL": ""}
    for old, new in moved.items():
        environment = {name: value.replace(old, new) for name, value in environment.items()}
    with subprocess.Popen([sys.executable, "-m", "cachemgr"], env=environment, cwd=ROOT) as process:
        try:
            deadline = time.monotonic() + patience(60)
            while (done := kvctl(environment, "quota", "list")).returncode:
                assert process.poll() is None
                assert time.monotonic() < deadline, done.stderr
            limited = kvctl(environment, "quota", "set", "--salt", "acme", "--device-ceiling", "1")
            assert limited.returncode == 0, limited.stderr
            answer: Manifest = json.loads(kvctl(environment, "ping", "--timeout", "1", "--output", "json").stdout)
        finally:
            process.terminate()
    found: dict[str, Any] = {one["name"]: one for one in answer["services"]}
    assert {found[name]["status"] for name in ("cachemgr", "admin")} == {"serving"}
    # The others are not here; where they would be is what the deployment calls them.
    for one in found.values():
        host, _, _ = one["address"].partition(":")
        assert host in servers
