"""Ghost caches: what a pool would find if it had another size or lost blocks in another order, from live requests.

Only blocks whose keys lie below a bound are followed, in caches smaller by the same share: spatially hashed sampling as
in SHARDS (Waldspurger, Park, Garthwaite and Ahmad, "Efficient MRC construction with SHARDS", FAST '15). Keys are hashes
already. What is missed is counted, and what is found is the rest: many blocks are missed once, but few are found very
often, and in a sample they are or are not.

A block is found only if all before it are. Nothing has to check that: who uses a block uses those before it, and gives
them back later. So the block before is lost later in every order here, and each block may be followed alone.

Not followed are pins, quotas, rules that change, what operators purge, and how many blocks are taken ahead of need.
Tiers count as one cache of their common size.
"""

from __future__ import annotations

import enum
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from cachemgr.meters import BUCKET_SECONDS, MAX_WINDOW_SECONDS
from cachemgr.nested_caches import Ghost, NestedCaches
from cachemgr.retention import DEFAULT_PRIORITY, Wish

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from cachemgr.pool import Pool
    from cachemgr.sequence import Sequence as LiveSequence

DEVICE_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
# Of all tiers together, where there are several.
TIER_FACTORS = (0.5, 1.0, 2.0, 4.0)
_EVERY_KEY = b"\xff" * 33


class GhostPolicy(enum.IntEnum):
    """Orders of loss; numbers as in the message."""

    # Priorities, durations and leases, as pools have them.
    RETENTION = 1
    # Nothing but the last use.
    LEAST_RECENTLY_USED = 2
    # The same, but what was found once goes after what never was, for a while.
    REUSED_LAST = 3


_REUSED = Wish("reused", DEFAULT_PRIORITY + 1, 600.0)


class GhostCache(NamedTuple):
    """What one cache would have found."""

    policy: GhostPolicy
    total_blocks: int
    hit_blocks: int
    hit_tokens: int


class GhostReport(NamedTuple):
    """All caches beside what was asked for and what the real pool found, and the share of blocks that is followed."""

    caches: list[GhostCache]
    queried_blocks: int
    queried_tokens: int
    hit_tokens: int
    sample_rate: float


class _Counts:
    """Lookups of some time. Missed in a zone: found by caches from that number on."""

    __slots__ = ("begin", "blocks", "found", "missed_blocks", "missed_tokens", "partly", "reachable", "tokens")

    def __init__(self, begin: float, policies: int, zones: int) -> None:
        self.begin = begin
        # Full blocks of prompts, their tokens that can be found, all tokens, and of these what the pool has found.
        self.blocks = self.reachable = self.tokens = self.found = 0
        # Tokens that the pool has found in blocks of which only the beginning matched.
        self.partly = 0
        # By policy and zone, of the sample.
        self.missed_blocks = [[0] * (zones + 1) for _ in range(policies)]
        self.missed_tokens = [[0] * (zones + 1) for _ in range(policies)]


class _Followed:
    """One policy's caches, and the blocks that live sequences use in them, by handle."""

    def __init__(self, policy: GhostPolicy, limits: tuple[float, ...]) -> None:
        self.policy = policy
        self.caches = NestedCaches(limits)
        self.live: dict[int, list[Ghost]] = {}

    def use(self, key: bytes, wish: Wish | None) -> tuple[Ghost, int]:
        block, zone = self.caches.use(key)
        if self.policy is GhostPolicy.REUSED_LAST:
            wish = _REUSED if block.stored else None
        elif self.policy is GhostPolicy.LEAST_RECENTLY_USED:
            wish = None
        if wish is not None:
            self.caches.wish(block, wish)
        return block, zone


