"""Ghost caches: what a pool would find if it had another size or lost blocks in another order, from live requests.

Only blocks whose keys lie below a bound are followed, in caches smaller by the same share: spatially hashed sampling as
in SHARDS (Waldspurger, Park, Garthwaite and Ahmad, "Efficient MRC construction with SHARDS", FAST '15). Keys are hashes
already. What is missed is counted, and what is found is the rest: many blocks are missed once, but few are found very
often, and in a sample they are or are not. The real pool's misses are known of all blocks: they say how much of what is
missed the sample stands for. A cache of another size misses mostly the same ones, so that chance hardly counts.

Where all blocks are followed, each cache looks for beginnings of blocks among its own. In a sample most of these are
missing: there beginnings are found where the blocks that the real pool copied them from would still be. Beginnings that
only a larger cache would have are not counted then, and no cache is said to find more than one that loses nothing.

A block is found only if all before it are. Nothing has to check that: who uses a block uses those before it, and gives
them back later. So the block before is lost later in every order here, and each block may be followed alone.

Not followed are pins, quotas, rules that change, what operators purge, and how many blocks are taken ahead of need.
Tiers count as one cache of their common size.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from cachemgr.blocks.block_keys import child_key
from cachemgr.blocks.hit_counters import BUCKET_SECONDS, MAX_WINDOW_SECONDS
from cachemgr.retention.priority import DEFAULT_PRIORITY, RetentionRequest
from cachemgr.telemetry.nested_caches import Content, Ghost, NestedCaches
from cachemgr.types import GhostCache, GhostPolicy, GhostReport

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from cachemgr.blocks.block_pool import BlockPool
    from cachemgr.sequences.sequence import Sequence as LiveSequence
    from cachemgr.types import ManagerConfig

DEVICE_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
# Of all tiers together, where there are several.
TIER_FACTORS = (0.5, 1.0, 2.0, 4.0)
# Half a megabyte: some million blocks are told apart.
_SEEN_BITS = 1 << 22
_EVERY_KEY = b"\xff" * 33


_REUSED = RetentionRequest("reused", DEFAULT_PRIORITY + 1, 600.0)


class _Counts:
    """Lookups of some time. Missed in a zone: found by caches from that number on."""

    def __init__(self, begin: float, policies: int, zones: int) -> None:
        self.begin = begin
        # Full blocks of prompts, their tokens that can be found, all tokens, and of these what the pool has found.
        self.blocks = self.reachable = self.tokens = self.found = 0
        # Tokens that the pool has found in blocks of which only the beginning matched.
        self.partly = 0
        # Tokens that a cache which loses nothing would have found at least.
        self.endless = 0
        # Of full blocks that the pool has not found: all of them, and those of the sample.
        self.pool_missed_blocks = self.pool_missed_tokens = 0
        self.sampled_missed_blocks = self.sampled_missed_tokens = 0
        # Tokens of beginnings whose source is in the sample.
        self.sampled_partly = 0
        # By policy and cache, where all blocks are followed.
        self.found_tokens = [[0] * zones for _ in range(policies)]
        # By policy and zone, of the sample.
        self.missed_blocks = [[0] * (zones + 1) for _ in range(policies)]
        self.missed_tokens = [[0] * (zones + 1) for _ in range(policies)]
        self.missed_partly = [[0] * (zones + 1) for _ in range(policies)]


class _Followed:
    """One policy's caches, and the blocks that live sequences use in them, by handle."""

    def __init__(self, policy: GhostPolicy, limits: tuple[float, ...]) -> None:
        self.policy = policy
        self.caches = NestedCaches(limits)
        self.live: dict[int, list[Ghost]] = {}

    def use(self, key: bytes, request: RetentionRequest | None, content: Content | None = None) -> tuple[Ghost, int]:
        block, zone = self.caches.use(key, content)
        if self.policy is GhostPolicy.SEGMENTED_LRU:
            request = _REUSED if block.stored else None
        elif self.policy is GhostPolicy.LRU:
            request = None
        if request is not None:
            self.caches.grant(block, request)
        return block, zone


