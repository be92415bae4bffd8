"""Holds and pins: references that keep blocks beyond their sequences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from cachemgr.blocks.block import Block, Node, account_of
from cachemgr.retention.bounds import MAX_PRIORITY
from cachemgr.retention.priority import PIN, RetentionRequest
from cachemgr.types import Outcome, PinRecord, Receipt

if TYPE_CHECKING:
    from cachemgr.blocks.block_pool import BlockPool

    Kept = list[tuple[BlockPool, Block]]


T = TypeVar("T")

_BLOCK: Callable[[tuple[BlockPool, Block]], Block] = itemgetter(1)

# Hints make no more pins on an executor with this many: operators see all pins, and each is kept in Redis.
MAX_PINS = 1000

_NO_TOTALS: Mapping[BlockPool, int] = MappingProxyType({})

# Blocks of expired holds that one call releases; each block takes some microseconds.
RELEASED_AT_A_TIME = 2048


@dataclass(slots=True, eq=False, repr=False)
class Hold:
    """Referenced blocks, root first, with an end time for each owner. A pin has one owner."""

    name: str
    blocks: Kept
    # By owner: the time at which the hold ends.
    owners: dict[str, float]
    pin: bool
    session_id: str | None = None


class Pinned(NamedTuple):
    """The answer to a request for a pin: the pin's name, empty for none, and older pins that were degraded."""

    name: str
    receipt: Receipt
    degraded: tuple[str, ...] = ()


