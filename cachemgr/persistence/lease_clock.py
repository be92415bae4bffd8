"""The time of an executor's leases and pins: a clock that runs only while a manager runs.

Redis keeps the clock's time beside the records, whose end times are on this clock; the remaining time is the
difference. So as time passes, only the clock is written, and the clocks of two hosts are never compared.
"""

from collections.abc import Iterator
from math import isfinite

from cachemgr.blocks.block_record import BlockRecord
from cachemgr.persistence.ports import Source
from cachemgr.types import PinRecord


class StoreClocks:
    """A clock for each executor, driven by the manager's time. All times are in seconds."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._zero: dict[str, float] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._zero))

    def start(self, executor_id: str, time: float = 0.0) -> None:
        """Sets the clock to this time."""
        self._zero[executor_id] = self._source.now - time

    def forget(self, executor_id: str) -> None:
        """Removes the executor's clock."""
        self._zero.pop(executor_id, None)

    def time(self, executor_id: str) -> float:
        """The present time of an executor's clock."""
        if executor_id not in self._zero:
            self.start(executor_id)
        return self._source.now - self._zero[executor_id]


def with_end_times(record: BlockRecord, time: float) -> BlockRecord:
    """Returns the record with each lease's end time instead of its remaining time."""
    if not record.leases:
        return record
    leases = (
        lease if lease.remaining is None else lease._replace(remaining=lease.remaining + time)
        for lease in record.leases
    )
    return record._replace(leases=tuple(leases))


def with_remaining_times(record: BlockRecord, time: float) -> BlockRecord:
    """Returns the record with each lease's remaining time instead of its end time; 0 if the lease is overdue."""
    if not record.leases:
        return record
    leases = (
        lease if lease.remaining is None else lease._replace(remaining=max(0.0, lease.remaining - time))
        for lease in record.leases
    )
    return record._replace(leases=tuple(leases))


def pin_with_end_time(pin: PinRecord, time: float) -> PinRecord:
    """Like `with_end_times`, for a pin."""
    return pin._replace(remaining=pin.remaining + time)


def pin_with_remaining_time(pin: PinRecord, time: float) -> PinRecord:
    """Like `with_remaining_times`, for a pin."""
    return pin._replace(remaining=max(0.0, pin.remaining - time))


def parse_time(value: bytes | str | None) -> float | None:
    """Returns a time that a manager wrote; None for any other value."""
    try:
        time = float(value or b"")
    except ValueError:
        return None
    return time if isfinite(time) else None
