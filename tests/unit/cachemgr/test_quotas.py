"""Quotas of tenants and salts: floors, ceilings, and changes of them with blocks in use."""

import random

import pytest

from cachemgr.blocks.block import Account, Block
from cachemgr.blocks.eviction_order import position
from cachemgr.blocks.tier import Tier
from cachemgr.errors import QuotaTooLargeError, SequenceTooLongError, UnknownQuotaError
from cachemgr.operators.state_dump import state_hash
from cachemgr.slices import at_once
from cachemgr.types import ForgetTarget, Quota, TierKind
from tests.support.in_process_manager import World
from tests.support.random_operations import small_steps


def quota(world: World, **fields: object) -> None:
    at_once(world.operators.set_quota(Quota(**fields), validate_only=False))
    world.check()


def counts(world: World) -> dict[str, int]:
    """Device blocks by account."""
    return {one.tenant_id or one.salt: device for one, _, device, _ in world.queries.quotas()}


def cached(world: World) -> dict[str | None, int]:
    """Indexed device blocks by tenant."""
    found: dict[str | None, int] = {}
    for block in world.queries.records("e"):
        found[block.tenant_id] = found.get(block.tenant_id, 0) + 1
    return found


def test_no_account_evicts_another_below_its_floor():
    world = World(8)
    quota(world, tenant_id="t", device_floor=2)
    world.cache(list(range(16)), tenant_id="t")
    world.cache(list(range(100, 124)), tenant_id="u")
    world.check()
    assert cached(world) == {"t": 2, "u": 6}
    assert not world.admit(list(range(200, 228)), tenant_id="u").admitted
    assert world.admit(list(range(200, 224)), tenant_id="u").admitted
    world.check()
    assert cached(world) == {"t": 2}


def test_an_account_at_its_ceiling_evicts_its_own_blocks_first():
    world = World(8)
    world.cache([50, 51, 52, 53])
    quota(world, tenant_id="t", device_ceiling=2)
    world.cache(list(range(8)), tenant_id="t")
    world.cache(list(range(100, 108)), tenant_id="t")
    world.check()
    assert cached(world) == {None: 1, "t": 2}
    assert counts(world) == {"t": 2}


def test_a_ceiling_limits_admissions_and_not_running_sequences():
    world = World(8)
    quota(world, tenant_id="t", device_ceiling=2)
    assert world.admit(list(range(100, 108)), "b", tenant_id="t").admitted
    refused = world.admit(list(range(8)), "a", tenant_id="t")
    assert (refused.admitted, refused.missing_blocks, refused.full_account) == (False, 2, ("tenant_id", "t"))
    world.check()
    world.finish("b")
    admission = world.run(list(range(8)), "a", generate=8, tenant_id="t")
    assert admission.admitted
    world.check()
    assert counts(world)["t"] >= 4
    assert not world.admit([1], tenant_id="t").admitted
    world.release("a")
    world.check()
    assert world.admit([1], tenant_id="t").admitted


def test_a_ceiling_is_named_only_where_nothing_else_is_missing():
    world = World(8)
    quota(world, tenant_id="t", device_ceiling=4)
    assert world.admit(list(range(100, 112)), "a", tenant_id="t").admitted
    assert world.admit(list(range(200, 216)), "b").admitted
    refused = world.admit(list(range(8)), tenant_id="t")
    assert (refused.admitted, refused.full_account) == (False, None)
    assert world.admit(list(range(8))).full_account is None
    world.finish("b")
    refused = world.admit(list(range(8)), tenant_id="t")
    assert (refused.admitted, refused.missing_blocks, refused.full_account) == (False, 1, ("tenant_id", "t"))
    world.check()
    world.run(list(range(200, 209)), "c", salt="s")
    quota(world, salt="s", device_ceiling=3)
    fork = world.manager.fork(world.caller, "c", "d")
    assert (fork.admitted, fork.missing_blocks, fork.full_account) == (False, 1, ("salt", "s"))


def test_the_quota_of_a_tenant_precedes_that_of_the_salt():
    world = World(8)
    quota(world, salt="a", device_ceiling=1)
    quota(world, tenant_id="t", device_ceiling=3)
    world.cache(list(range(12)), salt="a", tenant_id="t")
    world.check()
    assert counts(world) == {"a": 0, "t": 3}
    world.cache(list(range(100, 103)), salt="a")
    assert counts(world) == {"a": 1, "t": 3}


