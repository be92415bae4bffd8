"""People reach a server with grpcurl and no .proto at hand."""

import asyncio
import json
import shutil
import sys
from pathlib import Path

import pytest

from tests.unit.rpc.conftest import ADMIN, EVENTS, Served

GRPCURL = shutil.which("grpcurl", path=str(Path(sys.executable).parent)) or shutil.which("grpcurl")


async def grpcurl(*arguments: str) -> tuple[int, str]:
    assert GRPCURL is not None
    process = await asyncio.create_subprocess_exec(
        GRPCURL, "-plaintext", *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode is not None
    return process.returncode, output.decode()


@pytest.mark.skipif(GRPCURL is None, reason="no grpcurl beside the interpreter or on the PATH")
async def test_grpcurl_lists_describes_and_calls(served: Served) -> None:
    served.server.set_serving(True)
    address = served.address.removeprefix("unix:")
    code, listed = await grpcurl("-unix", address, "list")
    assert code == 0, listed
    assert {ADMIN, EVENTS, "grpc.health.v1.Health"} <= set(listed.split())
    code, described = await grpcurl("-unix", address, "describe", ADMIN)
    assert "rpc GetPool" in described, described
    code, answer = await grpcurl("-unix", "-d", '{"pool_id": "x"}', address, f"{ADMIN}/GetPool")
    assert list(json.loads(answer)["pool"].values()) == ["x"]
    code, answer = await grpcurl("-unix", "-d", f'{{"service": "{ADMIN}"}}', address, "grpc.health.v1.Health/Check")
    assert json.loads(answer) == {"status": "SERVING"}
    code, answer = await grpcurl("-unix", "-d", '{"pool_id": "field"}', address, f"{ADMIN}/GetPool")
    assert code != 0
    assert "InvalidArgument" in answer
