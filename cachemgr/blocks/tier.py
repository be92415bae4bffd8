"""One tier of a pool: its empty slots, its evictable blocks, and the accounts that its blocks count against."""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from cachemgr.blocks.block import Account, Block, account_of
from cachemgr.blocks.eviction_queue import EvictionQueue, position, precedes
from cachemgr.blocks.quota import Share, Shares
from cachemgr.blocks.unread_slots import UnreadSlots
from cachemgr.errors import SequenceTooLongError
from cachemgr.types import RemovalCause, TierKind


@dataclass(slots=True)
class TierCounters:
    """What happened in a tier since its pool was registered; `removed` by cause, the gap in seconds.

    `written_through` counts copies of blocks that stayed on the device, `restored` blocks from before a restart.
    """

    allocated: int = 0
    removed: list[int] = field(default_factory=lambda: [0] * len(RemovalCause))
    offloaded: int = 0
    onloaded: int = 0
    copied_bytes: int = 0
    failed_copies: int = 0
    written_through: int = 0
    restored: int = 0
    timed_evictions: int = 0
    idle_before_eviction_seconds: float = 0.0

    @property
    def evicted(self) -> int:
        """Blocks that were dropped for other blocks, or because the pool shrank."""
        return self.removed[RemovalCause.EVICTED] + self.removed[RemovalCause.POOL_SHRUNK]

    @property
    def mean_idle_before_eviction(self) -> float:
        """Mean time from the last use of a block to its eviction."""
        return self.idle_before_eviction_seconds / self.timed_evictions if self.timed_evictions else 0.0

    def note_idle_before_eviction(self, seconds: float) -> None:
        """Notes that a block is evicted N = `seconds` after its last use."""
        self.timed_evictions += 1
        self.idle_before_eviction_seconds += seconds


# Indexes that were never allocated become `empty` in portions of this size.
_PORTION = 4096