def test_a_prompt_beyond_its_ceiling_is_refused():
    world = World(8)
    quota(world, tenant_id="t", device_ceiling=2)
    before = state_hash(world.queries.state())
    for ask in (world.admit, lambda tokens, **options: world.queries.preview(world.request(tokens, **options), 0)):
        with pytest.raises(SequenceTooLongError, match=r"3 blocks, more than the 2 of its quota") as refused:
            ask(list(range(9)), tenant_id="t")
        assert list(refused.value.fields) == ["token_ids"]
    assert state_hash(world.queries.state()) == before
    quota(world, tenant_id="t", device_ceiling=0)
    with pytest.raises(SequenceTooLongError):
        world.admit([1], tenant_id="t")
    # What others need of it is theirs.
    world.cache(list(range(8)))
    quota(world, tenant_id="t", device_ceiling=1)
    assert world.admit(list(range(9)), tenant_id="t").admitted


def test_matched_blocks_of_others_count_against_neither_ceiling_nor_floor():
    world = World(8)
    world.cache(list(range(16)), tenant_id="t")
    quota(world, tenant_id="t", device_floor=4)
    quota(world, tenant_id="u", device_ceiling=2)
    admission = world.admit(list(range(20)), tenant_id="u")
    assert (admission.admitted, admission.cached_tokens) == (True, 16)
    world.check()
    assert counts(world)["t"] == 4


def test_a_floor_protects_no_free_slots_beside_blocks_in_use():
    world = World(8)
    quota(world, tenant_id="t", device_floor=2)
    world.run(list(range(5)), "a", tenant_id="t")
    assert world.admit(list(range(100, 124)), tenant_id="u").admitted


def test_a_restored_block_counts_against_the_quota_it_had():
    world = World(4, host_blocks=4)
    quota(world, tenant_id="t", device_ceiling=4)
    quota(world, tenant_id="u", device_ceiling=4)
    world.cache(list(range(12)), tenant_id="t")
    world.cache(list(range(100, 116)), tenant_id="u")
    world.check()
    world.cache(list(range(13)), tenant_id="u")
    world.check()
    assert counts(world)["t"] == 3


def test_a_floor_of_the_host_is_kept_for_its_owner():
    world = World(4, host_blocks=4)
    quota(world, tenant_id="t", host_floor=2)
    world.cache(list(range(16)), tenant_id="t")
    for first in (100, 200, 300):
        world.cache(list(range(first, first + 16)))
        world.check()
    ((_, _, _, host),) = world.queries.quotas()
    assert host == 2


def test_floors_that_do_not_fit_together_are_refused_and_nothing_changes():
    world = World(8, host_blocks=2)
    quota(world, tenant_id="t", device_floor=5)
    before = list(world.queries.quotas())
    with pytest.raises(QuotaTooLargeError) as refused:
        quota(world, salt="a", device_floor=4)
    assert list(refused.value.fields) == ["quota.device_floor_blocks"]
    assert "at most 3" in str(refused.value.fields)
    with pytest.raises(QuotaTooLargeError):
        quota(world, salt="a", host_floor=3)
    assert list(world.queries.quotas()) == before
    quota(world, salt="a", device_floor=3)
    quota(world, tenant_id="t", device_floor=4)


def test_quotas_change_and_go_while_blocks_are_cached_and_used():
    world = World(12)
    world.cache(list(range(8)), tenant_id="t")
    world.run(list(range(100, 108)), "a", tenant_id="t")
    world.cache(list(range(200, 208)), tenant_id="u")
    quota(world, tenant_id="t", device_floor=2, device_ceiling=6)
    assert counts(world)["t"] == world.queries.pools()[0].used_blocks + 2
    quota(world, tenant_id="t", device_ceiling=2)
    quota(world, tenant_id="u", device_floor=1)
    at_once(world.operators.delete_quota(Quota(tenant_id="t")))
    world.check()
    assert list(counts(world)) == ["u"]
    world.finish("a")
    world.check()
    with pytest.raises(UnknownQuotaError) as refused:
        at_once(world.operators.delete_quota(Quota(tenant_id="t")))
    assert list(refused.value.fields) == ["tenant_id"]
    assert list(counts(world)) == ["u"]
    at_once(world.operators.delete_quota(Quota(tenant_id="u")))
    world.check()
    assert world.admit([9] * 48).admitted


