"""What the console shows, as values for JSON, in pieces of a few milliseconds. Of tokens only the number is told."""

from __future__ import annotations

from heapq import nlargest
from itertools import islice
from typing import Any

from cachemgr.blocks import children as siblings
from cachemgr.blocks.block import Block
from cachemgr.blocks.block_keys import Domain
from cachemgr.blocks.block_pool import Pool
from cachemgr.blocks.events import Event
from cachemgr.errors import EventsGoneError, InvalidField
from cachemgr.manager import CacheManager
from cachemgr.retention.leases import Lease, leases_of, shown_priority
from cachemgr.types import EventKind, RemovalCause

Json = dict[str, Any]

# Blocks of a page of the map; places looked at for a page of leases, and kinds of these in it.
PAGE = 2000
LEASE_PAGE = 10_000
LEASES = 500
# Children of a node that are looked at, and those of them that are shown.
_MAX_CHILDREN = 10_000
CHILDREN = 100
# Blocks of a chain that are one row.
_MAX_CHAIN = 10_000
EVENTS = 200


def pools(manager: CacheManager) -> Json:
    """All pools and executors, with the places of their tiers."""
    found = []
    for view in manager.queries.pools():
        pool = manager.queries.pool_to_read(view.pool_id)
        tiers = [
            {
                "tier": tier.kind.name.lower(),
                "offset": tier.offset,
                "size": tier.size,
                "total": tier.total,
                "used": tier.used,
                "cached": tier.cached,
                "evicted": tier.counters.evicted,
            }
            for tier in pool.tiers
            if tier.size
        ]
        found.append(
            {
                "pool_id": view.pool_id,
                "executor_id": view.executor_id,
                "block_size": view.block_size,
                "window": view.spec.attention_window,
                "tiers": tiers,
                "queried_tokens": view.queried_tokens,
                "hit_tokens": view.hit_tokens,
            }
        )
    return {"pools": found, "last_event": manager.queries.last_event}


