"""Worlds with lower tiers."""

from tests.support.in_process_manager import World

PROMPT = list(range(12))


def backed_up(num_blocks: int = 4, host_blocks: int = 4, **options: object) -> World:
    """PROMPT is cached on the device, with a copy of each of its three blocks below."""
    world = World(num_blocks, host_blocks=host_blocks, **options)
    world.cache(PROMPT)
    world.back_up()
    world.check()
    assert world.backups == 3
    return world