class Tier:
    """Slots 1..size of one kind of memory.

    Indexes number the slots of all tiers of a pool in one row; the first slot is at index `offset` + 1. `used` counts
    blocks with references, `cached` blocks without. Slots that the pool may not use are `withheld`; while still in use,
    they count in `to_withhold`.
    """

    def __init__(self, kind: TierKind, offset: int, size: int, below: Tier | None = None) -> None:
        """`below` is the next lower tier that has slots; evicted blocks are offloaded there."""
        self.kind = kind
        self.below = below
        self.offset = offset
        self.size = size
        self.used = 0
        self.cached = 0
        # Blocks of the prefix tree, in use or not.
        self.indexed = 0
        self.withheld: list[int] = []
        # How many slots are still to be withheld, once they are free.
        self.to_withhold = 0
        # Withheld indexes that the executor has yet to overwrite.
        self.clearing: set[int] = set()
        self.counters = TierCounters()
        # By slot of a lower tier: the ticket of the copy that filled it. Steps fill the device's slots.
        self.generations = array("Q", bytes(0 if kind is TierKind.DEVICE else 8 * (size + 1)))
        # Indexes of empty slots, longest empty first. Indexes that were never allocated are added in portions, since
        # listing millions would delay a registration. While any are left, some are here.
        self.empty: deque[int] = deque()
        self._fresh = range(offset + 1, offset + size + 1)
        self._refill()
        # Set while stored blocks are read: free slots besides the empty slots.
        self.unread: UnreadSlots | None = None
        # Evictable blocks of accounts without a quota.
        self.order = EvictionQueue()
        # The shares of accounts that have blocks here.
        self.shares: dict[Account, Share] = {}
        self._losing, self._holding = Shares(floors_count=True), Shares(floors_count=False)
        # Cached blocks that the floors of all shares protect.
        self.protected = 0

    @property
    def total(self) -> int:
        """Slots that may be used."""
        return self.size - len(self.withheld) - self.to_withhold

    @property
    def free(self) -> int:
        """Slots that can be allocated: empty slots and slots of cached blocks."""
        free = self.size - len(self.withheld) - self.to_withhold - self.used
        # Pins and overwriting need no free slot, so more than the total may be in use while slots are to be withheld.
        return free if free > 0 else 0

    @property
    def num_empty(self) -> int:
        """Slots that are not known to hold a block."""
        return len(self.empty) + len(self._fresh) + len(self.unread or ())

    def all_empty(self) -> list[int]:
        return [*self.empty, *self._fresh, *map(self.offset.__add__, self.unread or ())]

    def take_empty(self, *, newest: bool = False) -> int:
        """Takes the index that has been empty longest (`newest`: shortest). Requires an empty index."""
        if not self.empty:
            assert self.unread is not None
            return self.offset + self.unread.take()
        index = self.empty.pop() if newest else self.empty.popleft()
        if not self.empty:
            self._refill()
        return index

    def set_empty(self, indexes: Iterable[int]) -> None:
        self.empty = deque(indexes)
        self._fresh = range(0)

    def _refill(self) -> None:
        self.empty.extend(self._fresh[:_PORTION])
        self._fresh = self._fresh[_PORTION:]

    def withhold(self, count: int) -> None:
        """Withholds `count` slots, which must be empty."""
        goal = len(self.withheld) + count
        fresh = self._fresh[max(0, len(self._fresh) - count) :]
        self._fresh = self._fresh[: len(self._fresh) - len(fresh)]
        self.withheld.extend(reversed(fresh))
        for _ in range(min(len(self.empty), count - len(fresh))):
            self.withheld.append(self.take_empty(newest=True))
        if len(self.withheld) < goal:
            assert self.unread is not None
            self.withheld.extend(map(self.offset.__add__, self.unread.take_many(goal - len(self.withheld))))

    @property
    def num_ready(self) -> int:
        """Withheld slots that may be used again, and those still to be withheld."""
        return len(self.withheld) - len(self.clearing) + self.to_withhold

    def release_withheld(self, count: int) -> None:
        """Makes `count` more slots usable, slots to be withheld first. Requires that `count` slots are ready."""
        kept = min(self.to_withhold, count)
        self.to_withhold -= kept
        count -= kept
        if not count:
            return
        if self.clearing:
            self.withheld.sort(key=lambda index: index not in self.clearing)
        self.empty.extend(islice(reversed(self.withheld), count))
        del self.withheld[-count:]

    def await_stored_blocks(self, filled: Sequence[int]) -> None:
        """Reserves the empty slots for stored blocks; `filled` is 0 for each slot that was never filled."""
        is_whole = self.num_empty == self.size
        free = None if is_whole else (index - self.offset for index in self.all_empty())
        self.unread = UnreadSlots(islice(filled, self.size), free)
        self.set_empty(())

    def is_unread(self, slot: int) -> bool:
        """Whether a stored block may be in a slot."""
        return self.unread is not None and 1 <= slot <= self.size and slot in self.unread

    def end_stored_blocks(self) -> None:
        """Makes unread slots empty: no stored block follows."""
        if self.unread is not None:
            self.empty.extend(map(self.offset.__add__, self.unread))
            self.unread = None

    def generation(self, index: int) -> int:
        """The ticket of the copy that filled an index; 0 on the device."""
        return self.generations[index - self.offset] if self.generations else 0

    def fill(self, index: int, generation: int) -> None:
        """Notes the ticket of the copy that fills an index."""
        if self.generations:
            self.generations[index - self.offset] = generation

    def free_for(self, account: Account | None, *, claimed: Collection[Block] = (), within_ceiling: bool = True) -> int:
        """Slots that can be allocated for an account, within other accounts' floors and its own ceiling.

        `claimed` are cached blocks that are about to be used. Negative if the account is above its ceiling.
        """
        free = self.free - len(claimed)
        if account is None and not self.shares:
            return free
        own = self._share(account)
        theirs = Counter(account_of(block) for block in claimed) if self.shares else Counter()
        free -= self.protected
        for owner, count in theirs.items():
            share = None if owner is None else self.shares.get(owner)
            if share is not None and share is not own:
                free += share.protected() - share.protected(count)
        if own is not None:
            free += own.protected()
            if within_ceiling and own.ceiling is not None:
                free = min(free, own.ceiling - own.used - theirs[account])
        return free

    def _share(self, account: Account | None) -> Share | None:
        """An account's share; an empty share if the account has no blocks here."""
        if account is None:
            return None
        return self.shares.get(account) or Share(account, self.kind)

    def enlist(self, block: Block, account: Account | None, *, newest: bool) -> None:
        """Adds a block to its eviction order, as the newest or by its recency."""
        share = self.shares.get(account) if account is not None else None
        order = self.order if share is None else share.order
        if newest:
            order.append(block)
        else:
            order.insert(block)
        if share is not None:
            self._note(share, block)

    def delist(self, block: Block, account: Account | None) -> None:
        """Removes a block from its eviction order."""
        share = self.shares.get(account) if account is not None else None
        (self.order if share is None else share.order).remove(block)

    def victim(self, account: Account | None) -> Block | None:
        """The block that is evicted next for an account."""
        if not self.shares:
            return self.order.first()
        first = self.order.first()
        own = None if account is None else self.shares.get(account)
        if own is not None and own.is_full and (block := own.order.first()) is not None:
            return block
        best = first
        for block in (self.first_of_shares(), None if own is None else own.order.first()):
            if block is not None and (best is None or precedes(block, best)):
                best = block
        if best is None and self.kind is TierKind.DEVICE:
            # Descendants of a needed block may be protected. On the device only, the floor gives way.
            best = self._holding.first()
        return best

    def first_of_shares(self) -> Block | None:
        """The block that is evicted next among accounts above their floor."""
        return self._losing.first()

    def wants_own(self, account: Account | None) -> bool:
        """Whether an account is at its ceiling and has an evictable block of its own."""
        share = self.shares.get(account) if self.shares and account is not None else None
        return share is not None and share.is_full and share.order.first() is not None

    def check_ceiling(self, account: Account | None, wanted: int) -> None:
        """Raises SequenceTooLongError if `wanted` exceeds the account's ceiling."""
        share = self._share(account)
        if share is not None and share.ceiling is not None and wanted > share.ceiling:
            text = f"{wanted} blocks are more than the {share.ceiling} of its quota"
            raise SequenceTooLongError(text, fields={"token_ids": f"must take at most {share.ceiling} blocks"})

    def is_closed(self, account: Account | None) -> bool:
        if account is None:
            return False
        share = self._share(account)
        return share is not None and share.is_full

    def count(self, account: Account | None, *, blocks: int = 0, used: int = 0) -> None:
        """Adds to the counts of an account's blocks and of its blocks in use."""
        if account is None:
            return
        share = self.shares.get(account)
        if share is None:
            share = self.shares[account] = Share(account, self.kind)
        self.protected -= share.protected()
        share.count += blocks
        share.used += used
        if not share.count:
            del self.shares[account]
            return
        self.protected += share.protected()
        if blocks > 0 and share.count == share.floor + 1:
            self._note(share, share.order.first())

    def blocks_of(self, account: Account) -> int:
        share = self.shares.get(account)
        return 0 if share is None else share.count

    def set_quota(self, account: Account) -> None:
        share = self.shares.get(account)
        if share is None:
            return
        self.protected -= share.protected()
        share.floor, share.ceiling = account.floor(self.kind), account.ceiling(self.kind)
        self.protected += share.protected()
        self._note(share, share.order.first())

    def _note(self, share: Share, block: Block | None) -> None:
        """Notes that a share has a new first block, or has risen above its floor."""
        if block is not None:
            for shares in (self._losing, self._holding):
                shares.note(share, position(block), len(self.shares))

    def orders(self) -> Iterator[EvictionQueue]:
        yield self.order
        for share in self.shares.values():
            yield share.order
