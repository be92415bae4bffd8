"""Values of the index by key: written values can be read, and values of other programs are refused."""

import json

import pytest

from protos.kvcommon.key_index import Entry, FormatError, IndexedExecutor, Position

EXECUTOR = IndexedExecutor(
    manager_epoch=1 << 63,
    since=2,
    event_number=3,
    executor_epoch=4,
    model_fingerprint=bytes(range(32)),
    block_size=16,
    shard="a",
)


def test_what_is_written_is_read() -> None:
    assert IndexedExecutor.decode(EXECUTOR.encode()) == EXECUTOR
    entry = Entry(2, Position((1 << 64) - 1, 5))
    assert Entry.decode(entry.encode()) == entry


def test_entries_count_from_a_position_on_under_the_same_manager() -> None:
    epoch = EXECUTOR.manager_epoch
    assert EXECUTOR.counts(Position(epoch, 2))
    assert not EXECUTOR.counts(Position(epoch, 1))
    assert not EXECUTOR.counts(Position(epoch - 1, 9))


@pytest.mark.parametrize(
    "change",
    [
        {"block_size": 0},
        {"block_size": 1 << 32},
        {"block_size": "many"},
        {"since": None},
        {"model_fingerprint": "no hexadecimal"},
        {"model_fingerprint": 7},
    ],
)
def test_an_executor_with_a_bad_field_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(FormatError):
        IndexedExecutor.decode(json.dumps(json.loads(EXECUTOR.encode()) | change).encode())


@pytest.mark.parametrize("value", [b"", b"\xff", b"[]", b"1", b"{}"])
def test_what_is_no_executor_is_refused(value: bytes) -> None:
    with pytest.raises(FormatError):
        IndexedExecutor.decode(value)


def test_an_entry_of_another_length_is_refused() -> None:
    with pytest.raises(FormatError):
        Entry.decode(bytes(16))
