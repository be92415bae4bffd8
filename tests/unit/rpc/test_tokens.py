"""Tokens, roles and the audit log, with a real server and real channels."""

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.kvcache.v1 import kvcache_pb2 as pb
from protos.kvcache.v1 import kvcache_pb2_grpc as pb_grpc
from protos.rpc import audit, files, guard, roles, tokens
from protos.rpc.channel import open_channel, open_sync_channel
from protos.rpc.errors import InvalidField, from_rpc_error
from protos.rpc.identity import Identity, PermissionDeniedError, Role, UnauthenticatedError
from protos.rpc.security import Security
from protos.rpc.settings import ProcessSettings, SettingsError, load
from tests.support.keyring import Keyring
from tests.support.patience import patience
from tests.unit.rpc import conftest
from tests.unit.rpc.conftest import ADMIN, EVENTS, Events


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Keyring:
    monkeypatch.setattr(files, "_LOOK_SECONDS", 0.0)
    return Keyring(tmp_path)


@asynccontextmanager
async def serving(keys: Keyring, events: pb_grpc.CacheEventServiceServicer | None = None) -> AsyncIterator[str]:
    services = conftest.SERVICES | {
        EVENTS: lambda s: pb_grpc.add_CacheEventServiceServicer_to_server(events or Events(), s)
    }
    security = Security(tokens_file=keys.file, audit_file=keys.folder / "audit")
    async with conftest.serving(f"unix:{keys.folder}/s", services, security=security) as server:
        yield server.addresses[0]


async def code(address: str, security: Security, metadata: tuple[tuple[str, str], ...] = ()) -> grpc.StatusCode:
    async with open_channel(address, security) as channel:
        stub: pb_grpc.CacheAdminServiceAsyncStub = pb_grpc.CacheAdminServiceStub(channel)
        return await stub.PurgeBlocks(pb.PurgeBlocksRequest(), timeout=patience(10), metadata=metadata).code()


async def test_a_call_needs_a_token_whose_role_may_make_it(keys: Keyring) -> None:
    good, viewer = keys.add(Role.OPERATOR), keys.add(Role.VIEWER)
    expired = keys.add(Role.OPERATOR, lifetime=timedelta(seconds=-1))
    token = keys.tokens[good.token_file.name]
    async with serving(keys) as address:
        assert await code(address, good) is grpc.StatusCode.OK
        assert await code(address, viewer) is grpc.StatusCode.PERMISSION_DENIED
        assert await code(address, expired) is grpc.StatusCode.UNAUTHENTICATED
        for header in ("", token, f"Basic {token}", f"Bearer {token}x", "Bearer ", f"Bearer {'x' * 5000}"):
            given = (("authorization", header),)
            assert await code(address, Security(), given) is grpc.StatusCode.UNAUTHENTICATED, header
        # Two headers are none: the identity must not depend on which one is read.
        assert await code(address, good, (("authorization", f"Bearer {token}"),)) is grpc.StatusCode.UNAUTHENTICATED
        with open_sync_channel(address, viewer) as channel:
            sync: pb_grpc.CacheAdminServiceStub = pb_grpc.CacheAdminServiceStub(channel)
            answer = await asyncio.to_thread(sync.GetPool, pb.GetPoolRequest(pool_id="p"), timeout=patience(10))
            assert answer.pool.pool_id == "p"
            # Probes have no token.
            health = health_pb2_grpc.HealthStub(channel)
            await asyncio.to_thread(health.Check, health_pb2.HealthCheckRequest(), timeout=patience(10))


async def test_errors_say_nothing_of_what_is_known(keys: Keyring) -> None:
    expired = keys.add(Role.OPERATOR, lifetime=timedelta(seconds=-1))
    told = set()
    async with serving(keys) as address:
        for security, metadata in ((expired, ()), (Security(), ()), (Security(), (("authorization", "Bearer x"),))):
            async with open_channel(address, security) as channel:
                stub: pb_grpc.CacheAdminServiceAsyncStub = pb_grpc.CacheAdminServiceStub(channel)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await stub.PurgeBlocks(pb.PurgeBlocksRequest(), timeout=patience(10), metadata=metadata)
                told.add(str(from_rpc_error(caught.value)))
    assert told == {"UNAUTHENTICATED: a valid token is needed: authorization: Bearer TOKEN"}