class Ghosts:
    """The ghost caches of one pool with full attention. `sample`: blocks followed of as many as the device has."""

    def __init__(self, pool: Pool, sample: int) -> None:
        self.pool = pool
        self._size = pool.block_size
        self._total = pool.device.total
        self.rate = min(1.0, sample / self._total)
        self._bound = _EVERY_KEY if self.rate == 1.0 else int(self.rate * (1 << 64)).to_bytes(8, "big")
        self._sizes = self._wanted_sizes()
        limits = self._limits()
        self._followed = [_Followed(policy, limits) for policy in GhostPolicy]
        self._all = self._counts(0.0)
        self._buckets: deque[_Counts] = deque(maxlen=int(MAX_WINDOW_SECONDS / BUCKET_SECONDS) + 1)

    def _wanted_sizes(self) -> list[int]:
        device, *lower = (tier.total for tier in self.pool.tiers)
        sizes = {max(1, round(device * factor)) for factor in DEVICE_FACTORS}
        if any(lower):
            sizes |= {max(1, round((device + sum(lower)) * factor)) for factor in TIER_FACTORS}
        return sorted(sizes)

    def _limits(self) -> tuple[float, ...]:
        return tuple(size * self.rate for size in self._sizes)

    def _counts(self, begin: float) -> _Counts:
        return _Counts(begin, len(GhostPolicy), len(self._sizes))

    def admitted(self, sequence: LiveSequence, now: float, *, is_read: bool) -> None:
        """A sequence has got its blocks; `is_read` if it has looked for cached ones."""
        if self.pool.device.total != self._total:
            self._resize()
        size, bound = self._size, self._bound
        full = len(sequence.tokens) // size
        sequence.key(full - 1)
        keys = sequence.keys
        reachable = min(full * size, len(sequence.tokens) - 1)
        counted = self._counted(sequence, now, full, reachable) if is_read else ()
        places = [place for place, key in enumerate(keys) if key < bound]
        wishes = self._wishes(sequence, places)
        in_use = self.pool.device.used * self.rate
        for index, followed in enumerate(self._followed):
            caches = followed.caches
            caches.advance(now)
            used: list[Ghost] = []
            for place, wish in zip(places, wishes, strict=True):
                if sequence.no_store and keys[place] not in caches.blocks:
                    zone = len(self._sizes)
                else:
                    block, zone = followed.use(keys[place], wish)
                    used.append(block)
                if zone:
                    tokens = min(size, reachable - place * size)
                    for counts in counted:
                        counts.missed_blocks[index][zone] += 1
                        counts.missed_tokens[index][zone] += tokens
            followed.live[sequence.handle] = used
            caches.fit(in_use)

    def _counted(self, sequence: LiveSequence, now: float, full: int, reachable: int) -> tuple[_Counts, ...]:
        begin = now - now % BUCKET_SECONDS
        if not self._buckets or self._buckets[-1].begin < begin:
            self._buckets.append(self._counts(begin))
        found = sequence.cached_tokens
        counted = self._all, self._buckets[-1]
        for counts in counted:
            counts.blocks += full
            counts.reachable += reachable
            counts.tokens += len(sequence.tokens)
            counts.found += found
            if found != reachable:
                counts.partly += found % self._size
        return counted

    def _wishes(self, sequence: LiveSequence, places: Sequence[int]) -> list[Wish | None]:
        """What is wished for each place or for what comes behind it, which it outlives."""
        wishes, size = sequence.wishes, self._size
        best = wishes.at(len(sequence.tokens))
        found = []
        for place in reversed(places):
            best = _larger(wishes.at(place * size), best)
            found.append(best)
        return found[::-1]

    def stored(self, sequence: LiveSequence) -> int:
        """Leading blocks of a sequence that hold what their keys say."""
        eviction = sequence.eviction
        # Once it has evicted tokens, its table tells nothing of what it has left behind.
        if eviction is not None and eviction.moved:
            return eviction.settled // self._size
        return sequence.tables[self.pool.spec.group].settled

    def released(self, sequence: LiveSequence, stored: int) -> None:
        """A sequence has given its blocks back, of which so many were stored."""
        size, bound = self._size, self._bound
        in_use = self.pool.device.used * self.rate
        keys = sequence.keys[:stored]
        known = sequence.admission.cached_tokens // size
        fresh: list[tuple[bytes, Wish | None]] = []
        stale: list[bytes] = []
        if not sequence.no_store:
            fresh = [
                (key, sequence.wishes.at(place * size)) for place, key in enumerate(keys[known:], known) if key < bound
            ]
            parents = (sequence.key(known - 1), *keys[known:])
            *stale, last = (_partial_key(parent) for parent in parents)
            if stored == sequence.computed // size and sequence.computed % size and last < bound:
                fresh.append((last, sequence.wishes.at(stored * size)))
        keep = set(keys)
        for followed in self._followed:
            used = followed.live.pop(sequence.handle, [])
            mine = {block.key for block in used}
            used += [followed.use(key, wish)[0] for key, wish in fresh if key not in mine]
            keep.update(key for key, _ in fresh)
            for block in reversed(used):
                block.stored = block.stored or block.key in keep
                followed.caches.drop(block)
            for key in stale:
                if key < bound:
                    followed.caches.discard(key)
            followed.caches.fit(in_use)

    def _resize(self) -> None:
        """An operator has changed the device's share: the sizes change with it, what is followed does not."""
        self._total = self.pool.device.total
        zones = len(self._sizes)
        sizes = self._wanted_sizes()
        # Two that are one by chance stay two.
        self._sizes = sizes + [sizes[-1]] * (zones - len(sizes)) if len(sizes) <= zones else sizes[:zones]
        for followed in self._followed:
            followed.caches.limits = self._limits()

    def report(self, since: float | None = None) -> GhostReport:
        """What was found from about this time on, or from the beginning."""
        found = [self._all] if since is None else [one for one in self._buckets if one.begin + BUCKET_SECONDS > since]
        blocks, reachable, tokens, hit, partly = (
            sum(getattr(counts, field) for counts in found)
            for field in ("blocks", "reachable", "tokens", "found", "partly")
        )
        # Blocks of which the beginning is enough are taken to be found as often, beside whole ones, as they really are.
        beside = 1 + partly / (hit - partly) if hit > partly else 1.0
        caches = []
        for index, followed in enumerate(self._followed):
            for zone, size in enumerate(self._sizes):
                missed_blocks = sum(sum(counts.missed_blocks[index][zone + 1 :]) for counts in found) / self.rate
                missed_tokens = sum(sum(counts.missed_tokens[index][zone + 1 :]) for counts in found) / self.rate
                whole = max(0.0, reachable - missed_tokens)
                caches.append(
                    GhostCache(
                        followed.policy,
                        size,
                        max(0, round(blocks - missed_blocks)),
                        min(tokens, round(whole * beside)),
                    )
                )
        return GhostReport(caches, blocks, tokens, hit, self.rate)


def _partial_key(parent: bytes) -> bytes:
    """Stands for the partly filled block behind a full one: no other key, and as evenly spread."""
    return parent[::-1]


def _larger(wish: Wish | None, other: Wish | None) -> Wish | None:
    return max((one for one in (wish, other) if one is not None), key=_extent, default=None)


def _extent(wish: Wish) -> tuple[int, float]:
    return wish.priority, float("inf") if wish.duration is None else wish.duration


def ghosts_of(pools: Iterable[Pool], sample: int) -> Ghosts | None:
    """Those of an executor: of its first pool with full attention, which decides how much of a prompt is found."""
    pool = next((pool for pool in pools if pool.window is None), None)
    return Ghosts(pool, sample) if pool is not None and sample else None
