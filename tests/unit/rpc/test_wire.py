"""A message that cannot be decoded is the caller's error, and the field is named."""

import grpc
import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from protos.execution.v1 import execution_pb2
from protos.generation.v1 import generation_pb2
from protos.kvcache.v1 import kvcache_pb2 as pb
from protos.rpc.errors import MalformedMessageError, from_rpc_error
from protos.rpc.wire import find_invalid_field, parse_strictly
from tests.unit.rpc.conftest import ADMIN, Served

BAD = b"\xff\xfe"


def spoiled(message, text: str) -> bytes:
    """The bytes of a message with one string of two letters made invalid UTF-8."""
    data = message.SerializeToString()
    assert data.count(text.encode()) == 1
    return data.replace(text.encode(), BAD)


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (pb.AdmitSequenceRequest(sequence_id="id", scheduler_id="QQ", token_ids=[1, 300, 70000]), "scheduler_id"),
        (pb.PurgeBlocksRequest(filter=pb.BlockFilter(salt="QQ")), "filter.salt"),
        (
            pb.RegisterExecutorRequest(
                executor_id="x", model_fingerprint=BAD, pools=[pb.PoolSpec(dtype="ok"), pb.PoolSpec(dtype="QQ")]
            ),
            "pools[1].dtype",
        ),
    ],
)
def test_the_field_with_invalid_utf8_is_found(message, field: str) -> None:
    found = find_invalid_field(message.DESCRIPTOR, spoiled(message, "QQ"))
    assert found == (field, "is not valid UTF-8")


def test_a_cut_message_is_malformed_without_a_field() -> None:
    data = pb.GetPoolRequest(pool_id="executor/0").SerializeToString()[:-1]
    with pytest.raises(MalformedMessageError) as caught:
        parse_strictly(pb.GetPoolRequest.FromString, data)
    assert caught.value.fields == {}


def test_a_nested_message_with_broken_framing_is_named() -> None:
    data = bytes([0x0A, 2, 0x0A, 9])
    with pytest.raises(MalformedMessageError) as caught:
        parse_strictly(pb.PurgeBlocksRequest.FromString, data)
    assert list(caught.value.fields) == ["filter"]


MESSAGES = [
    pb.AdmitSequenceRequest,
    pb.RegisterExecutorRequest,
    pb.SyncSequencesRequest,
    pb.PurgeBlocksRequest,
    *(
        getattr(module, name)
        for module in (generation_pb2, execution_pb2)
        for name in sorted(module.DESCRIPTOR.message_types_by_name)
    ),
]


@given(message=st.sampled_from(MESSAGES), data=st.binary(max_size=60))
def test_any_bytes_are_parsed_or_refused_as_malformed(message, data: bytes) -> None:
    try:
        parse_strictly(message.FromString, data)
    except MalformedMessageError as error:
        refused = error
    else:
        return
    assert all(refused.fields)


async def test_a_unary_call_with_invalid_utf8_is_the_callers_error(served: Served) -> None:
    call = served.channel.unary_unary(f"/{ADMIN}/PurgeBlocks")
    with pytest.raises(grpc.aio.AioRpcError) as caught, structlog.testing.capture_logs() as logs:
        await call(spoiled(pb.PurgeBlocksRequest(filter=pb.BlockFilter(pool_id="QQ")), "QQ"), timeout=5)
    [line] = [line for line in logs if line["event"] == "call refused"]
    assert (line["log_level"], line["reason"]) == ("info", "MALFORMED_MESSAGE")
    assert line["peer"]
    error = from_rpc_error(caught.value)
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_MESSAGE")
    assert error.fields == {"filter.pool_id": "is not valid UTF-8"}


async def test_a_stream_with_one_invalid_message_ends_there(served: Served) -> None:
    call = served.channel.stream_stream("/test.Echo/Stream")(timeout=5)
    await call.write(pb.GetPoolRequest(pool_id="QQ").SerializeToString())
    assert await call.read() == pb.GetPoolRequest(pool_id="QQ").SerializeToString()
    await call.write(spoiled(pb.GetPoolRequest(pool_id="QQ"), "QQ"))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    error = from_rpc_error(caught.value)
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    assert error.fields == {"pool_id": "is not valid UTF-8"}
