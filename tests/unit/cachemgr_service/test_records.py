"""A block's record survives the way to Redis and back, and nothing else passes for one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachemgr.keys import pack
from cachemgr.records import BlockRecord, LeaseRecord, RecordError, decode, encode, encode_place

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
DIGEST = st.binary(min_size=32, max_size=32)
SECONDS = st.none() | st.floats(0, 1e9)
LEASES = st.builds(
    LeaseRecord,
    holder=st.text(max_size=300),
    priority=st.integers(0, 100),
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
)


@given(RECORDS)
def test_a_record_is_read_as_it_was_written(record: BlockRecord) -> None:
    assert decode(encode_place(record.group, record.slot), encode(record)) == record


@given(RECORDS, st.data())
def test_a_record_cut_short_is_refused(record: BlockRecord, data: st.DataObject) -> None:
    value = encode(record)
    salt = len((record.salt or "").encode())
    cut = data.draw(st.integers(0, len(value) - salt - 1))
    with pytest.raises(RecordError):
        decode(encode_place(record.group, record.slot), value[:cut])


@given(st.binary(max_size=80), st.binary(max_size=10))
def test_any_bytes_are_a_record_or_refused(value: bytes, place: bytes) -> None:
    try:
        decode(place, b"\x03" + value)
    except RecordError:
        return


def test_a_record_of_another_version_is_refused() -> None:
    with pytest.raises(RecordError, match="another version"):
        decode(encode_place(0, 1), b"\x09" + bytes(60))
