"""Two engines behind a router with certificates and tokens: which role may call what, and tenants that stay apart."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import certs
import grpc
import openai
import pytest

from protos.generation.v1 import generation_pb2 as pb
from protos.generation.v1 import generation_pb2_grpc as rpc
from protos.kvcache.v1 import kvcache_pb2 as kv
from protos.kvcache.v1 import kvcache_pb2_grpc as kv_rpc
from protos.rpc.channel import open_channel
from protos.rpc.errors import RemoteError, from_rpc_error
from protos.rpc.identity import Role
from protos.rpc.security import Security
from tests.stack import FleetStack
from tests.support.generation import generate
from tests.support.keyring import Keyring
from tests.support.patience import patience
from tests.support.ports import free_address

pytestmark = pytest.mark.model

PROMPT = tuple(range(1000, 1064))
WRONG_ROLE = "the role of this token may not call this method"
WRONG_ROUTER = "router-wrong"


@dataclass(frozen=True)
class Guarded:
    """A running fleet, and what those have who call it. callers: by tenant."""

    fleet: FleetStack
    keys: Keyring
    callers: dict[str, Security]
    operator: Security
    viewer: Security
    router: Security


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    """Everything over TCP on loopback, with one certificate for all."""
    folder = tmp_path_factory.mktemp("secrets")
    ca = certs.authority()
    trusted, _ = ca.write(folder, "ca")
    cert, key = certs.certificate(ca, "peer").write(folder, "peer")
    keys = Keyring(folder, Security(tls_cert_file=cert, tls_key_file=key, tls_ca_file=trusted))
    router = keys.add(Role.ROUTER)
    fleet = FleetStack(
        engines=2,
        shards=2,
        executor_max_tokens=1024,
        scheduler_address=free_address(),
        scheduler_http_address=free_address(),
        router_policy="round-robin",
        tls_cert_file=cert,
        tls_key_file=key,
        tls_ca_file=trusted,
        tls_client_ca_file=trusted,
        tokens_file=keys.file,
        # One for all engines: it speaks as any of them.
        scheduler_token_file=keys.add(Role.SCHEDULER).token_file,
        executor_token_file=keys.add(Role.EXECUTOR).token_file,
        router_token_file=router.token_file,
    )
    engines = [free_address() for _ in range(2)]
    for number, address in enumerate(engines):
        fleet.own[f"scheduler-{number}"]["scheduler_address"] = address
    fleet.own["router"]["router_engines"] = ",".join(engines)
    callers = {tenant: keys.add(Role.CALLER, tenant) for tenant in ("acme", "globex")}
    operator, viewer = keys.add(Role.OPERATOR), keys.add(Role.VIEWER)
    with fleet:
        yield Guarded(fleet, keys, callers, operator, viewer, router)


def asked(address: str, security: Security, call: Callable[[grpc.aio.Channel], Coroutine[Any, Any, Any]]) -> Any:
    """What a call answers."""

    async def ask() -> Any:
        async with open_channel(address, security) as channel:
            return await call(channel)

    return asyncio.run(ask())


def refused(
    address: str, security: Security, call: Callable[[grpc.aio.Channel], Coroutine[Any, Any, Any]]
) -> RemoteError:
    with pytest.raises(grpc.RpcError) as caught:
        asked(address, security, call)
    return from_rpc_error(caught.value)


async def complete(channel: grpc.aio.Channel, **cache: Any) -> int:
    """Asks for a token; cached tokens of the prompt."""
    request = pb.StreamGenerateRequest(
        token_ids=pb.TokenIds(token_ids=PROMPT), max_tokens=1, ignore_eos=True, cache=pb.CacheOptions(**cache)
    )
    return (await generate(rpc.GenerationServiceStub(channel), request)).usage.cached_tokens


async def engine_of(channel: grpc.aio.Channel) -> pb.GetEngineResponse:
    stub: rpc.EngineServiceAsyncStub = rpc.EngineServiceStub(channel)
    return await stub.GetEngine(pb.GetEngineRequest(), timeout=patience(30))


async def engines_of(channel: grpc.aio.Channel) -> pb.ListEnginesResponse:
    stub: rpc.RouterServiceAsyncStub = rpc.RouterServiceStub(channel)
    return await stub.ListEngines(pb.ListEnginesRequest(), timeout=patience(30))


async def salts_of(channel: grpc.aio.Channel, pool: str) -> set[str]:
    """The salts of the cached blocks."""
    stub: kv_rpc.CacheAdminServiceAsyncStub = kv_rpc.CacheAdminServiceStub(channel)
    answer = await stub.ListPrefixes(kv.ListPrefixesRequest(pool_id=pool), timeout=patience(30))
    return {one.last_block.salt for one in answer.prefixes}


def tenants_at(fleet: FleetStack, name: str) -> list[str]:
    """The tenants of the requests in a scheduler's log, which has a request's line after its answer."""
    lines = fleet.log_path(name).read_text().splitlines()
    return [json.loads(line)["tenant"] for line in lines if '"finish_reason"' in line]


def until(condition: Callable[[], bool], fleet: FleetStack) -> None:
    deadline = time.monotonic() + patience(60)
    while not condition():
        assert time.monotonic() < deadline, fleet.logs()
        time.sleep(0.1)


def test_tenants_of_one_salt_find_only_their_own_on_every_engine(guarded: Guarded) -> None:
    fleet, callers = guarded.fleet, guarded.callers

    def cached(tenant: str) -> int:
        found: int = asked(fleet.scheduler, callers[tenant], lambda channel: complete(channel, salt="shared"))
        return found

    until(lambda: all(one.view_complete for one in asked(fleet.scheduler, guarded.viewer, engines_of).engines), fleet)
    # In turn: twice on each engine.
    assert [cached("acme") for _ in range(4)] == [0, 0, 63, 63]
    assert [cached("globex") for _ in range(4)] == [0, 0, 63, 63]
    for number in range(2):
        address = str(fleet.own[f"cachemgr-{number}"].get("cachemgr_admin_address", fleet.admin))
        salts = asked(address, guarded.operator, partial(salts_of, pool=f"executor-{number}/0"))
        assert salts == {"acme/shared", "globex/shared"}
        name = f"scheduler-{number}"
        until(lambda name=name: len(tenants_at(fleet, name)) >= 4, fleet)
        assert tenants_at(fleet, name) == ["acme"] * 2 + ["globex"] * 2
    assert WRONG_ROLE not in fleet.logs()


def test_a_call_with_the_wrong_token_says_what_is_wrong(guarded: Guarded) -> None:
    fleet, caller = guarded.fleet, guarded.callers["acme"]
    engine = str(fleet.own["scheduler-0"]["scheduler_address"])
    for address, security, call in (
        (engine, caller, engine_of),
        (engine, guarded.operator, engine_of),
        (fleet.scheduler, caller, engines_of),
        (fleet.scheduler, guarded.router, engines_of),
        (fleet.scheduler, guarded.viewer, complete),
        (engine, guarded.router, complete),
    ):
        error = refused(address, security, call)
        assert (error.code, error.message) == (grpc.StatusCode.PERMISSION_DENIED, WRONG_ROLE)
    error = refused(fleet.scheduler, replace(caller, token_file=None), complete)
    assert error.code is grpc.StatusCode.UNAUTHENTICATED
    assert "authorization: Bearer TOKEN" in error.message
    error = refused(fleet.scheduler, caller, lambda channel: complete(channel, tenant_id="globex"))
    assert (error.code, list(error.fields)) == (grpc.StatusCode.PERMISSION_DENIED, ["cache.tenant_id"])
    # Without a certificate there is no connection.
    error = refused(fleet.scheduler, replace(caller, tls_cert_file=None, tls_key_file=None), complete)
    assert error.code is grpc.StatusCode.UNAVAILABLE


def test_a_router_with_the_token_of_another_role_says_so_and_answers_nobody(guarded: Guarded) -> None:
    fleet, address = guarded.fleet, free_address()
    fleet.modules = {**fleet.modules, WRONG_ROUTER: "scheduler.router"}
    fleet.own[WRONG_ROUTER] = fleet.own["router"] | {
        "router_address": address,
        "router_http_address": "",
        "router_token_file": guarded.callers["acme"].token_file,
    }
    fleet.start(WRONG_ROUTER)
    try:
        until(lambda: WRONG_ROLE in fleet.log_path(WRONG_ROUTER).read_text(), fleet)
        # Once for each of its engines, however often it asks.
        said = [
            json.loads(line) for line in fleet.log_path(WRONG_ROUTER).read_text().splitlines() if WRONG_ROLE in line
        ]
        assert {line["event"] for line in said} == {"waiting for an engine"}
        assert len({line["address"] for line in said}) == len(said)
        error = refused(address, guarded.callers["acme"], complete)
        assert error.code is grpc.StatusCode.UNAVAILABLE
        assert "waits for an engine" in error.message
    finally:
        fleet.kill(WRONG_ROUTER)


def test_http_of_the_router_asks_for_the_same(guarded: Guarded) -> None:
    caller = guarded.callers["acme"]
    context = ssl.create_default_context(cafile=caller.tls_ca_file)
    assert caller.tls_cert_file is not None
    context.load_cert_chain(caller.tls_cert_file, caller.tls_key_file)

    def answer(token: str | None) -> str:
        url = f"https://{guarded.fleet.http}/v1"
        http = openai.DefaultHttpxClient(verify=context)
        with openai.OpenAI(base_url=url, api_key=token or "none", http_client=http, timeout=patience(60)) as client:
            try:
                client.completions.create(model="", prompt=list(PROMPT), max_tokens=1)
            except openai.APIStatusError as error:
                return f"{error.status_code} {error.code}"
        return "answered"

    assert answer(caller.token()) == "answered"
    assert answer(None) == "401 unauthenticated"
    assert answer(guarded.viewer.token()) == "403 permission_denied"
