"""Ghost caches: the hits of a pool with a different size or eviction order, from live requests.

Only blocks whose keys lie below a bound are simulated, in caches smaller by the same share: spatially hashed sampling
as in SHARDS (Waldspurger, Park, Garthwaite and Ahmad, "Efficient MRC construction with SHARDS", FAST '15). Keys are
already hashes. Misses are counted, and hits are the remainder. A few blocks hit very often, so the hits of a sample
depend on which of these blocks are in the sample; misses are spread over many blocks. The misses of the real pool are
known for all blocks, and give the factor from the sample to all blocks. A cache of a different size has mostly the
same misses, so the sampling error is small.

If all blocks are simulated, each cache matches beginnings of its own blocks. In a sample, most of these blocks are
missing, so a beginning is a hit if the block from which the real pool copied it is still cached. Beginnings that only
a larger cache would have are then not counted, and no cache has more hits than a cache that evicts nothing.

A block is a hit only if all its ancestors are hits. This needs no check: a sequence uses a block with its ancestors,
and releases the ancestors later. So every eviction order here evicts a block before its ancestors, and each block is
simulated alone.

Quotas, changes of rules and purges are not simulated. Pins and capacity ahead of need only take space in every cache.
All tiers count as one cache of their total size.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from cachemgr.blocks.hit_counters import BUCKET_SECONDS, MAX_WINDOW_SECONDS
from cachemgr.retention.priority import DEFAULT_PRIORITY, RetentionRequest
from cachemgr.telemetry.nested_caches import Content, Ghost, NestedCaches
from cachemgr.types import GhostCache, GhostPolicy, GhostReport
from protos.kvcommon.block_keys import child_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from cachemgr.blocks.block_pool import BlockPool
    from cachemgr.sequences.sequence import Sequence as LiveSequence
    from cachemgr.types import ManagerConfig

DEVICE_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
# Sizes relative to all tiers together, if there are several.
TIER_FACTORS = (0.5, 1.0, 2.0, 4.0)
# Half a megabyte, which is enough to distinguish about a million blocks.
_SEEN_BITS = 1 << 22
_EVERY_KEY = b"\xff" * 33


_REUSED = RetentionRequest("reused", DEFAULT_PRIORITY + 1, 600.0)


class _Counts:
    """Counters of a period's lookups. A miss in zone N is a hit in cache N and all larger caches."""

    def __init__(self, begin: float, policies: int, zones: int) -> None:
        self.begin = begin
        # Full blocks of prompts, tokens of these blocks that can be hits, all tokens, and tokens that the pool had.
        self.blocks = self.reachable = self.tokens = self.found = 0
        # Hits of the pool in blocks with only a matching beginning.
        self.partly = 0
        # Estimated hits of a cache that evicts nothing: without beginnings of blocks; keys that share a bit add to it.
        self.endless = 0
        # Full blocks that the pool missed, and their tokens: all, then those in the sample.
        self.pool_missed_blocks = self.pool_missed_tokens = 0
        self.sampled_missed_blocks = self.sampled_missed_tokens = 0
        # Tokens of beginnings whose source is in the sample.
        self.sampled_partly = 0
        # By policy and cache, if all blocks are simulated.
        self.hit_tokens = [[0] * zones for _ in range(policies)]
        # By policy and zone, in the sample.
        self.missed_blocks = [[0] * (zones + 1) for _ in range(policies)]
        self.missed_tokens = [[0] * (zones + 1) for _ in range(policies)]
        self.missed_partly = [[0] * (zones + 1) for _ in range(policies)]


