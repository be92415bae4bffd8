"""The time of an executor's leases and pins: a clock that runs while a manager does.

Redis keeps its time beside the records. These say when on this clock something ends: what remains is the difference,
so that nothing need be written as time passes but the clock, and no two hosts' clocks are compared.
"""

from collections.abc import Iterator
from math import isfinite

from cachemgr.blocks.block_record import BlockRecord
from cachemgr.persistence.ports import Source
from cachemgr.types import PinRecord


class StoreClocks:
    """A clock for each executor, by the manager's time. All in seconds."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._zero: dict[str, float] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._zero))

    def start(self, executor_id: str, time: float = 0.0) -> None:
        """The clock shows this time now."""
        self._zero[executor_id] = self._source.now - time

    def forget(self, executor_id: str) -> None:
        """The executor has no clock any more."""
        self._zero.pop(executor_id, None)

    def time(self, executor_id: str) -> float:
        """The time of an executor's clock."""
        if executor_id not in self._zero:
            self.start(executor_id)
        return self._source.now - self._zero[executor_id]


def with_end_times(record: BlockRecord, time: float) -> BlockRecord:
    """The record with the end of each lease instead of the remaining time."""
    if not record.leases:
        return record
    leases = (
        lease if lease.remaining is None else lease._replace(remaining=lease.remaining + time)
        for lease in record.leases
    )
    return record._replace(leases=tuple(leases))


def with_remaining_times(record: BlockRecord, time: float) -> BlockRecord:
    """The record with the remaining time of each lease, 0 for a lease that should have ended, instead of its end."""
    if not record.leases:
        return record
    leases = (
        lease if lease.remaining is None else lease._replace(remaining=max(0.0, lease.remaining - time))
        for lease in record.leases
    )
    return record._replace(leases=tuple(leases))


def pin_with_end_time(pin: PinRecord, time: float) -> PinRecord:
    """As `with_end_times`, for a pin."""
    return pin._replace(remaining=pin.remaining + time)


def pin_with_remaining_time(pin: PinRecord, time: float) -> PinRecord:
    """As `with_remaining_times`, for a pin."""
    return pin._replace(remaining=max(0.0, pin.remaining - time))


def parse_time(value: bytes | str | None) -> float | None:
    """A time that a manager wrote, None for any other value."""
    try:
        time = float(value or b"")
    except ValueError:
        return None
    return time if isfinite(time) else None
