"""Quotas in a tier: how many blocks each account may have, and whose block is evicted next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from heapq import heapify, heappop, heappush

from cachemgr.blocks.block import Account, Block, account_of
from cachemgr.blocks.eviction_order import EvictionQueue, position, precedes
from cachemgr.errors import SequenceTooLongError
from cachemgr.types import TierKind


class Share:
    """The blocks of one account in a tier."""

    __slots__ = ("account", "ceiling", "count", "floor", "order", "used")

    def __init__(self, account: Account, kind: TierKind) -> None:
        self.account = account
        self.floor = account.floor(kind)
        self.ceiling = account.ceiling(kind)
        self.count = 0
        self.used = 0
        self.order = EvictionQueue()

    def protected(self, claimed: int = 0) -> int:
        """How many cached blocks only the account may evict, after `claimed` of its blocks have come into use."""
        return max(0, min(self.count, self.floor) - self.used - claimed)

    @property
    def is_full(self) -> bool:
        """Whether the account's next block must replace one of the account's own blocks."""
        return self.ceiling is not None and self.count >= self.ceiling


class Shares:
    """Finds which of thousands of shares loses a block next; with `floors_count`, only shares above their floor.

    The position in an entry of the heap may be lower than that of the share's present first block. `first` corrects
    such entries.
    """

    __slots__ = ("_floors_count", "_heap", "_positions", "_pushes")

    def __init__(self, *, floors_count: bool) -> None:
        self._floors_count = floors_count
        # (priority, recency, number of the push, share). An entry is stale if `_positions` has another position.
        self._heap: list[tuple[int, int, int, Share]] = []
        self._positions: dict[Share, tuple[int, int]] = {}
        self._pushes = 0

    def note(self, share: Share, at: tuple[int, int], most: int) -> None:
        """Notes that a share has an evictable block at this position. most: number of shares, which bounds the heap."""
        known_at = self._positions.get(share)
        if (known_at is not None and known_at <= at) or not self._may_lose(share):
            return
        if len(self._heap) > 64 + 2 * most:
            self._positions = {known: at for known, at in self._positions.items() if known.order.first() is not None}
            self._heap = [entry for entry in self._heap if self._positions.get(entry[3]) == entry[:2]]
            heapify(self._heap)
        self._push(share, at)

    def _may_lose(self, share: Share) -> bool:
        return not self._floors_count or share.count > share.floor

    def first(self) -> Block | None:
        heap = self._heap
        while heap:
            priority, recency, _, share = heap[0]
            at = priority, recency
            if self._positions.get(share) != at:
                heappop(heap)
                continue
            block = share.order.first() if self._may_lose(share) else None
            if block is not None and position(block) == at:
                return block
            heappop(heap)
            del self._positions[share]
            if block is not None:
                self._push(share, position(block))
        return None

    def _push(self, share: Share, at: tuple[int, int]) -> None:
        self._positions[share] = at
        self._pushes += 1
        heappush(self._heap, (*at, self._pushes, share))


class TierAccounts:
    """The blocks of one tier by account: how many each account may have, and whose block is evicted next.

    `order` has the evictable blocks that no quota covers, `shares` the accounts that have blocks here. `protected` is
    the number of cached blocks that floors protect.
    """

    def __init__(self, kind: TierKind) -> None:
        self._kind = kind
        self.order = EvictionQueue()
        self.shares: dict[Account, Share] = {}
        self.protected = 0
        self._losing, self._holding = Shares(floors_count=True), Shares(floors_count=False)

    def allowed(
        self, free: int, account: Account | None, claimed: Collection[Block] = (), *, within_ceiling: bool = True
    ) -> int:
        """How many of `free` slots an account may take within other accounts' floors and its own ceiling.

        `claimed` are cached blocks that are about to be used and that `free` leaves out. Negative if slots are missing,
        as above the ceiling.
        """
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
        return self.shares.get(account) or Share(account, self._kind)

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
        """The block that is evicted when an account needs a slot; None if no block may be evicted."""
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
        if best is None and self._kind is TierKind.DEVICE:
            # Protected children may keep all other blocks from eviction. On the device, floors then give way.
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
            text = f"the sequence needs {wanted} blocks, more than the {share.ceiling} of its quota"
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
            share = self.shares[account] = Share(account, self._kind)
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
        share.floor, share.ceiling = account.floor(self._kind), account.ceiling(self._kind)
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
