"""What keeps blocks in place beyond their sequences: holds that a scheduler asked for, and operators' pins."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from cachemgr.api import Outcome, Receipt
from cachemgr.retention import MAX_PRIORITY, PIN, Wish
from cachemgr.tiers import account_of

if TYPE_CHECKING:
    from cachemgr.block import Block
    from cachemgr.pool import Pool

    Kept = list[tuple[Pool, Block]]


class Hold:
    """Referenced blocks, root first, and until when who wants them. A pin has one owner."""

    __slots__ = ("blocks", "name", "owners", "pin", "session_id")

    def __init__(
        self, name: str, blocks: Kept, owners: dict[str, float], *, pin: bool, session_id: str | None = None
    ) -> None:
        self.name = name
        self.blocks = blocks
        # Owner to the time at which its hold ends.
        self.owners = owners
        self.pin = pin
        self.session_id = session_id


class Pinned(NamedTuple):
    """What a wish for a pin led to: the pin's name, empty for none, and older pins that gave way."""

    name: str
    receipt: Receipt
    degraded: tuple[str, ...] = ()


class Holds:
    """The holds of one executor, oldest first. Pins together have a budget, a share of each pool."""

    def __init__(self, next_number: Callable[[], int], pin_budget: float) -> None:
        self._next_number = next_number
        self._pin_budget = pin_budget
        self._holds: dict[str, Hold] = {}

    def __iter__(self) -> Iterator[Hold]:
        return iter(list(self._holds.values()))

    def get(self, name: str) -> Hold | None:
        """A hold by its name."""
        return self._holds.get(name)

    def keep(self, blocks: Kept, owners: dict[str, float], session_id: str | None) -> None:
        """Holds blocks of a session's sequence for owners, each until a time."""
        self._add(Hold(f"hold-{self._next_number()}", blocks, owners, pin=False, session_id=session_id))

    def replace(self, pool: Pool, old: Block, block: Block) -> None:
        """A block has taken the place of another in the index: what holds the one holds the other."""
        for hold in self:
            for index, (_, held) in enumerate(hold.blocks):
                if held is old:
                    hold.blocks[index] = (pool, block)
                    pool.retain(block)
                    old.refs -= 1
                    if not old.refs:
                        tier = pool.tier_of(old)
                        tier.used -= 1
                        tier.cached += 1
                        tier.count(account_of(old), used=-1)

    def pin(
        self,
        blocks: Kept,
        owner: str,
        now: float,
        duration: float,
        *,
        displace: bool = True,
        validate_only: bool = False,
    ) -> Pinned:
        """Pins blocks, those nearest to the root when not all fit.

        With `displace` older pins become leases where room is needed, else they leave so much less of the budget.
        """
        fitting = self._fitting(blocks, displace=displace)
        if not blocks or not fitting:
            reason = "nothing of it is cached" if not blocks else "the budget for pins is too small for a block"
            return Pinned("", Receipt("pin", Outcome.REJECTED, reason))
        same = self._same(fitting, owner)
        degraded = [] if same is not None else self._to_degrade(fitting)
        clipped = len(fitting) < len(blocks)
        receipt = Receipt(
            "pin",
            Outcome.CLIPPED if clipped else Outcome.GRANTED,
            f"the budget for pins holds {len(fitting)} of the {len(blocks)} blocks" if clipped else "",
            MAX_PRIORITY,
            duration,
            len(fitting),
        )
        names = tuple(hold.name for hold in degraded)
        if validate_only:
            return Pinned("", receipt, names)
        if same is not None:
            same.owners[owner] = max(same.owners[owner], now + duration)
            return Pinned(same.name, receipt)
        name = f"pin-{self._next_number()}"
        # Referenced before older pins let go of what they may have in common.
        self._add(Hold(name, fitting, {owner: now + duration}, pin=True))
        for hold in degraded:
            self._degrade(hold, now)
        return Pinned(name, receipt, names)

    def release(self, hold: Hold) -> int:
        """Ends a hold; returns the blocks that may be taken now and could not before."""
        del self._holds[hold.name]
        freed = 0
        # The tail goes first, as when a sequence ends.
        for pool, block in reversed(hold.blocks):
            pool.drop(block)
            freed += not block.refs
        return freed

    def expire(self, now: float) -> None:
        """Ends holds whose owners' times are all over."""
        for hold in self:
            hold.owners = {owner: end for owner, end in hold.owners.items() if end > now}
            if not hold.owners:
                self.release(hold)

    def clear(self) -> None:
        """The blocks are gone."""
        self._holds.clear()

    def _add(self, hold: Hold) -> None:
        for pool, block in hold.blocks:
            pool.retain(block)
        self._holds[hold.name] = hold

    def _budget(self, pool: Pool) -> int:
        return int(pool.device.total * self._pin_budget)

    def _fitting(self, blocks: Kept, *, displace: bool) -> Kept:
        left = {pool: self._budget(pool) for pool, _ in blocks}
        for hold in () if displace else self:
            for pool, _ in hold.blocks if hold.pin else ():
                left[pool] = left.get(pool, 0) - 1
        fitting = []
        for pool, block in blocks:
            room = max(0, left[pool])
            if room:
                left[pool] = room - 1
                fitting.append((pool, block))
        return fitting

    def _same(self, blocks: Kept, owner: str) -> Hold | None:
        """A pin of these blocks that the owner has already."""
        wanted = {block for _, block in blocks}
        for hold in self:
            if hold.pin and owner in hold.owners and {block for _, block in hold.blocks} == wanted:
                return hold
        return None

    def _to_degrade(self, fresh: Kept) -> list[Hold]:
        """Older pins that must give way, oldest first; a block that several pin counts once."""
        wanted = Counter((pool, block) for pool, block in fresh)
        pins = [hold for hold in self if hold.pin]
        for hold in pins:
            wanted.update(hold.blocks)
        degraded = []
        for hold in pins:
            counts = Counter(pool for pool, _ in +wanted)
            over = {pool for pool, count in counts.items() if count > self._budget(pool)}
            if not over:
                break
            if any(pool in over for pool, _ in hold.blocks):
                degraded.append(hold)
                wanted.subtract(hold.blocks)
        return degraded

    def _degrade(self, hold: Hold, now: float) -> None:
        remaining = max(end - now for end in hold.owners.values())
        if remaining > 0:
            wish = Wish(PIN + hold.name, MAX_PRIORITY, remaining)
            for pool, block in hold.blocks:
                if block.parent is not None:
                    pool.grant(block, wish)
        self.release(hold)
