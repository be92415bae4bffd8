"""Lower tiers outlive the manager and the executor: a block is restored by the ticket that filled its slot."""

import dataclasses

import pytest

from cachemgr.manager import CacheManager
from cachemgr.operators.operator_journal import Kind
from cachemgr.slices import at_once
from cachemgr.types import EventKind, ForgetTarget, Prefix, Quota, RemovalCause, TierKind
from tests.support.in_process_manager import CONFIG, World, retain

PROMPT = list(range(13))


def offloaded(**options: object) -> World:
    """Three host blocks of PROMPT, below a device that is full of other blocks."""
    world = World(4, host_blocks=4, **options)
    world.cache(PROMPT)
    world.cache(list(range(100, 112)))
    world.cache(list(range(200, 204)))
    assert world.tiers() == {"device": 4, "host": 4}
    return world


def test_a_slot_of_another_generation_or_a_broken_copy_is_not_restored():
    world = offloaded()
    keys = {block.key for block in world.journal.blocks.values() if block.tier is TierKind.HOST}
    world.device.generations[0, TierKind.HOST, 1] += 1
    world.device.generations[0, TierKind.HOST, 2] = 0
    assert world.restart_manager() == (4, 2)
    world.check()
    left = {block.key for block in world.journal.blocks.values() if block.tier is TierKind.HOST}
    assert len(left) == 2
    assert left < keys


def test_a_manager_with_a_clock_that_went_back_reuses_no_generation():
    """Its numbers begin where the numbers of the earlier process began."""
    world = offloaded()
    world.manager = CacheManager(world.manager.epoch, lambda: world.now, CONFIG, world.journal)
    world.done.clear()
    world.start_scheduler()
    world.manager.register_executor(world.spec(), list(world.journal.blocks.values()))
    newest = max(record.generation for record in world.queries.records("e"))
    assert newest
    assert world.admit([1, 2, 3], "after").sequence_handle > newest


@pytest.mark.parametrize("lost", ["manager", "executor"])
def test_an_open_copy_to_a_lower_tier_counts_if_it_was_completed(lost):
    world = World(4, host_blocks=4)
    world.cache(PROMPT)
    world.admit(list(range(100, 116)), "b")
    first, second, *_ = world.live["b"].copies
    world.copy(first)
    world.copy(second, failed=True)
    restored = world.restart_manager() if lost == "manager" else world.start_executor()
    assert restored.lower_blocks == 1


def beheaded() -> World:
    """Two host blocks of PROMPT whose first block was lost with the device."""
    world = World(4, host_blocks=4)
    world.cache(PROMPT[:12])
    # The first block is in use: only its descendants are offloaded.
    world.run([*PROMPT[:4], 99], "first")
    world.cache(list(range(100, 108)))
    assert world.tiers() == {"device": 3, "host": 2}
    world.lose_manager()
    assert world.register_again() == (0, 2)
    world.check()
    return world


def test_blocks_without_their_parent_match_once_it_is_computed_again():
    world = beheaded()
    assert world.found(PROMPT) == 0
    assert world.run(PROMPT[:4], "once more").cached_tokens == 0
    world.check()
    assert world.found(PROMPT) == 12
    world.finish("once more")
    assert world.run(PROMPT[:12], "whole").cached_tokens == 11


def test_blocks_without_their_parent_are_forgotten_with_the_prefix():
    world = beheaded()
    receipt = at_once(world.operators.forget(ForgetTarget(prefix=Prefix(tuple(PROMPT[:4]))), validate_only=False))
    assert receipt.removed == {TierKind.HOST: 2}
    world.check()
    world.run_executor_copies()
    assert not world.device.count(None, 0)


@pytest.mark.parametrize("manager_too", [True, False])
def test_the_order_of_use_in_lower_tiers_outlives_the_executor(manager_too):
    world = World(4, host_blocks=4)
    for first in (0, 10, 20, 30, 40, 50, 60, 70):
        world.cache(list(range(first, first + 4)))
    if manager_too:
        world.lose_manager()
        world.register_again()
    else:
        world.start_executor()
    for first in (100, 110, 120, 130, 140, 150):
        world.cache(list(range(first, first + 4)))
        world.check()
    assert {first for first in world.first_tokens() if first < 100} == {20, 30}


# The executor starts again, and the manager has seen it before


def test_lower_blocks_stay_when_the_executor_starts_again():
    world = offloaded()
    before = world.queries.last_event
    keys = {block.key for block in world.queries.records("e") if block.tier is TierKind.HOST}
    assert world.start_executor() == (0, 4)
    world.check()
    assert {block.key for block in world.queries.records("e")} == keys
    registered, *events = world.queries.events_after(before)
    assert (registered.kind, registered.executor.executor_epoch) == (EventKind.EXECUTOR_REGISTERED, 2)
    assert {(event.kind, event.cause) for event in events} == {(EventKind.REMOVED, RemovalCause.EXECUTOR_LOST)}
    assert len(events) == 4
    world.sync()
    assert world.run(PROMPT, "again").cached_tokens == 12


