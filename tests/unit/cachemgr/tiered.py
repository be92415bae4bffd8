"""Worlds with lower tiers, and what is looked at in them."""

from cachemgr.types import Prefix
from tests.unit.cachemgr.world import BLOCK, World

PROMPT = list(range(12))


def backed_up(num_blocks: int = 4, host_blocks: int = 4, **options: object) -> World:
    """PROMPT is cached on the device, with a copy of each of its three blocks below."""
    world = World(num_blocks, host_blocks=host_blocks, **options)
    world.cache(PROMPT)
    world.back_up()
    world.check()
    assert backups(world) == 3
    return world


def backups(world: World) -> int:
    return sum(block.backup is not None for block in world.manager.queries.records("e"))


def host(world: World):
    return world.manager.queries.pools()[0].lower_tiers[0]


def fill(world: World, first: int = 100, **options: object):
    """A sequence that takes the whole device."""
    return world.run(list(range(first, first + world.num_blocks * BLOCK)), f"fill{first}", **options)


def tiers(world: World) -> dict[str, int]:
    """Indexed blocks by tier."""
    found: dict[str, int] = {}
    for _, view in world.manager.queries.blocks("e/0"):
        if view.key:
            found[view.tier.name.lower()] = found.get(view.tier.name.lower(), 0) + 1
    return found


def cached(world: World, tokens: list[int], **options: object) -> int:
    """What a prompt would find, all tiers together."""
    return world.manager.queries.explain(Prefix(tuple(tokens), **options), 0)[0].cached_tokens
