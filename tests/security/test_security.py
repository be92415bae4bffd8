"""Certificates, roles and tenants of the real stack."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from datetime import timedelta
from http.client import HTTPConnection, HTTPSConnection
from pathlib import Path
from typing import Any

import certs
import grpc
import pytest

from protos.execution.v1 import execution_pb2
from protos.generation.v1 import generation_pb2 as pb
from protos.generation.v1 import generation_pb2_grpc as rpc
from protos.kvcache.v1 import kvcache_pb2 as kv
from protos.kvcache.v1 import kvcache_pb2_grpc as kv_rpc
from protos.kvcommon.v1 import kvcommon_pb2 as common
from protos.rpc.channel import open_channel
from protos.rpc.errors import RemoteError, from_rpc_error
from protos.rpc.identity import Role
from protos.rpc.roles import roles_of
from protos.rpc.security import Security
from protos.vllm import engine_pb2
from tests.security.probes import attack, crowd_for
from tests.security.stage import ATTACKER, MAX_TENANT_REQUESTS, PROMPT, VICTIM, Stage, context, request
from tests.stack import ROOT
from tests.support.patience import patience

pytestmark = pytest.mark.model

PROBES = 240
POOL = "executor-0/0"


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with Stage(tmp_path_factory.mktemp("security"), crowd_for(PROBES)) as running:
        yield running


async def remote(call: Any) -> RemoteError:
    """The error that a call ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (call if isinstance(call, grpc.aio.UnaryUnaryCall) else call.read())
    return from_rpc_error(caught.value)


async def test_cross_tenant_probes_find_nothing_and_all_are_logged(stage: Stage) -> None:
    found = await attack(stage, PROBES)
    assert (found.hits, found.leaks) == (0, [])
    assert found.logged == found.count == PROBES
    assert set(found.outcomes) == {"OK", "PERMISSION_DENIED", "NOT_FOUND", "HTTP 200", "HTTP 401"}


async def refused(channel: grpc.aio.Channel, method: str, *, known: bool) -> grpc.StatusCode:
    """How a call ends. known: a process soon knows the caller's token, as it looks at its files once a second."""
    async with asyncio.timeout(patience(30)):
        while True:
            code: grpc.StatusCode = await channel.stream_stream(f"/{method}")().code()
            if not known or code is not grpc.StatusCode.UNAUTHENTICATED:
                return code
            await asyncio.sleep(0.1)


def services() -> Iterator[tuple[str, str]]:
    """Every method and its process."""
    for file in (kv, pb, execution_pb2, engine_pb2):
        for service in file.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                yield service.full_name, method.name


async def test_every_method_refuses_those_without_its_role(stage: Stage) -> None:
    stack = stage.stack
    addresses = {
        "kvcache.v1.CacheAdminService": stack.admin,
        "kvcache.v1.CacheEventService": stack.admin,
        "kvcache.v1.CacheManagerService": stack.cachemgr,
        "execution.v1.ExecutorService": stack.executor,
        "generation.v1.SchedulerAdminService": stack.scheduler,
        "generation.v1.EngineService": stack.scheduler,
        "generation.v1.GenerationService": stack.scheduler,
        "vllm.grpc.engine.VllmEngine": stack.scheduler,
    }
    # This stack has no router.
    assert addresses.keys() == {service for service, _ in services()} - {"generation.v1.RouterService"}
    nobody = stage.tls
    # Processes have tokens already, and a second one without ids would be refused.
    tokens = {
        role: replace(nobody, token_file=stack.own[role.value]["token_file"])
        if role.value in stack.own
        else stage.keys.add(role, ATTACKER if role is Role.CALLER else "")
        for role in Role
    }
    for service, address in addresses.items():
        for role, security in [(None, nobody), *tokens.items()]:
            async with open_channel(address, security) as channel:
                for method in [f"{of}/{name}" for of, name in services() if of == service]:
                    if role in roles_of(method):
                        continue
                    expected = grpc.StatusCode.PERMISSION_DENIED if role else grpc.StatusCode.UNAUTHENTICATED
                    assert await refused(channel, method, known=bool(role)) is expected, (method, role)
    async with stage.admin(tokens[Role.VIEWER]) as channel:
        admin: kv_rpc.CacheAdminServiceAsyncStub = kv_rpc.CacheAdminServiceStub(channel)
        assert (await admin.ListPools(kv.ListPoolsRequest(), timeout=patience(10))).pools
        assert (
            await remote(admin.PurgeBlocks(kv.PurgeBlocksRequest(), timeout=patience(10)))
        ).reason == "PERMISSION_DENIED"
    # A scheduler that is stopped is stopped for all.
    async with stage.scheduler(stage.tenants[ATTACKER][Role.OPERATOR]) as channel:
        drain: rpc.SchedulerAdminServiceAsyncStub = rpc.SchedulerAdminServiceStub(channel)
        assert (
            await remote(drain.SetDraining(pb.SetDrainingRequest(), timeout=patience(10)))
        ).reason == "PERMISSION_DENIED"
    async with open_channel(stack.cachemgr, stage.tenants[ATTACKER][Role.OPERATOR]) as channel:
        hint: kv_rpc.CacheManagerServiceAsyncStub = kv_rpc.CacheManagerServiceStub(channel)
        assert (await remote(hint.SendHints(kv.SendHintsRequest(), timeout=patience(10)))).reason == "PERMISSION_DENIED"
    async with stage.admin(tokens[Role.VIEWER]) as channel:
        admin = kv_rpc.CacheAdminServiceStub(channel)
        prompts = kv.ListBlocksRequest(pool_id=POOL, include_token_ids=True)
        assert list((await remote(admin.ListBlocks(prompts, timeout=patience(10)))).fields) == ["include_token_ids"]


