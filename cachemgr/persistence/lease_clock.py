"""The time of an executor's leases and pins: a clock that runs while a manager does.

Redis keeps its time beside the records. These say when on this clock something ends: what remains is the difference,
so that nothing need be written as time passes but the clock, and no two hosts' clocks are compared.
"""

from collections.abc import Iterator

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


def at_rest(record: BlockRecord, time: float) -> BlockRecord:
    """The record with the ends of its leases instead of the time that is left of them."""
    if not record.leases:
        return record
    leases = (
        lease if lease.remaining is None else lease._replace(remaining=lease.remaining + time)
        for lease in record.leases
    )
    return record._replace(leases=tuple(leases))


def awake(record: BlockRecord, time: float) -> BlockRecord:
    """The reverse; a lease that should have ended is about to."""
    if not record.leases:
        return record
    leases = (
        lease if lease.remaining is None else lease._replace(remaining=max(0.0, lease.remaining - time))
        for lease in record.leases
    )
    return record._replace(leases=tuple(leases))


def pin_at_rest(pin: PinRecord, time: float) -> PinRecord:
    """As `at_rest`, for a pin."""
    return pin._replace(remaining=pin.remaining + time)


def pin_awake(pin: PinRecord, time: float) -> PinRecord:
    """As `awake`, for a pin."""
    return pin._replace(remaining=max(0.0, pin.remaining - time))
