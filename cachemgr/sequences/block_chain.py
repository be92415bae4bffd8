"""From a prompt to the blocks of a pool that hold it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cachemgr.blocks.block_keys import prefix_keys, root_key
from cachemgr.blocks.radix_tree import children_of
from cachemgr.tokens import pack, packed_bytes
from cachemgr.types import Prefix

if TYPE_CHECKING:
    from cachemgr.blocks.block import Block
    from cachemgr.blocks.block_pool import BlockPool
    from cachemgr.sequences.clients import Executor


def keys_of(executor: Executor, prefix: Prefix) -> list[bytes]:
    """Keys of a prompt's full blocks."""
    root = root_key(executor.spec.model_fingerprint, prefix.salt, prefix.adapter_id)
    return prefix_keys(root, packed_bytes(pack(prefix.token_ids)), executor.block_size, prefix.extra_keys)


def chain(pool: BlockPool, keys: list[bytes]) -> list[Block]:
    """Full blocks of these keys that can be matched: with full attention up to the first that is not cached."""
    found = []
    for key in keys:
        block = pool.tree.by_key.get(key)
        if block is not None:
            found.append(block)
        elif pool.window is None:
            break
    return found


def all_of(executor: Executor, pool: BlockPool, prefix: Prefix) -> list[Block]:
    """A prompt's full blocks that are cached, also those that have lost what they stand on."""
    found = (pool.tree.by_key.get(key) for key in keys_of(executor, prefix))
    return [block for block in found if block is not None]


def last_parts(executor: Executor, pool: BlockPool, prefix: Prefix) -> list[Block]:
    """Blocks behind a prompt's full ones that hold its last tokens, or the first of them, or these and more."""
    keys = keys_of(executor, prefix)
    rest = packed_bytes(pack(prefix.token_ids[len(keys) * executor.block_size :]))
    root = root_key(executor.spec.model_fingerprint, prefix.salt, prefix.adapter_id)
    node = pool.tree.node(keys[-1] if keys else root)
    if node is None or not rest:
        return []
    return [block for block in children_of(node) if block.tokens.startswith(rest) or rest.startswith(block.tokens)]