async def test_processes_refuse_expired_and_foreign_certificates(stage: Stage, tmp_path: Path) -> None:
    foreign = certs.authority()
    wrong = {
        "none": Security(tls_ca_file=stage.tls.tls_ca_file),
        "foreign": _with(stage.tls, certs.certificate(foreign, "foreign"), tmp_path / "foreign"),
        "expired": _with(
            stage.tls, certs.certificate(stage.ca, "peer", lifetime=timedelta(minutes=-1)), tmp_path / "expired"
        ),
        "foreign CA": replace(stage.tls, tls_ca_file=foreign.write(tmp_path, "ca")[0]),
        "plain": Security(),
    }
    for address in (stage.stack.scheduler, stage.stack.cachemgr, stage.stack.admin, stage.stack.executor):
        for name, security in wrong.items():
            async with open_channel(address, security) as channel:
                call = channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=patience(10))
                assert await call.code() is grpc.StatusCode.UNAVAILABLE, (address, name)
    for address, path in stage.pages.items():
        assert await asyncio.to_thread(_status, address, path, stage.tls) in (200, 401), address
        for name, security in wrong.items():
            if (path, name) == ("/metrics", "none"):
                # Supervisors without a certificate may ask for health at this address, and for nothing else.
                assert await asyncio.to_thread(_status, address, path, security) == 403
                assert await asyncio.to_thread(_status, address, "/health", security) == 200
                continue
            with pytest.raises((ssl.SSLError, ConnectionError)):
                await asyncio.to_thread(_status, address, path, security)


def _status(address: str, path: str, tls: Security) -> int:
    """What a GET is answered."""
    plain = tls.tls_ca_file is None
    connection = (
        HTTPConnection(address, timeout=patience(10)) if plain else HTTPSConnection(address, context=context(tls))
    )
    with contextlib.closing(connection):
        connection.request("GET", path)
        return connection.getresponse().status


def _with(tls: Security, pair: certs.Pair, folder: Path) -> Security:
    cert, key = pair.write(folder, "other")
    return replace(tls, tls_cert_file=cert, tls_key_file=key)


def test_the_client_command_shows_its_token_and_certificate(stage: Stage) -> None:
    def generate(**more: str | None) -> subprocess.CompletedProcess[str]:
        caller = stage.tenants[VICTIM][Role.CALLER]
        settings = {
            "KVKEEP_TLS_CA_FILE": str(caller.tls_ca_file),
            "KVKEEP_TLS_CERT_FILE": str(caller.tls_cert_file),
            "KVKEEP_TLS_KEY_FILE": str(caller.tls_key_file),
            "KVKEEP_TOKEN_FILE": str(caller.token_file),
        } | more
        environment = {**os.environ, **{name: value for name, value in settings.items() if value}}
        command = [sys.executable, "-m", "scheduler.generate", "--address", stage.stack.scheduler, "--max-tokens", "2"]
        return subprocess.run(
            [*command, "Hello"],
            env=environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=patience(60),
            check=False,
        )

    assert generate().returncode == 0
    refused = generate(KVKEEP_TOKEN_FILE=None)
    assert (refused.returncode, "a valid token is needed" in refused.stderr) == (1, True)


@pytest.fixture
async def own_admin(stage: Stage) -> AsyncIterator[kv_rpc.CacheAdminServiceAsyncStub]:
    async with stage.admin(stage.tenants[ATTACKER][Role.OPERATOR]) as channel:
        yield kv_rpc.CacheAdminServiceStub(channel)


