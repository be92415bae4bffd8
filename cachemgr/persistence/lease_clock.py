"""The time of an executor's leases and pins: a clock that runs only while a manager runs.

Redis stores the clock's time, and the end times of leases and pins on this clock. A remaining time is the end time
minus the clock's time. As time passes, only the clock must be written, and clocks of two hosts are never compared.
"""

from collections.abc import Iterator
from math import isfinite

from cachemgr.blocks.block_record import BlockRecord
from cachemgr.queries import Queries
from cachemgr.types import PinRecord


class StoreClocks:
    """A clock for each executor, and one for the keys of no executor, driven by the manager's time, in seconds."""

    def __init__(self, source: Queries) -> None:
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
        """The present time of an executor's clock. Starts a missing clock at 0."""
        if executor_id not in self._zero:
            self.start(executor_id)
        return self._source.now - self._zero[executor_id]


def with_end_times(record: BlockRecord, time: float) -> BlockRecord:
    """Returns the record with end times in the leases' `remaining`. time: the present time of the clock."""
    if not record.leases:
        return record
    leases = (
        lease if lease.remaining is None else lease._replace(remaining=lease.remaining + time)
        for lease in record.leases
    )
    return record._replace(leases=tuple(leases))


def with_remaining_times(record: BlockRecord, time: float) -> BlockRecord:
    """Turns end times in the leases' `remaining` back into remaining times, at least 0."""
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