def test_another_model_restores_nothing():
    world = offloaded()
    spec = dataclasses.replace(world.spec(), executor_epoch=2, model_fingerprint=b"g" * 32)
    assert world.manager.register_executor(spec) == (0, 0)
    assert world.queries.check_pool() == []


def test_sizes_may_change_when_the_executor_starts_again():
    world = offloaded(disk_blocks=2)
    world.num_blocks, world.host_blocks = 9, 3
    for slot in (4,):
        del world.device.generations[0, TierKind.HOST, slot]
    assert world.start_executor().lower_blocks == 3
    world.check()
    assert world.free == 9
    world.host_blocks = 6
    assert world.start_executor().lower_blocks == 3
    world.check()
    (host, _) = world.queries.pools()[0].lower_tiers
    assert (host.total_blocks, host.free_blocks, host.cached_blocks) == (6, 6, 3)


def test_leases_holds_and_quotas_of_lower_tiers_outlive_the_executor():
    world = World(4, host_blocks=4, config=dataclasses.replace(CONFIG, pin_budget=1.0))
    at_once(world.operators.set_quota(Quota(salt="a", host_ceiling=2), validate_only=False))
    world.cache(PROMPT[:8], salt="a", retention=retain(90, 50.0))
    world.cache(list(range(100, 116)))
    prefix = Prefix(tuple(PROMPT[:8]), salt="a")
    (pinned,) = world.operators.pin_prefix(prefix, "ops", 60.0, validate_only=False)
    assert pinned.receipt.num_blocks == 2
    world.now = 5.0
    world.sync()
    world.renew()
    assert world.start_executor().lower_blocks == 2
    world.check()
    (hold,) = world.queries.holds()
    assert (hold.num_blocks, world.queries.pools()[0].lower_tiers[0].used_blocks) == (2, 2)
    assert [lease.remaining for _, _, lease in filter(None, world.queries.leases("e/0", ""))] == [45.0, 45.0]
    assert [(quota.salt, host) for quota, _, _, host in world.queries.quotas()] == [("a", 2)]
    world.operators.release_hold(hold.name)


def test_open_overwrites_of_lower_tiers_outlive_the_executor():
    world = offloaded()
    at_once(world.operators.forget(ForgetTarget(prefix=Prefix(tuple(PROMPT[:8]))), validate_only=False))
    zeroing = {(copy.target_tier, copy.target_slot) for copy in world.queries.executor_transfers("e")}
    assert {tier for tier, _ in zeroing} == {TierKind.HOST}
    world.start_executor()
    world.check()
    again = {(copy.target_tier, copy.target_slot) for copy in world.queries.executor_transfers("e")}
    assert again == zeroing
    world.run_executor_copies()
    world.check()
    assert not world.device.count(None, 0)


def test_no_sequence_is_admitted_before_those_of_the_older_epoch_are_released():
    world = offloaded()
    world.run([1], "old")
    assert world.start_executor().lower_blocks == 4
    request = world.request(PROMPT)
    preview, admission = world.queries.preview(request, 1), world.manager.admit(request)
    assert (preview.admitted, preview.missing_blocks) == (admission.admitted, admission.missing_blocks) == (False, 1)
    world.check()
    world.sync()
    assert world.run(PROMPT, "new").cached_tokens == 12


def pinned() -> World:
    """A pin of three blocks: the first on the device, the other two in the host tier."""
    world = World(4, host_blocks=4, config=dataclasses.replace(CONFIG, pin_budget=1.0))
    world.cache(PROMPT[:12])
    world.run([*PROMPT[:4], 99], "first")
    world.cache(list(range(100, 108)))
    (made,) = world.operators.pin_prefix(Prefix(tuple(PROMPT[:12])), "ops", 60.0, validate_only=False)
    assert (made.receipt.num_blocks, world.tiers()) == (3, {"device": 3, "host": 2})
    return world


@pytest.mark.parametrize("way", ["executor", "both"])
def test_no_block_without_its_parent_is_pinned(way):
    world = pinned()
    if way == "executor":
        assert world.start_executor() == (0, 2)
        world.sync()
    else:
        (pin,) = world.queries.entries(Kind.PIN, "e")
        world.lose_manager()
        world.executor_epoch += 1
        world.device.lose()
        below = [block for block in world.journal.blocks.values() if block.tier is TierKind.HOST]
        world.journal.blocks = {block.tier_slot: block for block in below}
        assert world.manager.register_executor(world.spec(), below, [pin]) == (0, 2)
    world.check()
    assert list(world.queries.holds()) == []
    # Once its beginning is there again, all of it is used and let go.
    world.run([*PROMPT[:4], 99], "again")
    world.run(PROMPT[:12], "whole")
    for name in ("again", "whole"):
        world.finish(name)
        world.confirm()
        world.check()
    world.run(list(range(200, 216)), "others")
