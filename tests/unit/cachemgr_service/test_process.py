"""The cache manager as a process: quick to start, light, and orderly at its end."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2

from protos.kvcache.v1 import kvcache_pb2 as pb
from protos.rpc.errors import from_rpc_error
from tests.support.cachemgr_client import NUM_BLOCKS, Client, environment, settings_for, wait_until_serving
from tests.support.local_redis import LocalRedis
from tests.support.patience import patience

SERVING = health_pb2.HealthCheckResponse.SERVING


def test_without_a_redis_it_says_so_serves_and_stops_cleanly(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "cachemgr"]
    with subprocess.Popen(command, env=environment(tmp_path), stderr=subprocess.PIPE, text=True) as process:
        wait_until_serving(f"unix:{tmp_path}/data", "kvcache.v1.CacheManagerService")
        wait_until_serving(f"unix:{tmp_path}/admin", "kvcache.v1.CacheAdminService")
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=patience(20))
        assert process.returncode == 0, log
    assert "a restart of the cache manager loses the cache" in log
    assert '"event": "stopped"' in log
    assert "Traceback" not in log
    assert not (tmp_path / "data").exists()


def test_it_imports_nothing_that_takes_long() -> None:
    program = "import sys, cachemgr.__main__, cachemgr.process; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    modules = {name.partition(".")[0] for name in run.stdout.split()}
    assert "grpc" in modules
    assert not modules & {"torch", "triton", "transformers", "numpy", "scheduler", "executor", "kernels"}
    # The address of metrics, which have a separate setting.
    assert not modules & {"starlette", "fastapi", "uvicorn"}


def test_a_mistake_in_the_environment_is_one_line(tmp_path: Path) -> None:
    for values, words in (
        ({"KVKEEP_CACHEMGR_LEASE_SECOND": "1"}, "did you mean KVKEEP_CACHEMGR_LEASE_SECONDS?"),
        ({"KVKEEP_CACHEMGR_ADDRESS": "0.0.0.0:0"}, "KVKEEP_CACHEMGR_ADDRESS"),
        ({"KVKEEP_REDIS_URL": "nonsense"}, "KVKEEP_REDIS_URL"),
        ({"KVKEEP_CACHEMGR_KEY_INDEX": "1"}, "KVKEEP_CACHEMGR_KEY_INDEX needs KVKEEP_REDIS_URL"),
    ):
        run = subprocess.run(
            [sys.executable, "-m", "cachemgr"],
            env=environment(tmp_path, **values),
            capture_output=True,
            text=True,
            timeout=patience(20),
        )
        assert run.returncode != 0
        assert words in run.stderr.splitlines()[-1]
        assert "Traceback" not in run.stderr


@asynccontextmanager
async def running(folder: Path, **values: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """The process from serving on; killed at the end if it still runs."""
    command = [sys.executable, "-m", "cachemgr"]
    variables = environment(folder, **values)
    process = await asyncio.create_subprocess_exec(*command, env=variables, stderr=subprocess.DEVNULL)
    try:
        await asyncio.to_thread(wait_until_serving, f"unix:{folder}/data", "")
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_on_sigterm_it_ends_its_watches_writes_pending_changes_and_exits(
    tmp_path: Path, server: LocalRedis
) -> None:
    client = Client(settings_for(tmp_path))
    # So long that nothing would be written before the end.
    async with running(tmp_path, KVKEEP_REDIS_URL=server.url, KVKEEP_CACHEMGR_REDIS_FLUSH_SECONDS="60") as process:
        await client.register()
        watch = client.events.WatchEvents(pb.WatchEventsRequest(), timeout=patience(30))
        admitted = await client.admit("a", 9)
        await client.compute(admitted, 8, step=5)
        process.terminate()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            _ = [message async for message in watch]
        error = from_rpc_error(caught.value)
        assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "SHUTTING_DOWN")
        async with asyncio.timeout(patience(10)):
            assert await process.wait() == 0
    async with running(tmp_path, KVKEEP_REDIS_URL=server.url):
        steps = [5 if slot in admitted.block_tables[0].slots else 0 for slot in range(1, NUM_BLOCKS + 1)]
        assert (await client.register(last_write_steps=tuple(steps))).restored_blocks == 2
    await client.close()


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (signal.SIGKILL, "error: the connection to {address} broke\n"),
        (signal.SIGTERM, "error: the cache manager is shutting down\n"),
    ],
)
async def test_kvctl_says_that_a_watch_broke_and_fails(tmp_path: Path, number: signal.Signals, said: str) -> None:
    address = f"unix:{tmp_path}/admin"
    client = Client(settings_for(tmp_path))
    async with running(tmp_path) as process:
        await client.register()
        admitted = await client.admit("a", 9)
        await client.compute(admitted, 8, step=5)
        watch = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "kvctl", "watch", "--server", address),
            env=environment(tmp_path),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        assert watch.stdout is not None
        assert await asyncio.wait_for(watch.stdout.readline(), patience(20))
        process.send_signal(number)
        _, err = await asyncio.wait_for(watch.communicate(), patience(20))
    assert (watch.returncode, err.decode()) == (3, said.format(address=address))
    await client.close()
