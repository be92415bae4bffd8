"""A call that fails inside ends the process: no caller gets an answer from a state that is half changed."""

import asyncio
import json
import os
import signal
from pathlib import Path

import grpc
import pytest

import cachemgr.process
from cachemgr.process import CacheManagerProcess, failed_state
from protos.kvcache.v1 import kvcache_pb2 as pb
from protos.rpc.server import StopSignals
from tests.support.cachemgr_client import BLOCK_SIZE, EXECUTOR, NUM_BLOCKS, Client, settings_for
from tests.support.patience import patience

PROMPT = [987_654 + place for place in range(9)]


async def test_a_call_that_fails_inside_ends_the_process_with_its_state_in_a_file(tmp_path: Path) -> None:
    settings = settings_for(tmp_path).model_copy(update={"state_dir": tmp_path / "state"})
    process = CacheManagerProcess(settings)
    await process.start()
    serving = asyncio.create_task(process.run_until_stopped(StopSignals()))
    client = Client(settings)
    await client.register()
    assert (await client.admit("first", PROMPT)).admitted
    # As a fault of the manager would: it counts more slots as free than there are.
    manager = process._manager
    manager._state.executors[EXECUTOR].pools[0].device.used -= NUM_BLOCKS
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await client.admit("second", NUM_BLOCKS * BLOCK_SIZE)
    assert failed.value.code() is grpc.StatusCode.INTERNAL
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await client.admit("first", PROMPT)
    # Cancelled if the server closes while the call is under way. Callers take both as a manager that is away.
    assert refused.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
    with pytest.raises(AssertionError):
        await asyncio.wait_for(serving, patience(20))
    await client.close()
    file = tmp_path / "state" / failed_state()
    assert file.stat().st_mode & 0o777 == 0o600
    kinds = {json.loads(line)["kind"] for line in file.read_text().splitlines()}
    assert {"manager", "scheduler", "executor", "sequence"} <= kinds
    assert str(PROMPT[0]) not in file.read_text()


async def test_a_request_that_cannot_be_read_does_not_end_the_process(client: Client) -> None:
    await client.register()
    request = pb.AdmitSequencesRequest(admissions=[pb.AdmitSequenceRequest()])
    with pytest.raises(grpc.aio.AioRpcError):
        await client.manager.AdmitSequences(request, timeout=patience(5))
    assert (await client.admit("first", PROMPT)).admitted


async def test_a_signal_right_after_the_start_drains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # It takes long enough that a supervisor's signal can come in it: callers reach the process by then.
    monkeypatch.setattr(cachemgr.process, "collect_rarely", lambda: os.kill(os.getpid(), signal.SIGTERM))
    await asyncio.wait_for(cachemgr.process._run(settings_for(tmp_path)), patience(20))
