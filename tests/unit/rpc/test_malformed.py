"""Bytes that are no message are the caller's error, in every kind of call."""

import grpc
import pytest
import structlog

from protos.kvcache.v1 import kvcache_pb2 as pb
from protos.rpc.errors import from_rpc_error
from tests.support.patience import patience
from tests.unit.rpc.conftest import ADMIN, Served

# A pool_id that is not UTF-8, and one that is cut off.
SPOILED = (b"\x0a\x02\xff\xfe", b"\x0a\x7fx")


@pytest.mark.parametrize("data", SPOILED)
async def test_a_unary_call(served: Served, data: bytes) -> None:
    call = served.channel.unary_unary(f"/{ADMIN}/GetPool")
    with pytest.raises(grpc.aio.AioRpcError) as caught, structlog.testing.capture_logs() as logs:
        await call(data, timeout=patience(5))
    [line] = [line for line in logs if line["event"] == "call refused"]
    assert (line["log_level"], line["reason"]) == ("info", "MALFORMED_MESSAGE")
    assert line["peer"]
    error = from_rpc_error(caught.value)
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_MESSAGE")
    assert "is not valid UTF-8" in error.message


@pytest.mark.parametrize("data", SPOILED)
async def test_a_stream_ends_there(served: Served, data: bytes) -> None:
    call = served.channel.stream_stream("/test.Echo/Stream")(timeout=patience(5))
    whole = pb.GetPoolRequest(pool_id="QQ").SerializeToString()
    await call.write(whole)
    assert await call.read() == whole
    await call.write(data)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert from_rpc_error(caught.value).reason == "MALFORMED_MESSAGE"