async def test_streams_are_refused_before_anything_is_read(keys: Keyring) -> None:
    caller, viewer = keys.add(Role.CALLER), keys.add(Role.VIEWER)
    async with (
        serving(keys) as address,
        open_channel(address, caller) as denied,
        open_channel(address, viewer) as open_,
    ):
        for channel, expected in (
            (denied, grpc.StatusCode.PERMISSION_DENIED),
            (open_, grpc.StatusCode.RESOURCE_EXHAUSTED),
        ):
            stub: pb_grpc.CacheEventServiceAsyncStub = pb_grpc.CacheEventServiceStub(channel)
            call = stub.WatchEvents(pb.WatchEventsRequest(), timeout=patience(10))
            with pytest.raises(grpc.aio.AioRpcError):
                [event async for event in call]
            assert await call.code() is expected


async def test_tokens_come_and_go_without_a_restart(keys: Keyring) -> None:
    first = keys.add(Role.OPERATOR)
    async with serving(keys) as address:
        second = keys.add(Role.OPERATOR)
        assert await code(address, second) is grpc.StatusCode.OK
        lines = keys.file.read_text().splitlines()
        keys.file.write_text(lines[1] + "\n")
        assert await code(address, first) is grpc.StatusCode.UNAUTHENTICATED
        # A file that cannot be used changes nothing.
        keys.file.write_text("{}\n")
        assert await code(address, second) is grpc.StatusCode.OK
        # The token that is shown is read again, too.
        second.token_file.write_text("kvk_other")
        assert await code(address, second) is grpc.StatusCode.UNAUTHENTICATED


class Yielding(pb_grpc.CacheEventServiceServicer):
    """Sends an event, and waits for one that never comes."""

    async def WatchEvents(self, request: pb.WatchEventsRequest, context: Any) -> AsyncIterator[pb.WatchEventsResponse]:
        yield pb.WatchEventsResponse(events=[pb.Event(event_number=1)])
        await asyncio.Event().wait()


class Writing(pb_grpc.CacheEventServiceServicer):
    """The same service, which writes to the context."""

    async def WatchEvents(self, request: pb.WatchEventsRequest, context: Any) -> None:  # type: ignore[override]
        await context.write(pb.WatchEventsResponse(events=[pb.Event(event_number=1)]))
        await asyncio.Event().wait()


@pytest.mark.parametrize("events", [Yielding(), Writing()])
async def test_a_stream_ends_with_its_token(
    keys: Keyring, events: pb_grpc.CacheEventServiceServicer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "LOOK_SECONDS", 0.01)
    revoked, changed, kept = (keys.add(Role.VIEWER) for _ in range(3))
    async with contextlib.AsyncExitStack() as exits:
        address = await exits.enter_async_context(serving(keys, events))
        calls = []
        for viewer in (revoked, changed, kept):
            channel = await exits.enter_async_context(open_channel(address, viewer))
            stub: pb_grpc.CacheEventServiceAsyncStub = pb_grpc.CacheEventServiceStub(channel)
            calls.append(stub.WatchEvents(pb.WatchEventsRequest(), timeout=patience(10)))
            assert (await anext(aiter(calls[-1]))).events[0].event_number == 1
        _, other, same = keys.file.read_text().splitlines()
        keys.file.write_text(other.replace('"tenant":""', '"tenant":"acme"') + "\n" + same + "\n")
        for call in calls[:2]:
            assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
        assert not calls[2].done()
    ended = [json.loads(line) for line in (keys.folder / "audit").read_text().splitlines()]
    assert [line["caller"] for line in ended if line["outcome"] == "UNAUTHENTICATED"] == [
        revoked.token_file.name, changed.token_file.name,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda line: "secret-token", "line 1: is no JSON object"),
        (lambda line: line.replace('"operator"', '"root"'), "line 1: role: Input should be"),
        (lambda line: line.replace('"sha256"', '"token"'), "line 1: sha256: Field required"),
        (lambda line: f"{line}\n{line}", "line 2: name: is that of another line"),
        (lambda line: line.replace('"tenant":""', '"tenant":"a/b"'), "line 1: tenant: String should match"),
    ],
)
def test_a_tokens_file_says_which_line_is_wrong_and_never_what_it_says(
    keys: Keyring, spoil: Callable[[str], str], message: str
) -> None:
    keys.add(Role.OPERATOR)
    keys.file.write_text(spoil(keys.file.read_text().strip()))
    with pytest.raises(SettingsError, match=f"^KVKEEP_TOKENS_FILE: .*{message}") as caught:
        load(ProcessSettings, {"KVKEEP_TOKENS_FILE": str(keys.file)})
    assert "secret-token" not in str(caught.value)


