"""Copies of device blocks one tier below: they cost nobody any room, and go with their blocks."""

from cachemgr.types import ForgetTarget, Prefix, TierKind
from tests.support.in_process_manager import World
from tests.support.scrape import scraped
from tests.unit.cachemgr.tiered import PROMPT, backed_up

# How they go


def test_backups_give_their_slots_to_whoever_wants_them_tails_first():
    world = backed_up(num_blocks=7, host_blocks=3)
    world.cache(list(range(50, 62)))
    # Of all that is cached this was used last.
    world.run([*PROMPT, 70], "again")
    world.finish("again")
    (copy,) = world.run([100], "more").transfers
    assert copy.target_tier is TierKind.HOST
    world.check()
    with_backup = [block.token_ids[0] for block in world.queries.records("e") if block.backup is not None]
    assert with_backup == [0, 4]


def test_a_backup_of_what_is_forgotten_is_overwritten():
    world = backed_up()
    world.operators.forget(ForgetTarget(prefix=Prefix(tuple(PROMPT))), validate_only=False)
    world.check()
    targets = {(copy.target_tier, copy.target_slot) for copy in world.queries.executor_transfers("e")}
    assert len(targets) == 6
    assert all(not copy.source_slot for copy in world.queries.executor_transfers("e"))
    world.run_executor_copies()
    world.check()
    assert not world.device.count(None, 0)
    assert world.host.free_blocks == 4


def test_a_backup_that_is_being_made_of_what_is_forgotten_is_overwritten_behind_the_copy():
    world = World(4, host_blocks=4)
    world.cache(PROMPT)
    world.renew()
    world.run_executor_copies(3)
    world.operators.forget(ForgetTarget(prefix=Prefix(tuple(PROMPT))), validate_only=False)
    world.check()
    world.run_executor_copies()
    world.check()
    world.run_executor_copies()
    world.check()
    assert not world.device.count(None, 0)
    assert world.host.free_blocks == 4


def test_a_source_that_is_forgotten_while_it_is_copied_from_is_overwritten():
    world = World(12, host_blocks=12)
    world.cache(PROMPT)
    world.fill()
    world.finish("fill100")
    for name in ("a", "b"):
        world.admit([*PROMPT, 70], name)
    world.step(20)
    world.confirm(3)
    world.sync()
    world.operators.forget(ForgetTarget(prefix=Prefix(tuple(PROMPT))), validate_only=False)
    world.check()
    world.confirm()
    for name in ("a", "b"):
        world.leave(world.live[name])
    world.sync()
    world.run_executor_copies()
    world.check()
    assert not world.device.count(None, 0)


def test_an_evicted_block_does_not_wait_for_its_backup_and_that_is_believed_by_nobody():
    world = World(4, host_blocks=4)
    world.cache(PROMPT)
    world.renew()
    admission = world.admit(list(range(100, 116)), "b")
    assert admission.admitted
    world.check()
    world.step(20)
    # Only now the copies run: they read what has come since.
    world.run_executor_copies()
    world.check()
    world.sync()
    world.check()
    world.finish("b")
    world.check()
    assert world.run(PROMPT, "again").cached_tokens in (0, 4)
    world.check()


# How they are seen


def test_metrics_tell_of_tiers_and_of_those_of_pools_that_are_gone_nothing():
    world = backed_up()
    host_tier, manager = {"pool": "e/0", "tier": "host"}, world.manager
    assert scraped(manager, "tier_backed_up_blocks_total", **host_tier) == 3
    assert scraped(manager, "pool_backup_blocks", pool="e/0") == 3
    assert scraped(manager, "tier_blocks", **host_tier) == 4
    world.start_executor()
    assert scraped(manager, "tier_restored_blocks_total", **host_tier) == 3
    assert scraped(manager, "pool_backup_blocks", pool="e/0") == 0
    assert scraped(manager, "tier_cached_blocks", **host_tier) == 3
    world.now += 1000
    manager.expire()
    assert scraped(manager, "pool_backup_blocks", pool="e/0") is None
    assert scraped(manager, "tier_restored_blocks_total", **host_tier) is None