class Holds:
    """The holds of one executor, oldest first. All pins together have a budget, a share of each pool."""

    def __init__(self, next_number: Callable[[], int], pin_budget: float, on_pin: Callable[[str], None]) -> None:
        """`on_pin` is called with the name of each pin that is new, is extended, or has ended."""
        self._next_number = next_number
        self._pin_budget = pin_budget
        self._holds: dict[str, Hold] = {}
        # Numbers of holds of each block, of pins of each block, and of pinned blocks of each pool.
        self._held: Counter[Block] = Counter()
        self._pinned: Counter[Block] = Counter()
        self._pinned_in: Counter[BlockPool] = Counter()
        self._num_pins = 0
        # Whether blocks of expired holds are still held.
        self.is_behind = False
        self._on_pin = on_pin

    def __iter__(self) -> Iterator[Hold]:
        return iter(list(self._holds.values()))

    def get(self, name: str) -> Hold | None:
        return self._holds.get(name)

    def keep(self, blocks: Kept, owners: dict[str, float], session_id: str | None) -> None:
        """Holds blocks of a released sequence for owners, each until a time."""
        self._add(Hold(f"hold-{self._next_number()}", blocks, owners, pin=False, session_id=session_id))

    def replace(self, pool: BlockPool, old: Block, block: Block) -> None:
        """Moves all holds of a block to the block that replaces it in the index."""
        for hold in self if old in self._held else ():
            for index, (_, held) in enumerate(hold.blocks):
                if held is old:
                    hold.blocks[index] = (pool, block)
                    self._count(hold, [(pool, old)], -1)
                    self._count(hold, [(pool, block)], 1)
                    pool.acquire(block)
                    old.refs -= 1
                    if not old.refs:
                        tier = pool.tier_of(old)
                        tier.used -= 1
                        tier.cached += 1
                        tier.accounts.count(account_of(old), used=-1)

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
        """Pins blocks from `with_ancestors`; if not all fit, the blocks nearest to the root.

        If the owner already pins exactly these blocks, the older pin is extended. With `displace`, older pins become
        leases if the budget requires so. Otherwise, older pins use up the budget.
        """
        fitting = self._fitting(blocks, displace=displace)
        if not blocks or not fitting:
            reason = "none of the blocks is cached" if not blocks else "the budget for pins is too small for a block"
            return Pinned("", Receipt("pin", Outcome.REJECTED, reason))
        same = self._same(fitting, owner)
        if same is None and not displace and self._num_pins >= MAX_PINS:
            return Pinned("", Receipt("pin", Outcome.REJECTED, f"there are {self._num_pins} pins already"))
        degraded = self._to_degrade(fitting) if same is None and displace else []
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
            self._on_pin(same.name)
            return Pinned(same.name, receipt)
        name = f"pin-{self._next_number()}"
        # Adds references before older pins release common blocks.
        self._add(Hold(name, list(fitting), {owner: now + duration}, pin=True))
        self.degrade(degraded, now)
        return Pinned(name, receipt, names)

    def restore_pins(self, pins: Iterable[PinRecord], pools: Sequence[BlockPool], now: float) -> None:
        """Restores an earlier manager's pins, oldest first, on their blocks that are cached again.

        If all pins together exceed the budget, the oldest become leases.
        """
        for pin in sorted(pins, key=lambda pin: pin.number):
            cached = [
                (pools[group], block)
                for group, key in pin.blocks
                if group < len(pools) and (block := pools[group].tree.by_key.get(key)) is not None
            ]
            blocks = with_ancestors(cached) if pin.remaining > 0 else []
            if blocks:
                self._add(Hold(pin.name, blocks, {pin.owner: now + pin.remaining}, pin=True))
            else:
                self._on_pin(pin.name)
        self.degrade(self.beyond_budget(), now)

    def beyond_budget(self, totals: Mapping[BlockPool, int] = _NO_TOTALS) -> list[Hold]:
        """The oldest pins that are beyond the budget, given the present pool sizes or `totals`."""
        return self._to_degrade([], totals)

    def degrade(self, pins: Iterable[Hold], now: float) -> None:
        """Turns pins into leases."""
        for hold in pins:
            self._degrade(hold, now)

    def end_pins(self) -> None:
        """Reports all pins as ended, since their blocks are about to be lost."""
        for hold in self:
            if hold.pin:
                self._on_pin(hold.name)

    def release(self, hold: Hold) -> int:
        """Ends a hold; returns how many blocks became free or evictable."""
        self._remove(hold)
        if hold.pin:
            self._on_pin(hold.name)
        freed = 0
        # The tail is released first, as when a sequence ends.
        for pool, block in reversed(hold.blocks):
            if block.refs > 1:
                block.refs -= 1
            else:
                pool.release(block)
                freed += not block.refs
        return freed

    def expire(self, now: float) -> None:
        """Ends holds whose owners have all expired; a long hold takes several calls.

        A hold that is too long for one call keeps its owners and its name until its last block is released.
        """
        left = RELEASED_AT_A_TIME
        self.is_behind = False
        for hold in self:
            lasting = {owner: end for owner, end in hold.owners.items() if end > now}
            if lasting:
                hold.owners = lasting
                continue
            while hold.blocks and left:
                pool, block = hold.blocks.pop()
                self._count(hold, [(pool, block)], -1)
                pool.release(block)
                left -= 1
            if hold.blocks:
                self.is_behind = True
                return
            self.release(hold)

    def clear(self) -> None:
        """Forgets all holds, since their blocks are lost."""
        self._holds.clear()
        self._held.clear()
        self._pinned.clear()
        self._pinned_in.clear()
        self._num_pins = 0
        self.is_behind = False

    def held(self) -> Counter[Block]:
        return Counter(self._held)

    def keep_cached(self) -> None:
        """Keeps holds of cached blocks whose ancestors are cached, drops all other blocks, and ends empty holds."""
        standing = _Ancestors(arrived=False)
        for hold in self:
            self._count(hold, hold.blocks, -1)
            kept: Kept = []
            lost: Kept = []
            for pool, block in hold.blocks:
                if block.parent is not None:
                    (kept if standing.add(pool, block) else lost).append((pool, block))
            hold.blocks = kept
            self._count(hold, kept, 1)
            for pool, block in lost:
                pool.release(block)
            if not hold.blocks:
                self._remove(hold)
            if hold.pin:
                self._on_pin(hold.name)

    def _add(self, hold: Hold) -> None:
        for pool, block in hold.blocks:
            if block.refs:
                block.refs += 1
            else:
                pool.acquire(block)
        self._holds[hold.name] = hold
        self._count(hold, hold.blocks, 1)
        self._num_pins += hold.pin
        if hold.pin:
            self._on_pin(hold.name)

    def _remove(self, hold: Hold) -> None:
        del self._holds[hold.name]
        self._count(hold, hold.blocks, -1)
        self._num_pins -= hold.pin

    def _count(self, hold: Hold, blocks: Kept, change: int) -> None:
        """Counts blocks that a hold gains or loses. A pin has no block twice."""
        pinned = self._pinned
        if change > 0:
            self._held.update(map(_BLOCK, blocks))
            if hold.pin:
                self._pinned_in.update([pool for pool, block in blocks if block not in pinned])
                pinned.update(map(_BLOCK, blocks))
            return
        _count_down(self._held, map(_BLOCK, blocks))
        if hold.pin:
            _count_down(pinned, map(_BLOCK, blocks))
            _count_down(self._pinned_in, [pool for pool, block in blocks if block not in pinned])

    def _budget(self, pool: BlockPool, total: int | None = None) -> int:
        return int((pool.device.total if total is None else total) * self._pin_budget)

    def _fitting(self, blocks: Kept, *, displace: bool) -> Kept:
        # A block of several pins counts once.
        fresh = Counter(pool for pool, block in blocks if displace or block not in self._pinned)
        left = {pool: self._budget(pool) - (0 if displace else self._pinned_in[pool]) for pool in fresh}
        if all(count <= left[pool] for pool, count in fresh.items()):
            return blocks
        fitting = []
        for pool, block in blocks:
            if not displace and block in self._pinned:
                fitting.append((pool, block))
            elif left[pool] > 0:
                left[pool] -= 1
                fitting.append((pool, block))
        return fitting

    def _same(self, blocks: Kept, owner: str) -> Hold | None:
        """Returns the pin of exactly these blocks that the owner already has."""
        alike = [
            hold
            for hold in self._holds.values()
            if hold.pin and owner in hold.owners and len(hold.blocks) == len(blocks)
        ]
        wanted = {block for _, block in blocks} if alike else set()
        # Compared from the tail, since most pins differ only there.
        return next((hold for hold in alike if all(block in wanted for _, block in reversed(hold.blocks))), None)

    def _to_degrade(self, fresh: Kept, totals: Mapping[BlockPool, int] = _NO_TOTALS) -> list[Hold]:
        """Older pins to degrade so that the rest fits the budget, oldest first. A block of several pins counts once."""
        kept = {block for _, block in fresh}
        together = self._pinned_in + Counter(pool for pool, block in fresh if block not in self._pinned)
        over = +Counter({pool: count - self._budget(pool, totals.get(pool)) for pool, count in together.items()})
        degraded: list[Hold] = []
        gone: Counter[Block] = Counter()
        for hold in self._holds.values() if over else ():
            if not over:
                break
            if not hold.pin or not any(pool in over for pool, _ in hold.blocks):
                continue
            degraded.append(hold)
            for pool, block in hold.blocks:
                gone[block] += 1
                if pool in over and gone[block] == self._pinned[block] and block not in kept:
                    _count_down(over, (pool,))
        return degraded

    def _degrade(self, hold: Hold, now: float) -> None:
        remaining = max(end - now for end in hold.owners.values())
        if remaining > 0:
            request = RetentionRequest(PIN + hold.name, MAX_PRIORITY, remaining)
            for pool, block in hold.blocks:
                if block.parent is not None:
                    pool.grant(block, request)
        self.release(hold)


