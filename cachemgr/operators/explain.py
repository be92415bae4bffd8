"""Explains how far a prompt is cached: where each block is, and why the first missing block is missing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cachemgr.blocks.extra_keys import extra_bytes, prefix_keys
from cachemgr.blocks.prefix_tree import covering_child
from cachemgr.retention.leases import LeaseBook, leases_of
from cachemgr.sequences.prefix_match import keys_of
from cachemgr.types import Explanation, MissReason, Prefix
from protos.kvcommon.tokens import TOKEN_BYTES, pack, packed_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cachemgr.blocks.block_pool import BlockPool
    from cachemgr.sequences.clients import Executor
    from cachemgr.types import ExtraKey

# The limit on roots of different weights, salts and adapters that are searched for a missing block.
_MAX_ROOTS = 1000
# The limit on blocks hashed for this search in groups with a window, whose blocks may outlive their ancestors.
_MAX_HASHED = 4096


def explain(executor: Executor, pool: BlockPool, prefix: Prefix, cached_tokens: int, leases: LeaseBook) -> Explanation:
    """Looks the full blocks of a prompt up in one pool, without touching them."""
    found = Explanation(executor.executor_id, cached_tokens)
    for block_index, key in enumerate(keys_of(executor.spec, prefix)):
        block = pool.tree.by_key.get(key)
        if block is None:
            _explain_miss(executor, pool, prefix, block_index, key, leases, found)
            return found
        age = 0.0 if block.refs else pool.idle_seconds(block)
        found.blocks.append((pool.view(block), [leases.view(lease) for lease in leases_of(block)], age))
    return found


def _explain_miss(
    executor: Executor,
    pool: BlockPool,
    prefix: Prefix,
    block_index: int,
    key: bytes,
    leases: LeaseBook,
    found: Explanation,
) -> None:
    if key in pool.pending:
        found.miss_reason = MissReason.BEING_COMPUTED
        return
    lost = pool.removals.get(key)
    if lost is not None:
        found.miss_reason, found.removal = MissReason.REMOVED, lost
        found.removal_age = max(0.0, leases.now - lost.time)
        return
    found.miss_reason = _elsewhere(executor, pool, prefix, block_index)


def _elsewhere(executor: Executor, pool: BlockPool, prefix: Prefix, block_index: int) -> MissReason:
    """Returns whether the same tokens are cached for different weights, under a different salt, or for another adapter.

    With full attention, each tree is descended by tokens, without hashing, since most trees differ in the first block.
    """
    size = executor.block_size
    packed = packed_bytes(pack(prefix.token_ids[: (block_index + 1) * size]))
    most = _MAX_ROOTS if pool.window is None else _MAX_HASHED // (block_index + 1) + 1
    roots: set[bytes] = set()
    reason = MissReason.NEVER_STORED
    for scope in executor.scopes:
        is_own = (scope.salt, scope.adapter_id) == (prefix.salt, prefix.adapter_id)
        if (is_own and scope.weight_version == executor.spec.weight_version) or scope.key in roots:
            continue
        if len(roots) >= most:
            break
        roots.add(scope.key)
        if _is_cached(pool, scope.key, packed, size, prefix.extra_keys):
            if is_own:
                return MissReason.OTHER_WEIGHTS
            # Reports the closest match.
            reason = max(reason, MissReason.OTHER_ADAPTER if scope.salt == prefix.salt else MissReason.OTHER_SALT)
    return reason


def _is_cached(pool: BlockPool, root: bytes, packed: bytes, size: int, extra_keys: Sequence[ExtraKey]) -> bool:
    """Whether the last full block of these tokens is cached under a root."""
    if pool.window is not None:
        # Earlier blocks may have been evicted.
        return prefix_keys(root, packed, size, extra_keys)[-1] in pool.tree.by_key
    node = pool.tree.node(root)
    for start in range(0, len(packed) // TOKEN_BYTES, size):
        if node is None:
            return False
        tokens = packed[start * TOKEN_BYTES : (start + size) * TOKEN_BYTES]
        node = covering_child(node, tokens, extra_bytes(extra_keys, start, start + size))
    return node is not None