def test_a_truncated_block_counts_against_the_quota_of_the_sequence():
    world = World(8)
    quota(world, tenant_id="t", device_ceiling=4)
    world.cache(list(range(8)), tenant_id="t")
    # What it computes replaces the tenant's blocks, and is theirs.
    world.run(list(range(8)), "live", no_read=True)
    assert counts(world) == {"t": 2}
    world.truncate("live", 6)
    world.check()
    assert counts(world) == {"t": 1}
    world.compute(world.live["live"], 9)
    world.sync()
    world.check()
    assert counts(world) == {"t": 1}


def test_a_quota_finds_the_blocks_of_its_salt_in_all_sessions_and_adapters():
    world = World(16)
    world.cache(list(range(9)), salt="a", session_id="x")
    world.cache(list(range(20, 29)), salt="a", adapter_id=1, tenant_id="t")
    world.cache(list(range(40, 49)), salt="b")
    world.run(list(range(60, 69)), salt="a")
    quota(world, salt="a", device_floor=1)
    assert counts(world)["a"] == 9
    quota(world, tenant_id="t", device_floor=1)
    assert counts(world) == {"a": 6, "t": 3}
    at_once(world.operators.delete_quota(Quota(tenant_id="t")))
    world.check()
    assert counts(world) == {"a": 9}


def protected_blocks(accounts: int) -> tuple[Tier, list[tuple[Account, Block]]]:
    """A tier in which every account has its floor of two blocks, all of which may be lost."""
    tier, blocks, choose = Tier(TierKind.DEVICE, 0, 2 * accounts), [], random.Random(accounts)
    for number in range(2 * accounts):
        account = blocks[number - accounts][0] if number >= accounts else None
        block = Block(number + 1)
        block.recency, block.priority = number + 1, choose.choice((20, 35, 60))
        blocks.append((account or Account(Quota(tenant_id=f"t{number}", device_floor=2)), block))
        tier.accounts.count(blocks[-1][0], blocks=1)
        tier.accounts.enlist(block, blocks[-1][0], newest=True)
    return tier, blocks


def test_blocks_below_floors_are_evicted_in_eviction_order():
    tier, blocks = protected_blocks(300)
    lost = []
    while (block := tier.accounts.victim(None)) is not None:
        account = next(account for account, one in blocks if one is block)
        tier.accounts.delist(block, account)
        tier.accounts.count(account, blocks=-1)
        lost.append(block)
    assert lost == sorted((block for _, block in blocks), key=position)


def test_a_block_counts_against_the_quota_of_the_sequence_that_commits_it():
    world = World(8)
    quota(world, tenant_id="t", device_ceiling=4)
    world.admit(list(range(8)), "first", tenant_id="t", session_id="x")
    assert world.admit([*range(8), 50], "second", session_id="y").wait_for_handle
    # The first stores nothing any more; what the second shares with it is the second's to store.
    at_once(world.operators.forget(ForgetTarget(session_id="x"), validate_only=False))
    world.step(20)
    world.sync()
    world.check()
    assert cached(world) == {None: 2}
    world.finish("first")
    world.check()
    assert counts(world) == {"t": 0}


def test_blocks_come_to_count_against_quotas_that_are_stored_a_part_at_a_time():
    world = World(12)
    world.cache([1] * 9, salt="a")
    world.cache([2] * 9, salt="b")
    with small_steps():
        world.operators.restore([], [Quota(salt="a", device_floor=1), Quota(salt="b", device_floor=2)], [])
        assert counts(world) == {"a": 0, "b": 0}
        assert world.manager.is_behind
        world.check()
        # What comes from now on counts at once.
        world.cache([3] * 4, salt="a")
        assert counts(world)["a"] == 1
        while world.manager.is_behind:
            world.manager.expire()
            world.check()
    assert counts(world) == {"a": 4, "b": 3}
