"""Copies of blocks that the cache manager asks for: those to be sent to the executor, and the onloads in flight."""

from scheduler.request import Tier
from scheduler.sequence import Copy, LeaveReason, Sequence


class CopyTracker:
    """Each copy is sent once, with the next step; tickets that are never sent are reported to the cache manager.

    A sequence with onloads is onloading until all of them have ended. A sequence that leaves earlier stays known
    until then, because its blocks are not free before. Only a sequence past its deadline is forgotten at once.
    """

    def __init__(self) -> None:
        self.unsent: list[Copy] = []
        # Onloads by ticket, with the sequence that they are for.
        self.waiting: dict[int, tuple[Copy, Sequence]] = {}
        # The sequences with onloads, by handle.
        self.onloading: dict[int, Sequence] = {}

    @property
    def will_free_blocks(self) -> bool:
        """Whether the end of an onload frees blocks of a preempted sequence."""
        return any(sequence.leave_reason is LeaveReason.PREEMPTED for sequence in self.onloading.values())

    def add(self, sequence: Sequence) -> None:
        self.unsent += sequence.copies
        if sequence.pending_onloads:
            self.onloading[sequence.handle] = sequence
            self.waiting.update((copy.ticket, (copy, sequence)) for copy in sequence.copies if copy.is_onload)

    def take(self) -> list[Copy]:
        """Returns the copies to be sent, in their order; from now on they count as sent."""
        copies, self.unsent = self.unsent, []
        return copies

    def cancel(self, sequence: Sequence) -> list[int]:
        """Drops the unsent copies to the device of a sequence that leaves; returns their tickets.

        Its offloads go on: their slots are not written yet, and the cache keeps the blocks.
        """
        if not self.unsent or not sequence.copies:
            return []
        own = {copy.ticket for copy in sequence.copies if copy.target_tier == Tier.DEVICE}
        tickets = [copy.ticket for copy in self.unsent if copy.ticket in own]
        self.unsent = [copy for copy in self.unsent if copy.ticket not in own]
        for ticket in tickets:
            self.end(ticket)
        return tickets

    def end(self, ticket: int) -> Sequence | None:
        """Notes the end of an onload, successful or not; returns its sequence if this was its last onload."""
        ended = self.waiting.pop(ticket, None)
        if ended is None:
            return None
        sequence = ended[1]
        sequence.pending_onloads.discard(ticket)
        if sequence.pending_onloads:
            return None
        del self.onloading[sequence.handle]
        return sequence

    def take_late(self, now: float) -> list[Sequence]:
        """Removes and returns the sequences past their deadline, at `now` in seconds of the monotonic clock."""
        late = [sequence for sequence in self.onloading.values() if now >= sequence.onload_deadline]
        for sequence in late:
            del self.onloading[sequence.handle]
            for ticket in sequence.pending_onloads:
                del self.waiting[ticket]
        return late

    def clear(self) -> list[int]:
        """Forgets every copy; returns the tickets of the unsent copies."""
        tickets = [copy.ticket for copy in self.take()]
        self.waiting.clear()
        self.onloading.clear()
        return tickets
