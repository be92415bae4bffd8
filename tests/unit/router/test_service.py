"""Operators see the fleet as its router does."""

import asyncio
from pathlib import Path

import grpc
import pytest
from prometheus_client import CollectorRegistry

from protos.generation.v1 import generation_pb2 as pb
from protos.generation.v1 import generation_pb2_grpc as rpc
from protos.rpc.channel import open_channel
from protos.rpc.identity import Role
from protos.rpc.security import PLAIN, Security
from protos.rpc.server import Server
from scheduler.router.process import Router
from scheduler.router.settings import RouterSettings
from tests.support.generation import generate, greedy_request
from tests.support.keyring import Keyring
from tests.support.patience import patience
from tests.support.scheduler.fleet import run_fleet
from tests.support.scheduler.stack import prompt_of


async def listed(address: str, security: Security = PLAIN) -> pb.ListEnginesResponse:
    async with open_channel(address, security) as channel:
        stub: rpc.RouterServiceAsyncStub = rpc.RouterServiceStub(channel)
        return await stub.ListEngines(pb.ListEnginesRequest(), timeout=patience(10))


async def test_each_engine_is_listed_with_its_shard_its_load_and_what_it_was_sent(tmp_path: Path) -> None:
    async with run_fleet(tmp_path, policy="round-robin") as fleet:
        await fleet.knows(2)
        await asyncio.gather(*[generate(fleet.stub, greedy_request(prompt_of(20, s), 4)) for s in range(4)])
        found = await listed(f"unix:{tmp_path}/router")
        assert (found.policy, found.waiting_requests) == ("round-robin", 0)
        assert [engine.address for engine in found.engines] == sorted(engine.address for engine in fleet.engines)
        for number, engine in enumerate(found.engines):
            folder = f"unix:{tmp_path}/engine-{number}"
            assert (engine.engine_id, engine.executor_id) == (f"engine-{number}", f"executor-{number}")
            assert (engine.cachemgr_admin_address, engine.cachemgr_address) == (
                f"{folder}/cachemgr_admin",
                f"{folder}/cachemgr",
            )
            assert (engine.ready, engine.obstacle, engine.view_complete) == (True, "", True)
            assert engine.loads.max_running_requests
            assert (engine.routed_requests, engine.routed_tokens, engine.expected_cached_tokens) == (2, 40, 0)
            assert engine.request_time.ToNanoseconds() > 0


async def test_an_engine_that_is_gone_or_drained_says_why_it_gets_nothing(tmp_path: Path) -> None:
    async with run_fleet(tmp_path) as fleet:
        await fleet.knows(2)
        fleet.engines[0].scheduler.requests.set_draining(True)
        await fleet.engines[1].kill()
        await fleet.ready(0)
        drained, gone = (await listed(f"unix:{tmp_path}/router")).engines
        assert (drained.ready, gone.ready) == (False, False)
        assert "drains" in drained.obstacle
        assert "UNAVAILABLE" in gone.obstacle
        assert (drained.HasField("loads"), gone.HasField("loads")) == (True, False)


async def test_a_router_without_engines_lists_those_that_it_looks_for(tmp_path: Path) -> None:
    server = Server("router", drain_seconds=0)
    address = f"unix:{tmp_path}/router"
    settings = RouterSettings(engines=f"unix:{tmp_path}/nobody", address=address, router_id="r")
    router = Router(settings, server, registry := CollectorRegistry())
    server.listen(address, router.services)
    await server.start()
    try:
        assert list((await listed(address)).engines) == []
        # There, not absent: an alert looks for it.
        assert registry.get_sample_value("kvkeep_router_engines", {"state": "ready"}) == 0
    finally:
        await router.stop()
        await server.stop()


async def test_operators_and_viewers_of_all_tenants_may_ask(tmp_path: Path) -> None:
    keys = Keyring(tmp_path)
    allowed = [keys.add(Role.OPERATOR), keys.add(Role.VIEWER)]
    refused = [keys.add(Role.CALLER), keys.add(Role.ROUTER), keys.add(Role.OPERATOR, "globex")]
    security = Security(tokens_file=keys.file)
    server = Server("router", drain_seconds=0, security=security)
    address = f"unix:{tmp_path}/router"
    settings = RouterSettings(engines=f"unix:{tmp_path}/nobody", address=address, router_id="r", tokens_file=keys.file)
    router = Router(settings, server, CollectorRegistry())
    server.listen(address, router.services)
    await server.start()
    try:
        for one in allowed:
            await listed(address, one)
        for code, one in [(grpc.StatusCode.PERMISSION_DENIED, one) for one in refused] + [
            (grpc.StatusCode.UNAUTHENTICATED, PLAIN)
        ]:
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await listed(address, one)
            assert error.value.code() is code
    finally:
        await router.stop()
        await server.stop()
