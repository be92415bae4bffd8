"""Why a prompt is found or not: block by block where it is, and at the first that is missing what became of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cachemgr.admin_api import Explanation, MissReason, Prefix
from cachemgr.chains import keys_of
from cachemgr.keys import pack, packed_bytes, prefix_keys
from cachemgr.leases import LeaseBook, leases_of

if TYPE_CHECKING:
    from cachemgr.keys import Domain
    from cachemgr.pool import Pool
    from cachemgr.registry import Executor

# Other salts and adapters that are looked at for a block that is missing under its own.
_MAX_DOMAINS = 1000


def explain(executor: Executor, pool: Pool, prefix: Prefix, cached_tokens: int, leases: LeaseBook) -> Explanation:
    """Looks a prompt's full blocks up in one pool, without touching them."""
    found = Explanation(executor.executor_id, cached_tokens)
    for place, key in enumerate(keys_of(executor, prefix)):
        block = pool.index.get(key)
        if block is None:
            _explain_miss(executor, pool, prefix, place, key, leases, found)
            return found
        age = 0.0 if block.refs else max(0.0, leases.now - pool.use_times.at(block.recency))
        found.blocks.append((pool.view(block), [leases.view(lease) for lease in leases_of(block)], age))
    return found


def _explain_miss(
    executor: Executor, pool: Pool, prefix: Prefix, place: int, key: bytes, leases: LeaseBook, found: Explanation
) -> None:
    if key in pool.pending:
        found.miss_reason = MissReason.BEING_COMPUTED
        return
    lost = pool.lost.get(key)
    if lost is not None:
        found.miss_reason, found.removal = MissReason.REMOVED, lost
        found.removal_age = max(0.0, leases.now - lost.time)
        return
    found.miss_reason = _elsewhere(executor, pool, prefix, place)


def _elsewhere(executor: Executor, pool: Pool, prefix: Prefix, place: int) -> MissReason:
    """Whether the same tokens are cached under another salt or for another adapter."""
    size = executor.block_size
    packed = packed_bytes(pack(prefix.token_ids[: (place + 1) * size]))
    roots: dict[bytes, Domain] = {domain.key: domain for domain in executor.domains()}
    reason = MissReason.NEVER_STORED
    for root, domain in list(roots.items())[:_MAX_DOMAINS]:
        if (domain.salt, domain.adapter_id) == (prefix.salt, prefix.adapter_id):
            continue
        if prefix_keys(root, packed, size, prefix.extra_keys)[-1] in pool.index:
            if domain.salt == prefix.salt:
                return MissReason.OTHER_ADAPTER
            reason = MissReason.OTHER_SALT
    return reason
