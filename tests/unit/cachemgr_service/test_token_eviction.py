"""Sequences that evict tokens, over the wire, in the operation log, and in the metrics."""

import io
import itertools

import pytest

from cachemgr.manager import CacheManager
from cachemgr.operators.state_dump import state_hash
from cachemgr.oplog import replay
from cachemgr.rpc.mutations import ManagerClock
from cachemgr.types import ManagerConfig
from protos.kvcache.v1 import kvcache_pb2 as pb
from protos.kvcommon.v1 import kvcommon_pb2 as common
from tests.support.cachemgr_client import BLOCK_SIZE, EXECUTOR, SCHEDULER, Client
from tests.support.direct_calls import DirectCalls
from tests.support.patience import patience

WINDOW = common.EvictionPolicy(kind="EVICTION_KIND_SLIDING_WINDOW", start_tokens=1, recent_tokens=5)
COMPACTED = common.EvictionPolicy(
    kind="EVICTION_KIND_KEYDIFF", max_cache_tokens=8, start_tokens=1, recent_tokens=2, period_tokens=2, positions=2
)


async def test_an_eviction_from_its_policy_to_the_table_that_it_moves_to(client: Client) -> None:
    await client.register()
    admitted = await client.admit("a", 10, eviction_policy=WINDOW)
    whole = common.EvictionPolicy(
        kind="EVICTION_KIND_SLIDING_WINDOW",
        start_tokens=1,
        recent_tokens=5,
        max_cache_tokens=6,
        period_tokens=1,
        positions="EVICTION_POSITIONS_ABSOLUTE",
    )
    assert admitted.eviction_policy == whole
    handle = admitted.sequence_handle
    progress = {"handles": [handle], "computed_tokens": [10], "new_token_counts": [1], "new_token_ids": [7]}
    told = await client.sync(1, **progress, evicting_handles=[handle])
    assert (list(told.evicting_handles), list(told.evicting_counts)) == ([handle], [2])
    assert not set(told.evicting_slots) & set(admitted.block_tables[0].slots)
    progress |= {"computed_tokens": [11]}
    await client.sync(2, **progress, evicted_handles=[handle], computed_tokens_before_eviction=[10])
    (sequence,) = (await client.admin.ListSequences(pb.ListSequencesRequest(), timeout=patience(5))).sequences
    assert (sequence.eviction_policy, sequence.evicting) == (whole, True)
    assert (sequence.num_tokens, sequence.computed_tokens, sequence.capacity_tokens) == (12, 11, 2 * BLOCK_SIZE)
    plain = await client.admit("b", 11)
    assert not plain.HasField("eviction_policy")
    assert plain.cached_tokens == 10


async def test_a_rules_policy_is_kept_shown_and_changed_as_it_was_said(client: Client) -> None:
    await client.register()
    rule = pb.RetentionRule(name="r", action=pb.RuleAction(eviction_policy=WINDOW))
    await client.admin.CreateRetentionRule(pb.CreateRetentionRuleRequest(rule=rule), timeout=patience(5))
    found = await client.admin.GetRetentionRule(pb.GetRetentionRuleRequest(name="r"), timeout=patience(5))
    assert found.rule.action == rule.action
    (listed,) = (await client.admin.ListRetentionRules(pb.ListRetentionRulesRequest(), timeout=patience(5))).rules
    assert listed == found.rule
    assert (await client.admit("a", 10)).eviction_policy.max_cache_tokens == 6
    rule.action.eviction_policy.recent_tokens = 7
    request = pb.UpdateRetentionRuleRequest(rule=rule)
    request.update_mask.paths.append("action.eviction_policy")
    assert (await client.admin.UpdateRetentionRule(request, timeout=patience(5))).rule.action == rule.action
    assert (await client.admit("b", 10)).eviction_policy.max_cache_tokens == 8
    assert (await client.admit("a", 10)).eviction_policy.max_cache_tokens == 6
    none = common.EvictionPolicy(kind="EVICTION_KIND_NONE")
    assert not (await client.admit("c", 10, eviction_policy=none)).HasField("eviction_policy")
    await client.admin.DeleteRetentionRule(pb.DeleteRetentionRuleRequest(name="r"), timeout=patience(5))
    assert not (await client.admit("d", 10)).HasField("eviction_policy")


@pytest.mark.parametrize("rotary", [True, False])
def test_the_operation_log_leads_to_the_same_evictions(rotary: bool) -> None:
    config = ManagerConfig(capacity_ahead_tokens=4)
    file, clock = io.BytesIO(), ManagerClock(map(float, itertools.count(1)).__next__)
    manager = CacheManager(3, clock, config)
    calls = DirectCalls(manager, clock, file)
    calls.run("RegisterScheduler", pb.RegisterSchedulerRequest(scheduler_id=SCHEDULER, scheduler_epoch=1))
    calls.register(
        pb.RegisterExecutorRequest(
            executor_id=EXECUTOR,
            executor_epoch=1,
            model_fingerprint=b"f",
            block_size=4,
            pools=[pb.PoolSpec(group=0, num_blocks=20)],
            plain_rotary=rotary,
        )
    )
    policy = COMPACTED if rotary else WINDOW
    rule = pb.RetentionRule(name="r", action=pb.RuleAction(eviction_policy=policy))
    calls.run("CreateRetentionRule", pb.CreateRetentionRuleRequest(rule=rule))
    admission = {"scheduler_id": SCHEDULER, "scheduler_epoch": 1, "executor_id": EXECUTOR, "token_ids": range(10)}
    handles = [
        calls.run("AdmitSequence", pb.AdmitSequenceRequest(sequence_id=name, **admission)).sequence_handle
        for name in ("moves", "waits")
    ]
    shared = {"scheduler_id": SCHEDULER, "scheduler_epoch": 1, "manager_epoch": 3, "handles": handles}
    shared |= {"computed_tokens": [10, 10], "new_token_counts": [0, 0]}
    states = set()
    for number, columns in enumerate(
        ({"evicting_handles": handles}, {"evicted_handles": handles[:1], "computed_tokens_before_eviction": [10]}), 1
    ):
        calls.run("SyncSequences", pb.SyncSequencesRequest(sync_number=number, **shared, **columns))
        states.add(state_hash(manager.queries.state()))
        replayed = replay.replay(io.BytesIO(file.getvalue()))
        assert replayed.refused == 0
        assert state_hash(replayed.manager.queries.state()) == state_hash(manager.queries.state())
    assert len(states) == 2
    assert [(one.has_evicted_tokens, one.blocks_held) for one in manager.queries.sequences()] == [(True, 2), (False, 5)]
