"""The command that asks a process for its health."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import certs
import pytest

from protos.rpc.probe import target
from protos.rpc.security import Security
from protos.rpc.server import Server
from tests.stack import ROOT
from tests.support.patience import patience
from tests.support.ports import free_address


def probe(*arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVKEEP_")}
    return subprocess.run(
        [sys.executable, "-m", "protos.rpc.probe", *arguments],
        env=environment | settings,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=patience(60),
        check=False,
    )


@pytest.mark.parametrize(
    ("listens", "reached"),
    [
        ("0.0.0.0:50051", "localhost:50051"),
        ("[::]:50051", "localhost:50051"),
        ("10.1.2.3:50051", "10.1.2.3:50051"),
        ("cachemgr:50052", "cachemgr:50052"),
        ("unix:/run/kvkeep/scheduler.sock", "unix:/run/kvkeep/scheduler.sock"),
    ],
)
def test_a_server_that_listens_everywhere_is_asked_here(listens: str, reached: str) -> None:
    assert target(listens) == reached


async def test_status_says_whether_a_process_serves() -> None:
    # A name of another process beside it changes nothing: settings of all three may stand in one environment.
    server = Server("executor", security=Security(insecure=True))
    server.listen("0.0.0.0:0", {})
    await server.start()
    address = server.addresses[0]
    settings = {"KVKEEP_EXECUTOR_ADDRESS": address, "KVKEEP_CACHEMGR_ADDRESS": free_address()}
    try:
        starting = await asyncio.to_thread(probe, "executor", **settings)
        server.set_serving(True)
        serving = await asyncio.to_thread(probe, "executor", **settings)
        other = await asyncio.to_thread(probe, "cachemgr", **settings)
    finally:
        await server.stop()
    assert (starting.returncode, starting.stderr) == (1, f"executor at {address}: it says that it does not serve\n")
    assert (serving.returncode, serving.stderr) == (0, "")
    assert other.returncode == 1
    assert "UNAVAILABLE" in other.stderr


async def test_a_server_that_asks_for_certificates_is_shown_one(tmp_path: Path) -> None:
    ca = certs.authority()
    trusted, _ = ca.write(tmp_path, "ca")
    cert, key = certs.certificate(ca, "executor").write(tmp_path, "executor")
    security = Security(tls_cert_file=cert, tls_key_file=key, tls_ca_file=trusted, tls_client_ca_file=trusted)
    server = Server("executor", security=security)
    server.listen("0.0.0.0:0", {})
    await server.start()
    server.set_serving(True)
    plain = {"KVKEEP_EXECUTOR_ADDRESS": server.addresses[0], "KVKEEP_INSECURE": "1"}
    files = {"TLS_CERT_FILE": cert, "TLS_KEY_FILE": key, "TLS_CA_FILE": trusted, "TLS_CLIENT_CA_FILE": trusted}
    try:
        assert (await asyncio.to_thread(probe, "executor", **plain)).returncode == 1
        done = await asyncio.to_thread(
            probe, "executor", **plain, **{f"KVKEEP_{name}": str(path) for name, path in files.items()}
        )
    finally:
        await server.stop()
    assert (done.returncode, done.stderr) == (0, "")


def test_wrong_use_says_what_is_right() -> None:
    assert probe().returncode == probe("redis").returncode == 2
    assert "KVKEEP_INSECUR" in probe("executor", KVKEEP_INSECUR="1").stderr
