"""What should be found, told from all indexed blocks without the index."""

from cachemgr.blocks.block_record import BlockRecord
from tests.unit.cachemgr.world import World

NO_TOKEN = -1


def cached_blocks(world: World) -> int:
    """Cached blocks of all pools and tiers."""
    pools = world.manager.queries.pools()
    return sum(pool.cached_blocks + sum(tier.cached_blocks for tier in pool.lower_tiers) for pool in pools)


def naive_match(world: World, tokens: list[int], salt: str | None, adapter_id: int | None) -> int:
    """The longest beginning of the tokens, all but the last, that the indexed blocks of group 0 hold."""
    blocks = [one for one in world.manager.queries.records("e") if one.group == 0]
    known = {one.key: one for one in blocks if (one.salt, one.adapter_id) == (salt, adapter_id)}
    best = 0
    for block in known.values():
        best = max(best, common(path(block, known), tokens[:-1]))
    return best


def path(block: BlockRecord, known: dict[bytes, BlockRecord]) -> list[int]:
    if block.parent_key is None:
        return list(block.token_ids)
    # What a block in a lower tier stands on may be lost: then nothing begins as it does.
    before = path(known[block.parent_key], known) if block.parent_key in known else [NO_TOKEN]
    return [*before, *block.token_ids]


def common(one: list[int], other: list[int]) -> int:
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    return count