def test_several_executors_or_schedulers_with_tokens_of_their_own_each_have_ids(keys: Keyring) -> None:
    keys.add(Role.EXECUTOR)
    keys.add(Role.SCHEDULER)
    load(ProcessSettings, {"KVKEEP_TOKENS_FILE": str(keys.file)})
    keys.add(Role.EXECUTOR, ids=("gpu-1",))
    with pytest.raises(SettingsError, match="line 3: ids: are needed where several tokens have the role executor"):
        load(ProcessSettings, {"KVKEEP_TOKENS_FILE": str(keys.file)})
    entry, *others = keys.file.read_text().splitlines()
    keys.file.write_text("\n".join([entry.replace('"ids":[]', '"ids":["gpu-0"]'), *others]))
    load(ProcessSettings, {"KVKEEP_TOKENS_FILE": str(keys.file)})


def test_only_executors_and_schedulers_have_ids() -> None:
    _, entry = tokens.new(Role.EXECUTOR, "", ids=("gpu-0", "gpu-1"))
    assert entry.identity.ids == ("gpu-0", "gpu-1")
    for role in (Role.CALLER, Role.OPERATOR, Role.VIEWER):
        with pytest.raises(ValueError, match="only a scheduler or an executor has ids"):
            tokens.new(role, "acme", ids=("gpu-0",))


def test_a_tokens_file_that_others_can_read_is_refused(keys: Keyring) -> None:
    for mode in (0o644, 0o620, 0o601):
        keys.file.chmod(mode)
        with pytest.raises(SettingsError, match=f"KVKEEP_TOKENS_FILE: .* has mode {mode:o}"):
            load(ProcessSettings, {"KVKEEP_TOKENS_FILE": str(keys.file)})
    keys.file.chmod(0o640)
    load(ProcessSettings, {"KVKEEP_TOKENS_FILE": str(keys.file)})


async def test_what_operators_do_is_written_down_without_prompts(keys: Keyring) -> None:
    operator = keys.add(Role.OPERATOR, "acme")
    async with serving(keys) as address, open_channel(address, operator) as channel:
        admin: pb_grpc.CacheAdminServiceAsyncStub = pb_grpc.CacheAdminServiceStub(channel)
        prefix = pb.PrefixSelector(salt="acme/x", token_ids=[4711])
        await admin.PurgeBlocks(pb.PurgeBlocksRequest(filter=pb.BlockFilter(prefix=prefix)), timeout=patience(10))
        await admin.GetPool(pb.GetPoolRequest(pool_id="field"), timeout=patience(10)).code()
        await code(address, Security(), (("authorization", "Bearer secret"),))
    written = (keys.folder / "audit").read_text()
    purge, get, refused = (json.loads(line) for line in written.splitlines())
    assert purge["request"] == {"filter": {"prefix": {"salt": "acme/x"}}}
    assert (purge["caller"], purge["role"], purge["tenant"]) == (operator.token_file.name, "operator", "acme")
    assert (purge["method"], purge["outcome"]) == (f"{ADMIN}/PurgeBlocks", "OK")
    assert get["outcome"] == "INVALID_ARGUMENT"
    assert (refused["event"], refused["outcome"], refused["caller"]) == ("call denied", "UNAUTHENTICATED", "")
    assert (keys.folder / "audit").stat().st_mode & 0o777 == 0o600
    assert "secret" not in written
    assert "4711" not in written


