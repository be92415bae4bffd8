"""What keeps blocks in place beyond their sequences: holds that a scheduler asked for, and operators' pins."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from cachemgr.api import Outcome, Receipt
from cachemgr.block import Block, Node
from cachemgr.retention import MAX_PRIORITY, PIN, Wish
from cachemgr.tiers import account_of

if TYPE_CHECKING:
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
        # Called with the name of a pin that is new, goes on for longer, or has ended.
        self.on_pin: Callable[[str], None] = lambda _name: None

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
        """Pins indexed blocks and what they stand on, those nearest to the root when not all fit.

        Blocks whose bytes are on their way, and what stands on these, are left out. With `displace` older pins become
        leases where room is needed, else they leave so much less of the budget.
        """
        blocks = _complete(blocks)
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
            self.on_pin(same.name)
            return Pinned(same.name, receipt)
        name = f"pin-{self._next_number()}"
        # Referenced before older pins let go of what they may have in common.
        self._add(Hold(name, fitting, {owner: now + duration}, pin=True))
        for hold in degraded:
            self._degrade(hold, now)
        return Pinned(name, receipt, names)

    def restore(self, name: str, blocks: Kept, owner: str, end: float) -> None:
        """Puts what is left of a pin of an earlier manager back; older ones come first, `keep_budget` comes last."""
        left = _complete(blocks)
        if left:
            self._add(Hold(name, left, {owner: end}, pin=True))
        else:
            self.on_pin(name)

    def keep_budget(self, now: float) -> None:
        """Makes leases of the oldest pins as far as all together are beyond the budget."""
        for hold in self._to_degrade([]):
            self._degrade(hold, now)

    def release(self, hold: Hold) -> int:
        """Ends a hold; returns the blocks that may be taken now and could not before."""
        del self._holds[hold.name]
        if hold.pin:
            self.on_pin(hold.name)
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

    def held(self) -> Counter[Block]:
        """References that each block has from here."""
        return Counter(block for hold in self for _, block in hold.blocks)

    def keep_cached(self) -> None:
        """Blocks outside the index are gone; of the others stay those that have not lost what they stand on."""
        for hold in self:
            left = [(pool, block) for pool, block in hold.blocks if block.parent is not None]
            hold.blocks = [(pool, block) for pool, block in left if _is_complete(pool, block)]
            for pool, block in left:
                if not _is_complete(pool, block):
                    pool.drop(block)
            if not hold.blocks:
                del self._holds[hold.name]
            if hold.pin:
                self.on_pin(hold.name)

    def _add(self, hold: Hold) -> None:
        for pool, block in hold.blocks:
            pool.retain(block)
        self._holds[hold.name] = hold
        if hold.pin:
            self.on_pin(hold.name)

    def _budget(self, pool: Pool) -> int:
        return int(pool.device.total * self._pin_budget)

    def _fitting(self, blocks: Kept, *, displace: bool) -> Kept:
        # What several pin counts once.
        pinned = set() if displace else {kept for hold in self if hold.pin for kept in hold.blocks}
        used = Counter(pool for pool, _ in pinned)
        left = {pool: self._budget(pool) - used[pool] for pool, _ in blocks}
        fitting = []
        for pool, block in blocks:
            if (pool, block) in pinned:
                fitting.append((pool, block))
            elif left[pool] > 0:
                left[pool] -= 1
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


def _is_complete(pool: Pool, block: Block) -> bool:
    """Whether nothing is lost that a block stands on: what lies in a lower tier may outlive that."""
    first = block
    while pool.window is None and isinstance(first.parent, Block):
        first = first.parent
    return pool.window is not None or not first.depth


def _complete(blocks: Kept) -> Kept:
    """Indexed blocks that have arrived, root first, and under full attention all that they stand on."""
    blocks = [(pool, block) for pool, block in blocks if _is_complete(pool, block)]
    found: dict[Block, Pool] = {}
    left_out: set[Block] = set()
    for pool, block in blocks:
        line: list[Block] = []
        node: Node | None = block
        while isinstance(node, Block) and node not in found:
            line.append(node)
            if node in pool.moving or node in left_out:
                left_out.update(line)
                break
            node = node.parent if pool.window is None else None
        else:
            found.update(dict.fromkeys(reversed(line), pool))
    return sorted(((pool, block) for block, pool in found.items()), key=lambda kept: kept[1].depth)
