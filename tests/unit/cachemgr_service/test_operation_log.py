"""A log of operations leads to the state of the manager that wrote it."""

import errno
import io
import itertools
import os
import resource
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import REGISTRY

from cachemgr.blocks.block_record import BlockRecord
from cachemgr.manager import CacheManager
from cachemgr.operators.state_dump import state_hash
from cachemgr.oplog import replay
from cachemgr.oplog import writer as oplog
from cachemgr.oplog.writer import OperationLog, OperationLogError
from cachemgr.process import OPERATION_LOG_HEALTH, CacheManagerProcess
from cachemgr.rpc.mutations import ManagerClock
from cachemgr.types import ManagerConfig
from protos.kvcache.v1 import kvcache_pb2 as pb
from protos.kvcache.v1 import kvcache_pb2_grpc as pb_grpc
from protos.kvcommon.block_keys import child_key, root_key
from protos.kvcommon.tokens import pack, packed_bytes
from protos.rpc.channel import open_sync_channel
from tests.stack import ROOT
from tests.support.cachemgr_client import Client, environment, settings_for
from tests.support.direct_calls import DirectCalls
from tests.support.patience import patience

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

CONFIG = ManagerConfig(capacity_ahead_tokens=0, free_watermark=0.0, pin_budget=0.25, copy_on_partial_reuse=False)


async def test_a_log_of_a_process_replays_to_its_state(tmp_path: Path) -> None:
    log = tmp_path / "operations"
    now = 5.0
    settings = settings_for(tmp_path, operation_log=log)
    process = CacheManagerProcess(settings, clock=lambda: now)
    await process.start()
    client = Client(settings)
    await client.register()
    admitted = await client.admit("a", 14, salt="s", session_id="talk")
    await client.compute(admitted, 13)
    # In steps shorter than the time between two calls of Expire: one in between finds no pause to make up for.
    now = 5.2
    await client.admit("b", 30)
    with pytest.raises(Exception, match="ALREADY_EXISTS"):
        await client.admit("b", 31)
    await client.admin.SetQuota(
        pb.SetQuotaRequest(quota=pb.Quota(salt="s", device_floor_blocks=2, device_ceiling_blocks=9))
    )
    now = 5.4
    await client.admin.ForgetBlocks(pb.ForgetBlocksRequest(session_id="talk"))
    *_, last = [message async for message in client.admin.DumpState(pb.DumpStateRequest())]
    await client.close()
    await process.stop()
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    done = command("replay", str(log))
    *_, printed = done.stdout.strip().splitlines()
    assert printed == f"state {last.state_hash}"
    assert "of which refused 1" in done.stdout