class _PolicyCaches:
    """The caches of one policy, and the blocks that live sequences use in them, by handle."""

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
    """The ghost caches of one pool with full attention.

    `sample` is the number of sampled blocks in a cache as large as the device; a smaller device is simulated fully.
    With `partial_reuse`, the matching beginning of a block is a hit, too.
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
        self._policies = [_PolicyCaches(policy, limits) for policy in GhostPolicy]
        # A bit for each key that was ever looked up or stored; keys may share a bit.
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
        """Notes that a sequence was admitted; `is_read` if it has looked for cached blocks.

        `source` is the key of the block whose first tokens the sequence copies or takes over; empty for none.
        """
        if self.pool.device.total != self._total:
            self._resize()
        size, bound = self._size, self._bound
        full = len(sequence.tokens) // size
        sequence.key(full - 1)
        keys = sequence.keys
        # The last token is computed; without partial reuse, so is the whole block that ends with it.
        last = len(sequence.tokens) - 1
        reachable = min(full * size, last if self._partial_reuse else last // size * size)
        counted = self._counted(sequence, now, full, reachable) if is_read else ()
        indexes = [block_index for block_index, key in enumerate(keys) if key < bound]
        requests = self._requests(sequence, indexes)
        is_whole = self._partial_reuse and sequence.cached_tokens >= reachable
        known = full if is_whole else sequence.cached_tokens // size
        partly = sequence.cached_tokens % size if source and source < bound else 0
        endless = max(sequence.cached_tokens, min(reachable, self._count_seen(keys[:full], known) * size))
        self._see(keys[known : sequence.storable(full * size) // size])
        for counts in counted:
            counts.endless += endless
            missed = [min(size, reachable - block_index * size) for block_index in indexes if block_index >= known]
            counts.sampled_missed_blocks += len(missed)
            counts.sampled_missed_tokens += sum(missed)
            counts.pool_missed_blocks += full - known
            counts.pool_missed_tokens += max(0, reachable - known * size)
            counts.sampled_partly += partly
        # The copied source counts as used in the pool, but is already among the simulated blocks.
        copied_from = bool(source and sequence.tickets)
        in_use = (self.pool.device.used - copied_from) * self.rate
        for index, policy in enumerate(self._policies):
            caches = policy.caches
            caches.advance(now)
            if self.rate == 1.0:
                self._count_hits(index, sequence, counted)
            elif partly:
                copied = caches.blocks.get(source)
                for counts in counted:
                    counts.missed_partly[index][len(self._sizes) if copied is None else copied.zone] += partly
            used: list[Ghost] = []
            for block_index, request in zip(indexes, requests, strict=True):
                if keys[block_index] not in caches.blocks and not sequence.stores_to((block_index + 1) * size):
                    zone = len(self._sizes)
                else:
                    content = None if keys[block_index] in caches.blocks else self._content(sequence, block_index)
                    block, zone = policy.use(keys[block_index], request, content)
                    used.append(block)
                if zone:
                    tokens = min(size, reachable - block_index * size)
                    for counts in counted:
                        counts.missed_blocks[index][zone] += 1
                        counts.missed_tokens[index][zone] += tokens
            policy.live[sequence.handle] = used
            caches.fit(in_use)

    def _content(self, sequence: LiveSequence, block_index: int) -> Content | None:
        """The content by which a beginning matches a full block; None unless all blocks are simulated."""
        if self.rate < 1.0:
            return None
        start, end = block_index * self._size, (block_index + 1) * self._size
        return Content(sequence.key(block_index - 1), sequence.packed(start, end), sequence.block_scope(start, end))

    def _count_hits(self, index: int, sequence: LiveSequence, counted: tuple[_Counts, ...]) -> None:
        """Counts the hits of each cache of a policy, if all blocks are simulated and the prompt was looked up."""
        if counted:
            for number, tokens in enumerate(self._hits(sequence, self._policies[index].caches)):
                for counts in counted:
                    counts.hit_tokens[index][number] += tokens

    def _hits(self, sequence: LiveSequence, caches: NestedCaches) -> list[int]:
        """Returns the cached tokens of a prompt in each cache, and makes the sources of copies the newest blocks."""
        size, number, most = self._size, len(self._sizes), len(sequence.tokens) - 1
        found = [0] * number
        sources: dict[Ghost, None] = {}
        # Caches from this number on have all blocks so far.
        first = 0
        for block_index in range(most // size + 1):
            block = caches.blocks.get(sequence.key(block_index)) if block_index < most // size else None
            zone = number if block is None else block.zone
            if zone <= first:
                continue
            start, end = block_index * size, min(most, (block_index + 1) * size)
            found[first:zone] = [start] * (zone - first)
            parent, extra = sequence.key(block_index - 1), sequence.extra_of(start, start + size)
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

    def _requests(self, sequence: LiveSequence, indexes: Sequence[int]) -> list[RetentionRequest | None]:
        """The retention request of each block, raised to the requests of its descendants, which it outlives."""
        requests, size = sequence.retention, self._size
        best = requests.at(len(sequence.tokens))
        found = []
        for block_index in reversed(indexes):
            best = _larger(requests.at(block_index * size), best)
            found.append(best)
        return found[::-1]

    def stored(self, sequence: LiveSequence) -> int:
        """Returns how many leading blocks of a sequence hold the tokens of their keys."""
        # Once a sequence has evicted tokens, its table no longer shows its earlier blocks.
        if sequence.has_evicted_tokens:
            committed = _clean(sequence)
        else:
            committed = sequence.tables[self.pool.spec.group].committed * self._size
        return sequence.storable(committed) // self._size

    def released(self, sequence: LiveSequence, stored: int) -> None:
        """Notes that a sequence has released its blocks, the first `stored` of which were stored."""
        size, bound = self._size, self._bound
        in_use = self.pool.device.used * self.rate
        keys = sequence.keys[:stored]
        known, clean = sequence.admission.cached_tokens // size, _clean(sequence)
        fresh: list[tuple[bytes, RetentionRequest | None, Content | None]] = []
        longer: list[Content] = []
        if not sequence.no_store:
            fresh = [
                (key, sequence.retention.at(block_index * size), self._content(sequence, block_index))
                for block_index, key in enumerate(keys[known:], known)
                if key < bound
            ]
            self._see(keys[known:])
            longer = self._longer(sequence, known, stored)
            is_partial = stored == clean // size and clean % size
            if is_partial and sequence.executor.stores_partial and sequence.stores_to(clean):
                start, end = stored * size, clean
                tail = Content(sequence.key(stored - 1), sequence.packed(start, end), sequence.block_scope(start, end))
                last = child_key(tail.parent, tail.tokens, tail.scope.extra)
                if last < bound:
                    fresh.append((last, sequence.retention.at(start), tail))
                longer.append(tail)
        keep = set(keys)
        for policy in self._policies:
            used = policy.live.pop(sequence.handle, [])
            mine = {block.key for block in used}
            for key, request, content in fresh:
                if key not in mine and not _is_covered(policy.caches, content):
                    used.append(policy.use(key, request, content)[0])
            keep.update(key for key, _, _ in fresh)
            for block in reversed(used):
                block.stored = block.stored or block.key in keep
                policy.caches.drop(block)
            for content in longer:
                policy.caches.cover(content)
            policy.caches.fit(in_use)

    def _see(self, keys: Sequence[bytes]) -> None:
        seen = self._seen
        for key in keys:
            at = int.from_bytes(key[:4], "little") % _SEEN_BITS
            seen[at >> 3] |= 1 << (at & 7)

    def _count_seen(self, keys: Sequence[bytes], known: int) -> int:
        """How many leading keys were seen before; the first `known` keys always count as seen."""
        seen = self._seen
        for block_index in range(known, len(keys)):
            at = int.from_bytes(keys[block_index][:4], "little") % _SEEN_BITS
            if not seen[at >> 3] & 1 << (at & 7):
                return block_index
        return len(keys)

    def _longer(self, sequence: LiveSequence, known: int, stored: int) -> list[Content]:
        """The contents of the full blocks from `known` to `stored` whose siblings a beginning may match."""
        size, found = self._size, []
        for block_index in range(known, stored):
            parent = sequence.key(block_index - 1)
            if any(policy.caches.has_children(parent) for policy in self._policies):
                start, end = block_index * size, (block_index + 1) * size
                found.append(Content(parent, sequence.packed(start, end), sequence.block_scope(start, end)))
        return found

    def _resize(self) -> None:
        """Adapts the sizes after an operator has changed the pool's share of the device; the sampled keys stay."""
        self._total = self.pool.device.total
        zones = len(self._sizes)
        sizes = self._wanted_sizes()
        # The number of caches stays: the largest size is repeated, or the largest sizes are left out.
        self._sizes = sizes + [sizes[-1]] * (zones - len(sizes)) if len(sizes) <= zones else sizes[:zones]
        for policy in self._policies:
            policy.caches.limits = self._limits()

    def report(self, since: float | None = None) -> GhostReport:
        """The hits since about this time; None for all time."""
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
        for index, policy in enumerate(self._policies):
            for zone, size in enumerate(self._sizes):
                missed_blocks = sum(sum(counts.missed_blocks[index][zone + 1 :]) for counts in found) * per_block
                missed_tokens = sum(sum(counts.missed_tokens[index][zone + 1 :]) for counts in found) * per_token
                missed_partly = sum(sum(counts.missed_partly[index][zone + 1 :]) for counts in found)
                whole = max(0.0, reachable - missed_tokens)
                hit_tokens = sum(counts.hit_tokens[index][zone] for counts in found)
                beginnings = partly * (1 - missed_partly / sampled_partly) if sampled_partly else partly
                caches.append(
                    GhostCache(
                        policy.policy,
                        size,
                        max(0, round(blocks - missed_blocks)),
                        min(endless, round(whole + beginnings)) if self.rate < 1.0 else hit_tokens,
                    )
                )
        return GhostReport(caches, blocks, tokens, hit, self.rate)


def _clean(sequence: LiveSequence) -> int:
    """Tokens that were computed before the sequence evicted any."""
    eviction = sequence.eviction
    return sequence.computed if eviction is None or not eviction.has_begun else eviction.committed


def _larger(request: RetentionRequest | None, other: RetentionRequest | None) -> RetentionRequest | None:
    return max((one for one in (request, other) if one is not None), key=_extent, default=None)


def _extent(request: RetentionRequest) -> tuple[int, float]:
    return request.priority, float("inf") if request.duration is None else request.duration


def _is_covered(caches: NestedCaches, content: Content | None) -> bool:
    """Whether a simulated block begins with these tokens, even if only the largest cache still has that block."""
    return content is not None and caches.covering(content) is not None


def ghosts_of(pools: Iterable[BlockPool], config: ManagerConfig) -> Ghosts | None:
    """Makes the ghost caches of an executor, for its first pool with full attention, which decides the prefix hits.

    Returns None if there is no such pool, or if ghost caches are off.
    """
    pool = next((pool for pool in pools if pool.window is None), None)
    if pool is None or not config.ghost_sample:
        return None
    return Ghosts(pool, config.ghost_sample, partial_reuse=config.partial_reuse)