async def test_a_tenants_operator_sees_and_changes_only_its_tenants_blocks(
    stage: Stage, own_admin: kv_rpc.CacheAdminServiceAsyncStub
) -> None:
    prompt = tuple(range(3000, 3064))
    async with stage.scheduler(stage.tenants[ATTACKER][Role.CALLER]) as channel:
        stub: rpc.GenerationServiceAsyncStub = rpc.GenerationServiceStub(channel)
        asked = request(prompt, salt="mine", session_id="s")
        hits = [
            [message async for message in stub.StreamGenerate(asked, timeout=patience(60))][-1].usage for _ in range(2)
        ]
    assert [usage.cached_tokens for usage in hits] == [0, len(prompt) - 1]
    salt = f"{ATTACKER}/mine"
    async with stage.admin(stage.root) as channel:
        root: kv_rpc.CacheAdminServiceAsyncStub = kv_rpc.CacheAdminServiceStub(channel)
        async with asyncio.timeout(patience(60)):
            # Blocks are released after the last answer.
            while (await root.ListSequences(kv.ListSequencesRequest(salt=salt), timeout=patience(10))).sequences:
                await asyncio.sleep(0.05)
    blocks = (await own_admin.ListBlocks(kv.ListBlocksRequest(pool_id=POOL), timeout=patience(10))).blocks
    assert {(block.salt, block.tenant_id, block.session_id) for block in blocks} == {(salt, ATTACKER, f"{ATTACKER}/s")}
    prefix = kv.PrefixSelector(salt=salt, token_ids=prompt)
    pin = kv.PinPrefixRequest(prefix=prefix, owner="me", duration={"seconds": 60})  # type: ignore[arg-type]
    pinned = await own_admin.PinPrefix(pin, timeout=patience(10))
    assert pinned.receipt.num_blocks
    holds = (await own_admin.ListHolds(kv.ListHoldsRequest(), timeout=patience(10))).holds
    assert [hold.owner for hold in holds] == ["me"]
    await own_admin.ReleaseHold(kv.ReleaseHoldRequest(name=pinned.hold_name), timeout=patience(10))
    explained = await own_admin.ExplainPrefix(kv.ExplainPrefixRequest(prefix=prefix), timeout=patience(10))
    assert explained.explanations[0].cached_tokens
    purge = kv.PurgeBlocksRequest(filter=kv.BlockFilter(salt=salt), validate_only=True)
    assert (await own_admin.PurgeBlocks(purge, timeout=patience(10))).purged_blocks == len(blocks)
    pool = (await own_admin.ListPools(kv.ListPoolsRequest(), timeout=patience(10))).pools[0]
    assert (pool.pool_id, pool.used_blocks, pool.free_blocks, pool.queried_tokens) == (POOL, 0, 0, 0)
    forgotten = await own_admin.ForgetBlocks(kv.ForgetBlocksRequest(session_id=f"{ATTACKER}/s"), timeout=patience(10))
    assert sum(count.num_blocks for count in forgotten.removed) == len(blocks)
    assert not (await own_admin.ListBlocks(kv.ListBlocksRequest(pool_id=POOL), timeout=patience(10))).blocks


async def test_a_pin_of_a_tenant_displaces_no_other_tenants_pin(
    stage: Stage, own_admin: kv_rpc.CacheAdminServiceAsyncStub
) -> None:
    async with stage.admin(stage.root) as channel:
        root: kv_rpc.CacheAdminServiceAsyncStub = kv_rpc.CacheAdminServiceStub(channel)
        total = (await root.GetPool(kv.GetPoolRequest(pool_id=POOL), timeout=patience(10))).pool.total_blocks
        budget = total // 10
        salts = [stage.tenants[name][Role.CALLER] for name in (VICTIM, ATTACKER)]
        prompt = tuple(5000 + index % 4000 for index in range(16 * (budget - 1) + 1))
        for caller in salts:
            async with stage.scheduler(caller) as generation:
                stub: rpc.GenerationServiceAsyncStub = rpc.GenerationServiceStub(generation)
                [_ async for _ in stub.StreamGenerate(request(prompt), timeout=patience(60))]

        def pin(tenant: str) -> kv.PinPrefixRequest:
            prefix = kv.PrefixSelector(salt=tenant, token_ids=prompt)
            return kv.PinPrefixRequest(prefix=prefix, owner="x", duration={"seconds": 60})  # type: ignore[arg-type]

        first = await root.PinPrefix(pin(VICTIM), timeout=patience(10))
        assert first.hold_name
        answer = await own_admin.PinPrefix(pin(ATTACKER), timeout=patience(10))
        assert (answer.hold_name, answer.receipt.outcome) == ("", common.Outcome.OUTCOME_REJECTED)
        assert not answer.degraded_hold_names
        held = (await root.ListHolds(kv.ListHoldsRequest(owner="x"), timeout=patience(10))).holds
        assert [hold.name for hold in held] == [first.hold_name]
        await root.ReleaseHold(kv.ReleaseHoldRequest(name=first.hold_name), timeout=patience(10))
        mine = await own_admin.PinPrefix(pin(ATTACKER), timeout=patience(10))
        assert mine.hold_name
        await own_admin.ReleaseHold(kv.ReleaseHoldRequest(name=mine.hold_name), timeout=patience(10))


