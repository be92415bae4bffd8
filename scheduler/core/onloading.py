"""Copies of blocks that the cache manager asks for: those to be sent to the executor, and those that are waited for."""

from scheduler.cache.tier_costs import Tier
from scheduler.sequence import Copy, Exit, Sequence


class Copies:
    """Each is sent once, with the next step; a ticket that is never sent must be told to the cache manager.

    A sequence whose blocks come from a lower tier is onboarding until all of them are there. One that leaves meanwhile
    stays known until its copies have ended: before that nobody gets its blocks.
    """

    def __init__(self) -> None:
        self.unsent: list[Copy] = []
        # Copies from a lower tier to the device, by ticket, with whom they are for.
        self.waiting: dict[int, tuple[Copy, Sequence]] = {}
        # Whom these are for, by handle.
        self.onboarding: dict[int, Sequence] = {}

    @property
    def free_blocks_soon(self) -> bool:
        """Whether the end of a copy gives back blocks of a sequence that was preempted."""
        return any(sequence.exit is Exit.PREEMPTED for sequence in self.onboarding.values())

    def add(self, sequence: Sequence) -> None:
        """An admitted sequence comes with copies."""
        self.unsent += sequence.copies
        if sequence.arriving:
            self.onboarding[sequence.handle] = sequence
            self.waiting.update((copy.ticket, (copy, sequence)) for copy in sequence.copies if copy.onboards)

    def take(self) -> list[Copy]:
        """All that are to be sent, in their order; now they are."""
        copies, self.unsent = self.unsent, []
        return copies

    def call_off(self, sequence: Sequence) -> list[int]:
        """Tickets of copies to a sequence that leaves which are not sent and never will be.

        What makes room for it goes its way: nobody has written to these slots yet, and the cache keeps the blocks.
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
        """A copy has ended, well or not; returns the sequence that it was for when it was the last for that one."""
        ended = self.waiting.pop(ticket, None)
        if ended is None:
            return None
        sequence = ended[1]
        sequence.arriving.discard(ticket)
        if sequence.arriving:
            return None
        del self.onboarding[sequence.handle]
        return sequence

    def late(self, now: float) -> list[Sequence]:
        """Sequences that nobody waits for any longer, at `now` on the monotonic clock."""
        late = [sequence for sequence in self.onboarding.values() if now >= sequence.onboard_by]
        for sequence in late:
            del self.onboarding[sequence.handle]
            for ticket in sequence.arriving:
                del self.waiting[ticket]
        return late

    def clear(self) -> list[int]:
        """Forgets everything; returns the tickets that were not sent."""
        tickets = [copy.ticket for copy in self.take()]
        self.waiting.clear()
        self.onboarding.clear()
        return tickets
