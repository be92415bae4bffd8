"""Tokens of executors and schedulers that carry ids: no process can act as a different process."""

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor

from cachemgr.process import CacheManagerProcess
from protos.kvcache.v1 import kvcache_pb2 as pb
from protos.kvcache.v1 import kvcache_pb2_grpc as pb_grpc
from protos.rpc import files
from protos.rpc.channel import open_channel
from protos.rpc.errors import from_rpc_error
from protos.rpc.identity import Role
from protos.rpc.roles import roles_of
from tests.support.cachemgr_client import EXECUTOR, SCHEDULED, SCHEDULER, Client, settings_for
from tests.support.keyring import Keyring
from tests.support.patience import patience

DATA = pb.DESCRIPTOR.services_by_name["CacheManagerService"]


class Party:
    """A process with a token."""

    def __init__(self, keys: Keyring, role: Role, *ids: str) -> None:
        self.security = keys.add(role, ids=ids)

    async def call(self, address: str, method: str, request: object) -> str:
        """Reason of the refusal and the field that it names, empty for none."""
        async with open_channel(address, self.security) as channel:
            try:
                await getattr(pb_grpc.CacheManagerServiceStub(channel), method)(request, timeout=patience(5))
            except grpc.aio.AioRpcError as failed:
                error = from_rpc_error(failed)
                return f"{error.reason} {' '.join(error.fields)}"
        return ""


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Keyring:
    monkeypatch.setattr(files, "_LOOK_SECONDS", 0.0)
    return Keyring(tmp_path)


@pytest.fixture
async def address(keys: Keyring, tmp_path: Path) -> AsyncIterator[str]:
    settings = settings_for(tmp_path, tokens_file=keys.file)
    process = CacheManagerProcess(settings)
    await process.start()
    yield settings.cachemgr_address
    await process.stop()


async def test_a_stranger_locks_no_scheduler_out_and_frees_nothing_of_its_own(keys: Keyring, address: str) -> None:
    own = Party(keys, Role.SCHEDULER, SCHEDULER)
    stranger = Party(keys, Role.SCHEDULER, "other", "another")
    denied = "PERMISSION_DENIED scheduler_id"
    taken = pb.RegisterSchedulerRequest(scheduler_id=SCHEDULER, scheduler_epoch=1 << 63)
    assert await stranger.call(address, "RegisterScheduler", taken) == denied
    mine = pb.RegisterSchedulerRequest(scheduler_id=SCHEDULER, scheduler_epoch=1)
    assert await own.call(address, "RegisterScheduler", mine) == ""
    cut = pb.TruncateSequenceRequest(sequence_id="a", num_tokens=1, **SCHEDULED)
    assert await stranger.call(address, "TruncateSequence", cut) == denied
    assert await own.call(address, "TruncateSequence", cut) == ""
    admission = pb.AdmitSequenceRequest(sequence_id="a", executor_id=EXECUTOR, token_ids=[1], **SCHEDULED)
    several = pb.AdmitSequencesRequest(admissions=[pb.AdmitSequenceRequest(scheduler_id="other"), admission])
    assert await stranger.call(address, "AdmitSequences", several) == "PERMISSION_DENIED admissions[1].scheduler_id"


async def test_a_stranger_voids_no_executor(keys: Keyring, address: str) -> None:
    own, stranger = Party(keys, Role.EXECUTOR, EXECUTOR), Party(keys, Role.EXECUTOR, "gpu-1")
    registration = Client(settings_for(Path("/nowhere"))).registration()
    assert await own.call(address, "RegisterExecutor", registration) == ""
    registration.executor_epoch += 1
    denied = "PERMISSION_DENIED executor_id"
    assert await stranger.call(address, "RegisterExecutor", registration) == denied
    renewal = pb.RenewExecutorRequest(executor_id=EXECUTOR, executor_epoch=7)
    assert await stranger.call(address, "RenewExecutor", renewal) == denied
    confirmed = pb.ConfirmTransfersRequest(executor_id=EXECUTOR, executor_epoch=7, tickets=[1])
    assert await stranger.call(address, "ConfirmTransfers", confirmed) == denied
    assert await own.call(address, "ConfirmTransfers", confirmed) == ""


async def test_one_token_without_ids_speaks_as_any(keys: Keyring, address: str) -> None:
    shared = Party(keys, Role.SCHEDULER)
    for name in ("front", "back"):
        request = pb.RegisterSchedulerRequest(scheduler_id=name, scheduler_epoch=1)
        assert await shared.call(address, "RegisterScheduler", request) == ""


# Operators send hints too: they are about cached blocks, not about a sequence.
OWNED = [method for method in DATA.methods if method.name != "SendHints"]


@pytest.mark.parametrize("method", OWNED, ids=lambda method: method.name)
def test_every_call_of_an_executor_or_a_scheduler_says_whose_it_is(method: MethodDescriptor) -> None:
    (role,) = roles_of(f"{DATA.full_name}/{method.name}")
    messages = [method.input_type, *(field.message_type for field in method.input_type.fields if field.message_type)]
    assert any(f"{role}_id" in message.fields_by_name for message in messages)