class Ghosts:
    """The ghost caches of one pool with full attention. `sample`: blocks followed of as many as the device has.

    partial_reuse: blocks that only begin as a prompt goes on are found, too.
    """

    def __init__(self, pool: BlockPool, sample: int, *, partial_reuse: bool) -> None:
        self.pool = pool
        self._partial_reuse = partial_reuse
        self._size = pool.block_size
        self._total = pool.device.total
        self.rate = min(1.0, sample / self._total)
        self._bound = _EVERY_KEY if self.rate == 1.0 else int(self.rate * (1 << 64)).to_bytes(8, "big")
        self._sizes = self._wanted_sizes()
        limits = self._limits()
        self._followed = [_Followed(policy, limits) for policy in GhostPolicy]
        # A bit for each key that was ever asked for or stored; keys may share one.
        self._seen = bytearray(_SEEN_BITS // 8)
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

    def admitted(self, sequence: LiveSequence, now: float, *, is_read: bool, source: bytes = b"") -> None:
        """A sequence has got its blocks; `is_read` if it has looked for cached ones.

        source: key of the block whose beginning it has found, empty where it has found none.
        """
        if self.pool.device.total != self._total:
            self._resize()
        size, bound = self._size, self._bound
        full = len(sequence.tokens) // size
        sequence.key(full - 1)
        keys = sequence.keys
        # The last token is computed: without partial reuse, all of a block that ends with it.
        last = len(sequence.tokens) - 1
        reachable = min(full * size, last if self._partial_reuse else last // size * size)
        counted = self._counted(sequence, now, full, reachable) if is_read else ()
        places = [place for place, key in enumerate(keys) if key < bound]
        requests = self._requests(sequence, places)
        is_whole = self._partial_reuse and sequence.cached_tokens >= reachable
        known = full if is_whole else sequence.cached_tokens // size
        partly = sequence.cached_tokens % size if source and source < bound else 0
        endless = max(sequence.cached_tokens, min(reachable, self._count_seen(keys[:full], known) * size))
        if not sequence.no_store:
            self._see(keys[known:full])
        for counts in counted:
            counts.endless += endless
            missed = [min(size, reachable - place * size) for place in places if place >= known]
            counts.sampled_missed_blocks += len(missed)
            counts.sampled_missed_tokens += sum(missed)
            counts.pool_missed_blocks += full - known
            counts.pool_missed_tokens += max(0, reachable - known * size)
            counts.sampled_partly += partly
        # What the beginning is being copied from is in use besides, and among the blocks known here.
        copied_from = bool(source and sequence.tickets)
        in_use = (self.pool.device.used - copied_from) * self.rate
        for index, followed in enumerate(self._followed):
            caches = followed.caches
            caches.advance(now)
            if self.rate == 1.0:
                self._count_found(index, sequence, counted)
            elif partly:
                copied = caches.blocks.get(source)
                for counts in counted:
                    counts.missed_partly[index][len(self._sizes) if copied is None else copied.zone] += partly
            used: list[Ghost] = []
            for place, request in zip(places, requests, strict=True):
                if sequence.no_store and keys[place] not in caches.blocks:
                    zone = len(self._sizes)
                else:
                    content = None if keys[place] in caches.blocks else self._content(sequence, place)
                    block, zone = followed.use(keys[place], request, content)
                    used.append(block)
                if zone:
                    tokens = min(size, reachable - place * size)
                    for counts in counted:
                        counts.missed_blocks[index][zone] += 1
                        counts.missed_tokens[index][zone] += tokens
            followed.live[sequence.handle] = used
            caches.fit(in_use)

    def _content(self, sequence: LiveSequence, place: int) -> Content | None:
        """What a full block is found by, where all blocks are followed."""
        if self.rate < 1.0:
            return None
        start, end = place * self._size, (place + 1) * self._size
        return Content(sequence.key(place - 1), sequence.packed(start, end), sequence.block_scope(start, end))

    def _count_found(self, index: int, sequence: LiveSequence, counted: tuple[_Counts, ...]) -> None:
        """Where all blocks are followed: what each cache of a policy has of a prompt that looks for cached blocks."""
        if counted:
            for number, tokens in enumerate(self._found(sequence, self._followed[index].caches)):
                for counts in counted:
                    counts.found_tokens[index][number] += tokens

    def _found(self, sequence: LiveSequence, caches: NestedCaches) -> list[int]:
        """Tokens that each cache has of a prompt; what is copied to it is used last."""
        size, number, most = self._size, len(self._sizes), len(sequence.tokens) - 1
        found = [0] * number
        sources: dict[Ghost, None] = {}
        # Caches from this one on have all blocks so far.
        first = 0
        for place in range(most // size + 1):
            block = caches.blocks.get(sequence.key(place)) if place < most // size else None
            zone = number if block is None else block.zone
            if zone <= first:
                continue
            start, end = place * size, min(most, (place + 1) * size)
            found[first:zone] = [start] * (zone - first)
            parent, extra = sequence.key(place - 1), sequence.extra_of(start, start + size)
            if self._partial_reuse:
                tokens = sequence.packed(start, end)
                for cache, source, common in caches.beginnings(parent, tokens, extra, range(first, zone)):
                    found[cache] += min(size - 1, common)
                    sources[source] = None
            elif start < end < start + size and sequence.executor.stores_partial:
                key = child_key(parent, sequence.packed(start, end), sequence.extra_of(start, end))
                exact = caches.blocks.get(key)
                if exact is not None and exact.zone < zone:
                    for cache in range(max(first, exact.zone), zone):
                        found[cache] += end - start
                    sources[exact] = None
            first = zone
            if first == number:
                break
        for source in sources:
            caches.touch(source)
        return found

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

    def _requests(self, sequence: LiveSequence, places: Sequence[int]) -> list[RetentionRequest | None]:
        """What is wished for each place or for what comes behind it, which it outlives."""
        requests, size = sequence.retention, self._size
        best = requests.at(len(sequence.tokens))
        found = []
        for place in reversed(places):
            best = _larger(requests.at(place * size), best)
            found.append(best)
        return found[::-1]

    def stored(self, sequence: LiveSequence) -> int:
        """Leading blocks of a sequence that hold what their keys say."""
        eviction = sequence.eviction
        # Once it has evicted tokens, its table tells nothing of what it has left behind.
        if eviction is not None and eviction.has_begun:
            return eviction.committed // self._size
        return sequence.tables[self.pool.spec.group].committed

    def released(self, sequence: LiveSequence, stored: int) -> None:
        """A sequence has given its blocks back, of which so many were stored."""
        size, bound = self._size, self._bound
        in_use = self.pool.device.used * self.rate
        keys = sequence.keys[:stored]
        known = sequence.admission.cached_tokens // size
        fresh: list[tuple[bytes, RetentionRequest | None, Content | None]] = []
        longer: list[Content] = []
        if not sequence.no_store:
            fresh = [
                (key, sequence.retention.at(place * size), self._content(sequence, place))
                for place, key in enumerate(keys[known:], known)
                if key < bound
            ]
            self._see(keys[known:])
            longer = self._longer(sequence, known, stored)
            is_partial = stored == sequence.computed // size and sequence.computed % size
            if is_partial and sequence.executor.stores_partial:
                start, end = stored * size, sequence.computed
                tail = Content(sequence.key(stored - 1), sequence.packed(start, end), sequence.block_scope(start, end))
                last = child_key(tail.parent, tail.tokens, tail.scope.extra)
                if last < bound:
                    fresh.append((last, sequence.retention.at(start), tail))
                longer.append(tail)
        keep = set(keys)
        for followed in self._followed:
            used = followed.live.pop(sequence.handle, [])
            mine = {block.key for block in used}
            for key, request, content in fresh:
                if key not in mine and not _is_covered(followed.caches, content):
                    used.append(followed.use(key, request, content)[0])
            keep.update(key for key, _, _ in fresh)
            for block in reversed(used):
                block.stored = block.stored or block.key in keep
                followed.caches.drop(block)
            for content in longer:
                followed.caches.cover(content)
            followed.caches.fit(in_use)

    def _see(self, keys: Sequence[bytes]) -> None:
        seen = self._seen
        for key in keys:
            at = int.from_bytes(key[:4], "little") % _SEEN_BITS
            seen[at >> 3] |= 1 << (at & 7)

    def _count_seen(self, keys: Sequence[bytes], known: int) -> int:
        """Leading keys that were seen before, of which so many are known to be."""
        seen = self._seen
        for place in range(known, len(keys)):
            at = int.from_bytes(keys[place][:4], "little") % _SEEN_BITS
            if not seen[at >> 3] & 1 << (at & 7):
                return place
        return len(keys)

    def _longer(self, sequence: LiveSequence, known: int, stored: int) -> list[Content]:
        """Its full blocks that have siblings which are found by a beginning."""
        size, found = self._size, []
        for place in range(known, stored):
            parent = sequence.key(place - 1)
            if any(followed.caches.has_children(parent) for followed in self._followed):
                start, end = place * size, (place + 1) * size
                found.append(Content(parent, sequence.packed(start, end), sequence.block_scope(start, end)))
        return found

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
        blocks, reachable, tokens, hit, partly, endless = (
            sum(getattr(counts, field) for counts in found)
            for field in ("blocks", "reachable", "tokens", "found", "partly", "endless")
        )
        pool_blocks, pool_tokens, sampled_blocks, sampled_tokens, sampled_partly = (
            sum(getattr(counts, field) for counts in found)
            for field in (
                "pool_missed_blocks",
                "pool_missed_tokens",
                "sampled_missed_blocks",
                "sampled_missed_tokens",
                "sampled_partly",
            )
        )
        per_block = pool_blocks / sampled_blocks if sampled_blocks else 1 / self.rate
        per_token = pool_tokens / sampled_tokens if sampled_tokens else 1 / self.rate
        caches = []
        for index, followed in enumerate(self._followed):
            for zone, size in enumerate(self._sizes):
                missed_blocks = sum(sum(counts.missed_blocks[index][zone + 1 :]) for counts in found) * per_block
                missed_tokens = sum(sum(counts.missed_tokens[index][zone + 1 :]) for counts in found) * per_token
                missed_partly = sum(sum(counts.missed_partly[index][zone + 1 :]) for counts in found)
                whole = max(0.0, reachable - missed_tokens)
                found_tokens = sum(counts.found_tokens[index][zone] for counts in found)
                beginnings = partly * (1 - missed_partly / sampled_partly) if sampled_partly else partly
                caches.append(
                    GhostCache(
                        followed.policy,
                        size,
                        max(0, round(blocks - missed_blocks)),
                        min(endless, round(whole + beginnings)) if self.rate < 1.0 else found_tokens,
                    )
                )
        return GhostReport(caches, blocks, tokens, hit, self.rate)


def _larger(request: RetentionRequest | None, other: RetentionRequest | None) -> RetentionRequest | None:
    return max((one for one in (request, other) if one is not None), key=_extent, default=None)


def _extent(request: RetentionRequest) -> tuple[int, float]:
    return request.priority, float("inf") if request.duration is None else request.duration


def _is_covered(caches: NestedCaches, content: Content | None) -> bool:
    """Whether a block begins with this one's tokens. Caches too small for it are taken to have it: one size decides."""
    return content is not None and caches.covering(content) is not None


def ghosts_of(pools: Iterable[BlockPool], config: ManagerConfig) -> Ghosts | None:
    """Those of an executor: of its first pool with full attention, which decides how much of a prompt is found."""
    pool = next((pool for pool in pools if pool.window is None), None)
    if pool is None or not config.ghost_sample:
        return None
    return Ghosts(pool, config.ghost_sample, partial_reuse=config.partial_reuse)