async def test_many_refusals_are_few_lines_and_none_is_lost(keys: Keyring, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "_WINDOW_SECONDS", 60.0)
    with structlog.testing.capture_logs() as logs:
        async with serving(keys) as address, open_channel(address) as channel:
            stub: pb_grpc.CacheAdminServiceAsyncStub = pb_grpc.CacheAdminServiceStub(channel)
            for _ in range(100):
                await stub.PurgeBlocks(pb.PurgeBlocksRequest(), timeout=patience(10)).code()
    counts = [entry["count"] for entry in logs if entry["event"] == "call denied"]
    assert sum(counts) == 100
    assert len(counts) < 50


def test_operators_of_all_tenants_may_send_hints_and_that_is_written_down() -> None:
    hints, step = (f"kvcache.v1.CacheManagerService/{name}" for name in ("SendHints", "SyncSequences"))
    assert roles.roles_of(hints) == {Role.SCHEDULER, Role.OPERATOR}
    assert roles.roles_of(step) == {Role.SCHEDULER}
    assert (roles.is_whole(hints), roles.is_audited(hints), roles.is_audited(step)) == (True, True, False)


def test_a_salt_is_bound_so_that_no_other_tenant_can_name_it() -> None:
    acme, acme2 = (Identity("n", Role.CALLER, tenant) for tenant in ("acme", "acme-2"))
    assert [acme.bound_salt(salt) for salt in (None, "x", "acme", "../acme-2")] == [
        "acme", "acme/x", "acme/acme", "acme/../acme-2",
    ]  # fmt: skip
    assert not any(acme.owns(salt) for salt in (None, "x", "acme-2", "acme-2/x", "/acme", ""))
    assert not any(acme2.owns(acme.bound_salt(salt)) for salt in (None, "x", "-2/x"))
    assert acme.bound_salt("é" * 125) is not None
    for wrong in ("", "é" * 126):
        with pytest.raises(InvalidField, match=r"cache\.salt"):
            acme.bound_salt(wrong)
    chosen = Identity("n", Role.CALLER, "acme", ("a", "b"))
    assert [chosen.bound_salt(salt) for salt in (None, "b")] == ["acme/a", "acme/b"]
    with pytest.raises(PermissionDeniedError):
        chosen.bound_salt("c")
    assert Identity("n", Role.OPERATOR).bound_salt(None) is None


def test_a_token_is_made_by_a_command(tmp_path: Path) -> None:
    made = subprocess.run(
        [sys.executable, "-m", "protos.rpc.tokens", "new", "--role", "caller", "--tenant", "acme", "--name", "app"],
        capture_output=True, text=True, check=True, timeout=patience(60),
    )  # fmt: skip
    file, token = tmp_path / "tokens", made.stdout.strip()
    file.touch(mode=0o600)
    file.write_text(f"# {'comment'}\n\n" + made.stderr.splitlines()[-1])
    known = tokens.Tokens(file)
    assert known.identify(f"Bearer {token}") == Identity("app", Role.CALLER, "acme")
    assert token not in file.read_text()
    with pytest.raises(UnauthenticatedError):
        known.identify(f"Bearer {token[:-1]}")


async def test_a_forwarded_read_of_prompts_is_written_each_time(keys: Keyring) -> None:
    forwarded = (("x-forwarded-for", "10.1.2.3:4"),)
    async with serving(keys) as address, open_channel(address, keys.add(Role.OPERATOR)) as channel:
        admin: pb_grpc.CacheAdminServiceAsyncStub = pb_grpc.CacheAdminServiceStub(channel)
        for prompts in (False, False, True, True):
            request = pb.ListBlocksRequest(pool_id="p", include_token_ids=prompts)
            await admin.ListBlocks(request, timeout=patience(10), metadata=forwarded).code()
    lines = [json.loads(line) for line in (keys.folder / "audit").read_text().splitlines()]
    assert [line["request"].get("include_token_ids", False) for line in lines] == [False, True, True]
    assert all(line["peer"].endswith(" for 10.1.2.3:4") for line in lines)