def blocks(manager: CacheManager, pool_id: str, after: int) -> Json:
    """Used and cached blocks behind a place, in columns; `domain` points into `domains`."""
    pool = manager.queries.pool_to_read(pool_id)
    domains: dict[Domain | None, int] = {}
    columns: dict[str, list[Any]] = {
        name: [] for name in ("place", "priority", "references", "idle", "hits", "tokens", "domain")
    }
    place, priority, references, idle, hits, tokens, domain = columns.values()
    end = min(len(pool.blocks), after + 1 + PAGE)
    for block in islice(pool.blocks, after + 1, end):
        if block is None:
            continue
        place.append(block.slot)
        priority.append(block.priority)
        references.append(block.refs)
        idle.append(_idle(pool, block, manager.queries.now))
        hits.append(block.hits)
        tokens.append(len(block.tokens) // 4)
        domain.append(domains.setdefault(block.domain, len(domains)))
    return {
        "columns": columns,
        "domains": [_domain(one) for one in domains],
        "next": end - 1 if end < len(pool.blocks) else None,
    }


def block(manager: CacheManager, pool_id: str, place: int) -> Json:
    """One block, if there is one."""
    pool = manager.queries.pool_to_read(pool_id)
    found = pool.blocks[place] if 0 < place < len(pool.blocks) else None
    if found is None:
        return {"place": place, "empty": True}
    return {
        "place": place,
        "empty": False,
        "tier": pool.tier_of(found).kind.name.lower(),
        "key": found.key.hex() if found.parent is not None else "",
        "depth": found.depth,
        "tokens": len(found.tokens) // 4,
        "references": found.refs,
        "priority": found.priority,
        "hits": found.hits,
        "idle": _idle(pool, found, manager.queries.now),
        "leases": [_lease(manager, lease) for lease in leases_of(found)],
        **_domain(found.domain),
    }


def tree(manager: CacheManager, pool_id: str, key: str) -> Json:
    """What stands behind a node, or behind all roots for an empty key: those found most often first.

    A chain without branches is one row. Raises InvalidField.
    """
    pool = manager.queries.pool_to_read(pool_id)
    if key:
        try:
            node = pool.node(bytes.fromhex(key))
        except ValueError as error:
            raise InvalidField("key", "must be hexadecimal") from error
        # It may have gone since it was shown.
        nodes = [] if node is None else [node]
    else:
        nodes = list(islice(pool.bare.values(), _MAX_CHILDREN))
    children = list(islice((child for node in nodes for child in siblings.each(node)), _MAX_CHILDREN + 1))
    shown = nlargest(CHILDREN, children[:_MAX_CHILDREN], key=lambda child: (child.hits, child.refs, child.recency))
    return {"nodes": [_chain(child) for child in shown], "more": len(children) - len(shown)}


def _chain(first: Block) -> Json:
    last, count, tokens = first, 1, len(first.tokens) // 4
    while isinstance(last.children, Block) and count < _MAX_CHAIN:
        last = last.children
        count += 1
        tokens += len(last.tokens) // 4
    return {
        "key": first.key.hex(),
        "end": last.key.hex(),
        "place": first.slot,
        "depth": first.depth,
        "blocks": count,
        "tokens": tokens,
        "hits": first.hits,
        "end_hits": last.hits,
        "references": first.refs,
        "priority": first.priority,
        "branches": len(siblings.each(last)),
        **_domain(first.domain),
    }


def leases(manager: CacheManager, pool_id: str, after: int) -> Json:
    """Leases of the blocks behind a place, those together that nobody can tell apart: their blocks are counted."""
    pool, now = manager.queries.pool_to_read(pool_id), manager.queries.now
    end = min(len(pool.blocks), after + 1 + LEASE_PAGE)
    found: dict[tuple[object, ...], Json] = {}
    for one in islice(pool.blocks, after + 1, end):
        if one is None or one.lease is None:
            continue
        for lease in leases_of(one):
            left = lease.remaining(now)
            kind = lease.wish.holder, lease.wish.priority, None if left is None else round(left), lease.deadline is None
            row = found.get(kind)
            if row is None:
                row = found[kind] = {**_lease(manager, lease), "blocks": 0}
            row["blocks"] += 1
        if len(found) >= LEASES:
            end = one.slot + 1
            break
    return {"leases": list(found.values()), "next": end - 1 if end < len(pool.blocks) else None}


def holds(manager: CacheManager) -> Json:
    """Holds and pins."""
    return {
        "holds": [
            {
                "name": hold.name,
                "pin": hold.pin,
                "owner": hold.owner,
                "remaining": hold.remaining,
                "executor_id": hold.executor_id,
                "blocks": hold.num_blocks,
            }
            for hold in islice(manager.queries.holds(), LEASES)
        ]
    }


def tenants(manager: CacheManager, pool_id: str) -> Json:
    """Lookups by salt, and quotas."""
    meter = manager.queries.meter(pool_id)
    salts = [{"salt": salt, "queried": count.queried, "hit": count.hit} for salt, count in meter.salts.items()]
    quotas = [
        {
            "tenant": quota.tenant_id,
            "salt": quota.salt,
            "floor": quota.device_floor,
            "ceiling": quota.device_ceiling,
            "blocks": device,
        }
        for quota, pool, device, _ in manager.queries.quotas()
        if pool == pool_id
    ]
    return {"salts": salts, "quotas": quotas}


def events(manager: CacheManager, after: int) -> Json:
    """The newest events behind a number; `skipped` are older ones that are left out."""
    last = manager.queries.last_event
    begin = max(after, last - EVENTS)
    try:
        found = manager.queries.events_after(begin, EVENTS) if begin <= last else []
    except EventsGoneError:
        found = []
    return {"last": last, "skipped": max(0, begin - after), "events": [_event(event) for event in found]}


def _event(event: Event) -> Json:
    view = event.block
    return {
        "number": event.number,
        "kind": EventKind(event.kind).name.lower(),
        "pool_id": view.pool_id,
        "tier": view.tier.name.lower(),
        "slot": view.slot,
        "key": view.key.hex()[:12],
        "tokens": view.num_tokens,
        "priority": view.priority,
        "cause": "" if event.cause is RemovalCause.NONE else RemovalCause(event.cause).name.lower(),
        "holder": "" if event.lease is None else event.lease.holder,
    }


def ghosts(manager: CacheManager, executor_id: str) -> Json:
    """Ghost caches of the last hour."""
    found = manager.queries.ghosts(executor_id, manager.queries.now - 3600)
    if found is None:
        return {"caches": []}
    report, pool = found
    return {
        "caches": [
            {"policy": one.policy.name.lower(), "blocks": one.total_blocks, "hit_tokens": one.hit_tokens}
            for one in report.caches
        ],
        "queried_tokens": report.queried_tokens,
        "hit_tokens": report.hit_tokens,
        "device_blocks": pool.total_blocks,
        "sample_rate": report.sample_rate,
    }


def _domain(domain: Domain | None) -> Json:
    return {
        "tenant": None if domain is None else domain.tenant_id,
        "salt": None if domain is None else domain.salt,
        "adapter": None if domain is None else domain.adapter_id,
    }


def _idle(pool: Pool, one: Block, now: float) -> float:
    """Seconds since its last use; 0 while it is in use."""
    return 0.0 if one.refs or not one.recency else round(max(0.0, now - pool.use_times.at(one.recency)), 1)


def _lease(manager: CacheManager, lease: Lease) -> Json:
    wish = lease.wish
    return {
        "holder": wish.holder,
        "priority": shown_priority(wish),
        "remaining": lease.remaining(manager.queries.now),
        "running": lease.deadline is not None,
    }