def _count_down(counter: Counter[T], keys: Iterable[T]) -> None:
    """Decrements the counts of these keys, and deletes entries that reach 0."""
    for key in keys:
        count = counter[key] - 1
        if count:
            counter[key] = count
        else:
            del counter[key]


class _Ancestors:
    """Collects blocks whose ancestors are all cached; checks each block once."""

    def __init__(self, *, arrived: bool) -> None:
        """`arrived`: whether to leave out blocks with an open copy, and their descendants."""
        self._arrived = arrived
        self.with_ancestors: dict[Block, BlockPool] = {}
        self._left_out: set[Block] = set()

    def add(self, pool: BlockPool, block: Block) -> bool:
        """Collects a block with its ancestors. False if an ancestor is missing, as may happen in lower tiers."""
        line: list[Block] = []
        node: Node | None = block
        is_complete = True
        while isinstance(node, Block) and node not in self.with_ancestors:
            line.append(node)
            if node in self._left_out or (self._arrived and node in pool.offloader.offloading):
                is_complete = False
                break
            if pool.window is not None:
                break
            if not isinstance(node.parent, Block):
                is_complete = not node.depth
            node = node.parent
        if is_complete:
            self.with_ancestors.update(dict.fromkeys(reversed(line), pool))
        else:
            self._left_out.update(line)
        return is_complete


def with_ancestors(blocks: Kept) -> Kept:
    """These blocks if indexed and with their bytes in place, root first; with full attention, all ancestors too."""
    standing = _Ancestors(arrived=True)
    for pool, block in blocks:
        standing.add(pool, block)
    return sorted(((pool, block) for block, pool in standing.with_ancestors.items()), key=_depth)


def _depth(kept: tuple[BlockPool, Block]) -> int:
    return kept[1].depth
