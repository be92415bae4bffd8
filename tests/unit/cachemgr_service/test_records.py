"""A block's record survives the way to Redis and back, and nothing else passes for one."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachemgr.blocks.block_record import BlockRecord, CopyRecord, LeaseRecord
from cachemgr.persistence.records import RecordError, decode_block, encode_block, encode_slot
from cachemgr.retention.priority import NO_PRIORITY
from cachemgr.types import TierKind
from protos.kvcache.v1 import kvcache_pb2 as pb
from protos.kvcommon.tokens import pack

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
DIGEST = st.binary(min_size=32, max_size=32)
TIER = st.sampled_from(TierKind)
SECONDS = st.none() | st.floats(0, 1e9)
LEASES = st.builds(
    LeaseRecord,
    holder=st.text(max_size=300),
    priority=st.just(NO_PRIORITY) | st.integers(0, 100),
    duration=SECONDS,
    remaining=SECONDS,
    offload_min_priority=st.none() | st.integers(0, 100),
)
RECORDS = st.builds(
    BlockRecord,
    group=U32,
    slot=U32,
    key=DIGEST,
    parent_key=st.none() | DIGEST,
    depth=U32,
    tokens=st.lists(U32, max_size=40).map(lambda tokens: pack(tokens).tobytes()),
    salt=st.none() | st.text(),
    adapter_id=st.none() | U64,
    stored_step=U64,
    leases=st.lists(LEASES, max_size=3).map(tuple),
    tenant_id=st.none() | st.text(max_size=64),
    session_id=st.none() | st.text(max_size=64),
    extra=st.binary(max_size=200),
    tier=TIER,
    generation=U64,
    last_use=st.integers(-(2**63), 2**63 - 1),
    lower_copy=st.none() | st.builds(CopyRecord, TIER, U32, U64),
)


@given(RECORDS)
def test_a_record_is_read_as_it_was_written(record: BlockRecord) -> None:
    assert decode_block(encode_slot(*record.tier_slot), encode_block(record)) == record


@given(st.binary(max_size=80), st.binary(max_size=10))
def test_any_bytes_are_a_record_or_refused(value: bytes, place: bytes) -> None:
    with contextlib.suppress(RecordError):
        decode_block(place, value)


def test_a_record_holds_any_number_of_leases() -> None:
    leases = tuple(LeaseRecord(f"session/{number}", 60, None, None) for number in range(65_536))
    record = BlockRecord(0, 1, bytes(32), None, 0, bytes(4), None, None, 0, leases)
    assert decode_block(encode_slot(*record.tier_slot), encode_block(record)) == record


@pytest.mark.parametrize(
    "value",
    [
        # Schema 1 began with its version.
        b"\x05" + bytes(80),
        b"",
        pb.BlockRecord(key=bytes(31), tokens=bytes(4)).SerializeToString(),
        pb.BlockRecord(key=bytes(32), parent_key=bytes(5)).SerializeToString(),
        pb.BlockRecord(key=bytes(32), tokens=bytes(5)).SerializeToString(),
        pb.BlockRecord(key=bytes(32), write_through_copy=pb.BlockRecord.WriteThroughCopy(tier=9)).SerializeToString(),
    ],
)
def test_what_no_manager_of_this_schema_wrote_is_refused(value: bytes) -> None:
    with pytest.raises(RecordError):
        decode_block(encode_slot(0, TierKind.DEVICE, 1), value)


def test_a_slot_in_a_tier_that_is_none_is_refused() -> None:
    record = BlockRecord(0, 1, bytes(32), None, 0, bytes(4), None, None, 0)
    place = encode_slot(0, TierKind.DISK, 1).replace(b"\x02", b"\x07")
    with pytest.raises(RecordError):
        decode_block(place, encode_block(record))


def test_without_the_device_a_block_is_where_its_copy_lies_or_nowhere() -> None:
    record = BlockRecord(0, 1, bytes(32), None, 0, bytes(4), None, None, 9)
    assert record.below() is None
    below = record._replace(lower_copy=CopyRecord(TierKind.HOST, 5, 77)).below()
    assert below is not None
    assert (below.tier_slot, below.generation, below.lower_copy) == ((0, TierKind.HOST, 5), 77, None)
    assert below.below() == below