async def test_live_requests_of_others_are_as_if_they_were_not_there(
    stage: Stage, own_admin: kv_rpc.CacheAdminServiceAsyncStub
) -> None:
    async with (
        stage.scheduler(stage.tenants[VICTIM][Role.CALLER]) as victim,
        stage.scheduler(stage.tenants[ATTACKER][Role.CALLER]) as attacker,
        stage.admin(stage.root) as root_channel,
    ):
        root: kv_rpc.CacheAdminServiceAsyncStub = kv_rpc.CacheAdminServiceStub(root_channel)
        stubs = [rpc.GenerationServiceStub(victim), rpc.GenerationServiceStub(attacker)]
        long = pb.StreamGenerateRequest(request_id="r", text="Once", max_tokens=4000, ignore_eos=True)
        running = stubs[0].StreamGenerate(long, timeout=patience(60))
        assert await running.read()
        short = request()
        short.request_id = "r"
        assert (await remote(stubs[0].StreamGenerate(short, timeout=patience(60)))).reason == "REQUEST_EXISTS"
        assert [message async for message in stubs[1].StreamGenerate(short, timeout=patience(60))]
        # Sequences that have ended are listed until the scheduler's next sync.
        listed = (await root.ListSequences(kv.ListSequencesRequest(salt=VICTIM), timeout=patience(10))).sequences
        [live] = [one for one in listed if one.sequence_id.startswith("r#")]
        assert (live.salt, live.tenant_id) == (VICTIM, VICTIM)
        told = [
            str(await remote(own_admin.ExplainPrefix(kv.ExplainPrefixRequest(sequence_id=name), timeout=patience(10))))
            for name in (live.sequence_id, "none")
        ]
        assert told[0].replace(live.sequence_id, "none") == told[1]
        running.cancel()


async def test_a_tenant_has_so_many_requests_and_others_have_theirs(stage: Stage) -> None:
    async with (
        stage.scheduler(stage.tenants[VICTIM][Role.CALLER]) as victim,
        stage.scheduler(stage.tenants[ATTACKER][Role.CALLER]) as attacker,
    ):
        many, other = rpc.GenerationServiceStub(attacker), rpc.GenerationServiceStub(victim)
        long = pb.StreamGenerateRequest(text="Once", max_tokens=200, ignore_eos=True)
        calls = [many.StreamGenerate(long, timeout=patience(60)) for _ in range(MAX_TENANT_REQUESTS)]
        await asyncio.gather(*[call.read() for call in calls])
        error = await remote(many.StreamGenerate(request(), timeout=patience(60)))
        assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TENANT_BUSY")
        assert error.retry_after
        assert [message async for message in other.StreamGenerate(request(), timeout=patience(60))]
        for call in calls:
            call.cancel()


async def test_no_secret_is_in_a_log_or_a_command_line(stage: Stage) -> None:
    await stage.victim_hits()
    async with stage.admin(stage.tenants[VICTIM][Role.CALLER]) as channel:
        refused: kv_rpc.CacheAdminServiceAsyncStub = kv_rpc.CacheAdminServiceStub(channel)
        prompt = kv.ExplainPrefixRequest(prefix=kv.PrefixSelector(token_ids=PROMPT))
        assert (await remote(refused.ExplainPrefix(prompt, timeout=patience(10)))).reason == "PERMISSION_DENIED"
    async with stage.admin(stage.root) as channel:
        admin: kv_rpc.CacheAdminServiceAsyncStub = kv_rpc.CacheAdminServiceStub(channel)
        await admin.ForgetBlocks(kv.ForgetBlocksRequest(salt=f"{ATTACKER}/none"), timeout=patience(10))
    check_for_secrets(stage)


def check_for_secrets(stage: Stage) -> None:
    written = stage.audit_file.read_text()
    # Lines of both kinds, whichever tests ran before.
    assert "call denied" in written
    assert "ForgetBlocks" in written
    for name in ("scheduler", "cachemgr", "executor"):
        written += stage.stack.log_path(name).read_text()
        written += Path(f"/proc/{stage.stack.pid(name)}/cmdline").read_text()
    digests = re.findall(r"[0-9a-f]{64}", stage.keys.file.read_text())
    assert len(digests) == len(stage.keys.tokens) > 8
    for secret in [*stage.keys.tokens.values(), *digests, "BEGIN", f"{PROMPT[0]}, {PROMPT[1]}"]:
        assert secret not in written