def command(*arguments: str, environment: dict[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
    line = [sys.executable, "-m", "cachemgr", *arguments]
    return subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=patience(60))


def settings_of_process(folder: Path, log: Path) -> dict[str, str]:
    return environment(folder, KVKEEP_CACHEMGR_OPERATION_LOG=str(log))


def register(operations: "DirectCalls | Calls", stored: tuple[BlockRecord, ...] = ()) -> None:
    operations.run("RegisterScheduler", pb.RegisterSchedulerRequest(scheduler_id="s", scheduler_epoch=1))
    pools = [pb.PoolSpec(group=0, num_blocks=8, last_write_steps=[0] * 8 if stored else ())]
    registration = pb.RegisterExecutorRequest(
        executor_id="e", executor_epoch=1, model_fingerprint=b"f", block_size=4, pools=pools
    )
    operations.register(registration, later=bool(stored))
    if stored:
        assert isinstance(operations, DirectCalls)
        operations.mutations.restore_blocks("e", 1, list(stored))
        operations.mutations.end_recovery("e", 1, [])


class Calls:
    """Operations over the wire."""

    def __init__(self, stub: pb_grpc.CacheManagerServiceStub) -> None:
        self._stub = stub

    def run(self, method: str, request: Any) -> Any:
        return getattr(self._stub, method)(request, timeout=patience(10))

    def register(self, request: pb.RegisterExecutorRequest, *, later: bool) -> Any:
        assert not later
        return self.run("RegisterExecutor", request)


def logged(*requests: pb.AdmitSequenceRequest, stored: tuple[BlockRecord, ...] = ()) -> tuple[bytes, str]:
    """The log of a manager that is registered with and then asked, and its state."""
    file, clock = io.BytesIO(), ManagerClock(map(float, itertools.count(1)).__next__)
    manager = CacheManager(3, clock, CONFIG)
    operations = DirectCalls(manager, clock, file)
    register(operations, stored)
    for request in requests:
        operations.run("AdmitSequence", request)
    operations.mutations.expire()
    return file.getvalue(), state_hash(manager.queries.state())


def admission(name: str) -> pb.AdmitSequenceRequest:
    return pb.AdmitSequenceRequest(
        sequence_id=name, scheduler_id="s", scheduler_epoch=1, executor_id="e", token_ids=range(6)
    )


def release(answer: pb.AdmitSequenceResponse, number: int) -> pb.SyncSequencesRequest:
    return pb.SyncSequencesRequest(
        scheduler_id="s",
        scheduler_epoch=1,
        manager_epoch=answer.manager_epoch,
        sync_number=number,
        released_handles=[answer.sequence_handle],
    )


def test_stored_blocks_are_in_the_log() -> None:
    tokens = packed_bytes(pack(range(4)))
    record = BlockRecord(0, 2, child_key(root_key(b"f", None, None), tokens), None, 0, tokens, None, None, 0)
    data, state = logged(stored=(record,))
    found = replay.replay(io.BytesIO(data)).manager
    assert state_hash(found.queries.state()) == state
    assert found.queries.pools()[0].cached_blocks == 1


def test_settings_are_restored_from_the_log() -> None:
    data, _ = logged()
    assert replay.replay(io.BytesIO(data)).manager.config == CONFIG


def test_an_entry_that_a_crash_cut_short_ends_the_log() -> None:
    whole, _ = logged(admission("a"))
    found = replay.replay(io.BytesIO(whole[: len(whole) - 20]))
    # Both registrations: of the admission a part is missing.
    assert found.operations == 2
    assert not found.manager.queries.check_pool()


@pytest.mark.parametrize("data", [b"", b"\xff" * 40, b"\x03abc", b"hello world"])
def test_what_is_no_log_is_refused(data: bytes) -> None:
    with pytest.raises(OperationLogError):
        replay.replay(io.BytesIO(data))


def test_a_log_is_never_written_over(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("precious")
    (tmp_path / "log.1").write_text("older")
    for epoch in (1, 2):
        OperationLog.create(tmp_path / "log", 0.0, epoch, CONFIG).close()
    assert (tmp_path / "log.1").read_text() == "older"
    assert (tmp_path / "log.2").read_text() == "precious"
    for name, epoch in (("log.3", 1), ("log", 2)):
        with (tmp_path / name).open("rb") as file:
            assert replay.replay(file).manager.epoch == epoch


def test_a_log_that_another_manager_still_writes_is_left_alone(tmp_path: Path) -> None:
    log = OperationLog.create(tmp_path / "log", 0.0, 1, CONFIG)
    with pytest.raises(OperationLogError, match=r"another cache manager writes .*KVKEEP_CACHEMGR_OPERATION_LOG"):
        OperationLog.create(tmp_path / "log", 0.0, 2, CONFIG)
    assert [one.name for one in tmp_path.iterdir()] == ["log"]
    log.close()
    OperationLog.create(tmp_path / "log", 0.0, 3, CONFIG).close()
    assert {one.name for one in tmp_path.iterdir()} == {"log", "log.1"}


@pytest.mark.parametrize("place", ["missing/log", "file/log", "folder"])
def test_a_log_that_cannot_be_is_refused_at_the_start_in_a_sentence(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    done = command(environment=settings_of_process(tmp_path, tmp_path / place))
    assert done.returncode == 1
    assert done.stderr.startswith(f"cachemgr: cannot create the operation log {tmp_path / place}: ")
    assert "Traceback" not in done.stderr


class SmallDisk(io.BytesIO):
    """A file on a disk with N = `room` bytes left."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room

    def write(self, data: "ReadableBuffer") -> int:
        room = self.room - self.tell()
        if room <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(bytes(data)[:room])


@pytest.mark.parametrize("room", [0, 1, 30, 400])
def test_a_full_disk_ends_the_log_and_no_call(room: int) -> None:
    begun, _ = logged()
    file, clock = SmallDisk(room), ManagerClock(map(float, itertools.count(1)).__next__)
    with structlog.testing.capture_logs() as records:
        file.room = room
        operations = DirectCalls(CacheManager(3, clock, CONFIG), clock, file)
        register(operations)
        for number in range(1, 11):
            admitted = operations.run("AdmitSequence", admission(str(number)))
            assert admitted.admitted
            # Space that is freed later makes no log whole again.
            file.room = 1 << 20 if len(file.getvalue()) > len(begun) else file.room
            operations.run("SyncSequences", release(admitted, number))
    assert [record["log_level"] for record in records] == ["error"]
    assert REGISTRY.get_sample_value("kvkeep_operation_log_ended") == 1
    # It ends after a whole entry.
    kept = file.getvalue()
    assert sum(1 for _ in oplog.read(io.BytesIO(kept))) == sum(1 for _ in oplog.read(io.BytesIO(kept + b"\x05abc")))


def fill_the_log_of(process: "subprocess.Popen[bytes]", folder: Path, room: int) -> None:
    with open_sync_channel(f"unix:{folder}/data") as data, open_sync_channel(f"unix:{folder}/admin") as admin:
        grpc.channel_ready_future(data).result(patience(30))
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (room, room))
        stub, health = pb_grpc.CacheManagerServiceStub(data), health_pb2_grpc.HealthStub(admin)
        register(Calls(stub))
        for number in range(1, 101):
            request = pb.AdmitSequencesRequest(admissions=[admission(str(number))])
            [admitted] = stub.AdmitSequences(request, timeout=patience(10)).answers
            assert admitted.admitted
            stub.SyncSequences(release(admitted, number), timeout=patience(10))
        states = health.Watch(health_pb2.HealthCheckRequest(service=OPERATION_LOG_HEALTH), timeout=patience(10))
        assert any(state.status == health_pb2.HealthCheckResponse.NOT_SERVING for state in states)
        states.cancel()
        status = health.Check(health_pb2.HealthCheckRequest(service=""), timeout=patience(10)).status
        assert status == health_pb2.HealthCheckResponse.SERVING


def test_a_process_serves_on_when_its_log_is_full_and_starts_again_after_a_kill(tmp_path: Path) -> None:
    log, room = tmp_path / "operations.log", 5000
    values = settings_of_process(tmp_path, log)
    for _ in range(2):
        with subprocess.Popen([sys.executable, "-m", "cachemgr"], cwd=ROOT, env=values) as process:
            try:
                fill_the_log_of(process, tmp_path, room)
            finally:
                process.kill()
        assert process.returncode == -signal.SIGKILL
    for path in (log, tmp_path / "operations.log.1"):
        assert path.stat().st_size <= room
        with path.open("rb") as file:
            assert replay.replay(file).operations > 10


def test_the_command_names_what_is_wrong(tmp_path: Path) -> None:
    done = command("replay", str(tmp_path / "missing"))
    assert done.returncode == 1
    assert "missing" in done.stderr
    assert "usage" in command("play").stderr
