"""Differences between Redis and the manager, once Redis has acknowledged all changes."""

from collections.abc import AsyncIterator, Callable, Iterable
from typing import NamedTuple

from cachemgr.blocks.block_record import BlockRecord, LeaseRecord
from cachemgr.operators.operator_journal import Entry, entry_name
from cachemgr.persistence.records import RecordError, decode_block, encode_slot
from cachemgr.slices import sliced
from cachemgr.types import PinRecord, Slot

# In seconds; allows for rounding, as times are sums.
_TOLERANCE = 0.001


class Difference(NamedTuple):
    """One difference. executor_id: empty for rules, quotas and shares. group, slot: 0 unless a block differs."""

    message: str
    executor_id: str = ""
    group: int = 0
    slot: int = 0


async def compare_blocks(
    executor_id: str,
    stored: AsyncIterator[tuple[bytes, bytes]],
    indexed: Iterable[BlockRecord],
    is_pending: Callable[[Slot], bool],
) -> list[Difference]:
    """Compares fields and values of a hash with the records that should be stored.

    A block that is pending when it is compared has changed since the comparison began, and is left out.
    """
    expected: dict[bytes, BlockRecord] = {}
    async for part in sliced(indexed):
        expected.update((encode_slot(*record.tier_slot), record) for record in part)
    found = []
    # A hash that grows during the scan may return a field twice.
    seen: set[bytes] = set()
    async for field, value in stored:
        if field in seen:
            continue
        seen.add(field)
        try:
            record = decode_block(field, value)
        except RecordError as error:
            found.append(Difference(f"Redis holds a record that cannot be read: {error}", executor_id))
            expected.pop(field, None)
            continue
        present = expected.pop(field, None)
        if is_pending(record.tier_slot):
            continue
        if present is None:
            found.append(_difference(executor_id, record, "is in Redis and not in the index"))
        elif not _are_same(record, present):
            found.append(_difference(executor_id, record, "differs between Redis and the index"))
    missing = [record for record in expected.values() if not is_pending(record.tier_slot)]
    return found + [_difference(executor_id, record, "is in the index and not in Redis") for record in missing]


def compare_entries(
    what: str,
    stored: Iterable[Entry],
    present: Iterable[Entry],
    is_pending: Callable[[str], bool],
    executor_id: str = "",
) -> list[Difference]:
    """Compares operators' entries in the same way; pins have their end time instead of the remaining time."""
    have = {entry_name(entry): entry for entry in stored}
    want = {entry_name(entry): entry for entry in present}
    names = [name for name in {**have, **want} if not is_pending(name)]
    return [
        Difference(f"{name} ({what}) is missing or different in Redis or the manager", executor_id)
        for name in names
        if not _are_same_entries(have.get(name), want.get(name))
    ]


def _difference(executor_id: str, record: BlockRecord, message: str) -> Difference:
    return Difference(f"a block on {record.tier.name.lower()} {message}", executor_id, record.group, record.slot)


def _are_same(one: BlockRecord, other: BlockRecord) -> bool:
    return (
        one._replace(leases=()) == other._replace(leases=())
        and len(one.leases) == len(other.leases)
        and all(map(_are_same_leases, one.leases, other.leases))
    )


def _are_same_leases(one: LeaseRecord, other: LeaseRecord) -> bool:
    if one._replace(remaining=None) != other._replace(remaining=None):
        return False
    if one.remaining is None or other.remaining is None:
        return one.remaining is other.remaining
    return abs(one.remaining - other.remaining) < _TOLERANCE


def _are_same_entries(one: Entry | None, other: Entry | None) -> bool:
    if isinstance(one, PinRecord) and isinstance(other, PinRecord):
        near = abs(one.remaining - other.remaining) < _TOLERANCE
        return near and one._replace(remaining=0.0) == other._replace(remaining=0.0)
    return one == other
