"""Errors arrive at a client as they were raised."""

import asyncio
import gc
import importlib

import grpc
import pytest
from google.rpc import error_details_pb2

from protos.kvcache.v1 import kvcache_pb2 as pb
from protos.kvcache.v1 import kvcache_pb2_grpc as pb_grpc
from protos.rpc.channel import open_sync_channel
from protos.rpc.errors import DOMAIN, RemoteError, ServiceError, from_rpc_error, status_code, to_status
from tests.support.patience import patience
from tests.unit.rpc.conftest import OutOfStockError, Served


async def call(served: Served, pool_id: str) -> RemoteError:
    stub = pb_grpc.CacheAdminServiceStub(served.channel)
    with pytest.raises(grpc.RpcError) as caught:
        await stub.GetPool(pb.GetPoolRequest(pool_id=pool_id), timeout=patience(5))
    return from_rpc_error(caught.value)


async def test_a_service_error_keeps_code_reason_metadata_and_retry_time(served: Served) -> None:
    error = await call(served, "stock")
    assert (error.code, error.reason, error.message) == (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "OUT_OF_STOCK",
        "none left",
    )
    assert error.metadata == {"asked": "1"}
    assert error.retry_after == 1.5
    assert error.fields == {}
    assert str(error) == "OUT_OF_STOCK: none left"


async def test_an_invalid_field_is_named(served: Served) -> None:
    error = await call(served, "field")
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    assert error.reason == "INVALID_FIELD"
    assert error.fields == {"pool_id": "must not be that"}


async def test_a_bug_is_internal_and_shows_no_secrets(served: Served) -> None:
    error = await call(served, "bug")
    assert (error.code, error.reason) == (grpc.StatusCode.INTERNAL, "UNEXPECTED")
    assert "secret" not in error.message


async def test_a_handler_may_abort_by_itself(served: Served) -> None:
    error = await call(served, "abort")
    assert (error.code, error.reason, error.message) == (grpc.StatusCode.DATA_LOSS, "", "gone")


async def test_a_stream_fails_after_what_it_sent(served: Served) -> None:
    stub = pb_grpc.CacheEventServiceStub(served.channel)
    watch = stub.WatchEvents(pb.WatchEventsRequest(), timeout=patience(5))
    assert [(await anext(aiter(watch))).events[0].event_number for _ in range(2)] == [1, 2]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await anext(aiter(watch))
    assert from_rpc_error(caught.value).reason == "OUT_OF_STOCK"


@pytest.mark.parametrize("name", ["stock", "field", "stream"])
async def test_a_refused_call_leaves_nothing_behind_but_for_a_garbage_collection(served: Served, name: str) -> None:
    async def refused() -> None:
        if name == "stream":
            stub = pb_grpc.CacheEventServiceStub(served.channel)
            with pytest.raises(grpc.RpcError):
                async for _ in stub.WatchEvents(pb.WatchEventsRequest(), timeout=patience(5)):
                    pass
        else:
            await call(served, name)

    await refused()
    gc.collect()
    gc.disable()
    try:
        before = _errors()
        for _ in range(20):
            await refused()
        # The last call ends after its answer.
        async with asyncio.timeout(patience(30)):
            while _errors() != before:
                await asyncio.sleep(0.05)
    finally:
        gc.enable()


def _errors() -> int:
    """Errors that are kept, with the frames of their calls and the requests in these."""
    kinds = ServiceError, grpc.aio.AbortError
    # By type: to ask some objects of libraries for their class gives a warning.
    return sum(issubclass(type(one), kinds) for one in gc.get_objects())


async def test_a_sync_client_reads_the_same_details(served: Served) -> None:
    def call_sync() -> RemoteError:
        with open_sync_channel(served.address) as channel:
            stub = pb_grpc.CacheAdminServiceStub(channel)
            with pytest.raises(grpc.RpcError) as caught:
                stub.GetPool(pb.GetPoolRequest(pool_id="field"), timeout=patience(5))
            return from_rpc_error(caught.value)

    assert (await asyncio.to_thread(call_sync)).fields == {"pool_id": "must not be that"}


def test_the_status_names_the_project_as_its_domain() -> None:
    info = error_details_pb2.ErrorInfo()
    assert to_status(OutOfStockError("x")).details[0].Unpack(info)
    assert info.domain == DOMAIN == "kvkeep"


def subclasses(cls: type[ServiceError]) -> set[type[ServiceError]]:
    return {cls for sub in cls.__subclasses__() for cls in (sub, *subclasses(sub))}


@pytest.mark.parametrize("service", ["cachemgr", "scheduler", "executor"])
def test_every_error_of_a_service_has_a_code_and_a_reason_of_its_own(service: str) -> None:
    importlib.import_module(f"{service}.errors")
    errors = {error for error in subclasses(ServiceError) if error.__module__.startswith((service, "protos."))}
    leaves = {error for error in errors if not error.__subclasses__()}
    for error in leaves:
        assert isinstance(status_code(error), grpc.StatusCode), error
        assert status_code(error) is not grpc.StatusCode.OK, error
        assert error.reason == error.reason.upper(), error
        assert error.reason.replace("_", "").isalnum(), error
    reasons = [error.reason for error in leaves]
    assert len(set(reasons)) == len(reasons), reasons
