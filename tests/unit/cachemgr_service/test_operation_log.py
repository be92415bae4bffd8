"""A log of operations leads to the state of the manager that wrote it."""

import io
import itertools
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from cachemgr import replay
from cachemgr.api import ManagerConfig
from cachemgr.dump import state_hash
from cachemgr.keys import Domain, child_key, pack, packed_bytes
from cachemgr.manager import CacheManager
from cachemgr.operations import ManagerClock, Operations
from cachemgr.oplog import OperationLog, OperationLogError
from cachemgr.process import CacheManagerProcess
from cachemgr.records import BlockRecord
from protos.kvcache.v1 import kvcache_pb2 as pb
from protos.rpc.errors import ServiceError
from tests.stack import ROOT
from tests.unit.cachemgr_service.conftest import Client, settings_for

CONFIG = ManagerConfig(capacity_ahead_tokens=0, free_watermark=0.0, pin_budget=0.25, copy_on_partial_reuse=False)


async def test_a_log_of_a_process_replays_to_its_state(tmp_path: Path) -> None:
    log = tmp_path / "operations"
    now = 5.0
    settings = settings_for(tmp_path, operation_log=log)
    process = CacheManagerProcess(settings, redis_url=f"unix://{tmp_path}/no-redis-here", clock=lambda: now)
    await process.start()
    client = Client(settings)
    await client.register()
    admitted = await client.admit("a", 14, salt="s", session_id="talk")
    await client.compute(admitted, 13)
    now = 6.5
    await client.admit("b", 30)
    with pytest.raises(Exception, match="ALREADY_EXISTS"):
        await client.admit("b", 31)
    await client.admin.SetQuota(
        pb.SetQuotaRequest(quota=pb.Quota(salt="s", device_floor_blocks=2, device_ceiling_blocks=9))
    )
    now = 8.0
    await client.admin.ForgetBlocks(pb.ForgetBlocksRequest(session_id="talk"))
    *_, last = [message async for message in client.admin.DumpState(pb.DumpStateRequest())]
    await client.close()
    await process.stop()
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    done = command("replay", str(log))
    *_, printed = done.stdout.strip().splitlines()
    assert printed == f"state {last.state_hash}"
    assert "of which refused 1" in done.stdout


def command(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-m", "cachemgr", *arguments], cwd=ROOT, capture_output=True, text=True)


def logged(*requests: pb.AdmitSequenceRequest, remembered: tuple[BlockRecord, ...] = ()) -> tuple[bytes, str]:
    """The log of a manager that is registered with and then asked, and its state."""
    file, clock = io.BytesIO(), ManagerClock(map(float, itertools.count(1)).__next__)
    manager = CacheManager(3, clock, CONFIG)
    operations = Operations(manager, clock, OperationLog(file, clock.now, 3, CONFIG))
    operations.run("RegisterScheduler", pb.RegisterSchedulerRequest(scheduler_id="s", scheduler_epoch=1))
    pools = [pb.PoolSpec(group=0, num_blocks=8, last_write_steps=[0] * 8 if remembered else ())]
    registration = pb.RegisterExecutorRequest(
        executor_id="e", executor_epoch=1, model_fingerprint=b"f", block_size=4, pools=pools
    )
    operations.register_executor(registration, remembered)
    for request in requests:
        operations.run("AdmitSequence", request)
    operations.expire()
    return file.getvalue(), state_hash(manager.state())


def admission(name: str) -> pb.AdmitSequenceRequest:
    return pb.AdmitSequenceRequest(
        sequence_id=name, scheduler_id="s", scheduler_epoch=1, executor_id="e", token_ids=range(6)
    )


def test_what_the_store_remembered_is_in_the_log() -> None:
    tokens = packed_bytes(pack(range(4)))
    record = BlockRecord(0, 2, child_key(Domain(b"f").key, tokens), None, 0, tokens, None, None, 0)
    data, state = logged(remembered=(record,))
    found = replay.replay(io.BytesIO(data)).manager
    assert state_hash(found.state()) == state
    assert found.pools()[0].cached_blocks == 1


def test_settings_come_back_from_the_log() -> None:
    data, _ = logged()
    assert replay.replay(io.BytesIO(data)).manager.config == CONFIG


def test_an_entry_that_a_crash_cut_short_ends_the_log() -> None:
    whole, _ = logged(admission("a"))
    found = replay.replay(io.BytesIO(whole[: len(whole) - 20]))
    # Both registrations: of the admission a part is missing.
    assert found.operations == 2
    assert not found.manager.check_pool()


def test_a_refused_call_is_refused_again() -> None:
    file, clock = io.BytesIO(), ManagerClock(lambda: 1.0)
    manager = CacheManager(3, clock, CONFIG)
    operations = Operations(manager, clock, OperationLog(file, clock.now, 3, CONFIG))
    with pytest.raises(ServiceError):
        operations.run("AdmitSequence", admission("a"))
    assert replay.replay(io.BytesIO(file.getvalue())).refused == 1


@pytest.mark.parametrize("data", [b"", b"\xff" * 40, b"\x03abc", b"hello world"])
def test_what_is_no_log_is_refused(data: bytes) -> None:
    with pytest.raises(OperationLogError):
        replay.replay(io.BytesIO(data))


def test_a_log_is_never_written_over(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("precious")
    with pytest.raises(FileExistsError):
        OperationLog.create(tmp_path / "log", 0.0, 1, CONFIG)
    assert (tmp_path / "log").read_text() == "precious"


def test_the_command_names_what_is_wrong(tmp_path: Path) -> None:
    done = command("replay", str(tmp_path / "missing"))
    assert done.returncode == 1
    assert "missing" in done.stderr
    assert "usage" in command("play").stderr
