"""Calls that touch very many blocks: other calls are answered meanwhile, and the replayed log gives the same state."""

import asyncio
import io
import itertools
import json
from random import Random
from typing import Any

import pytest
from google.protobuf.field_mask_pb2 import FieldMask

from cachemgr import slices
from cachemgr.errors import ManagerFailedError
from cachemgr.manager import CacheManager
from cachemgr.operators.state_dump import state_hash
from cachemgr.oplog import replay
from cachemgr.oplog import writer as oplog
from cachemgr.rpc import data_service as service
from cachemgr.rpc import mutations
from cachemgr.rpc.mutations import CONTINUE, ManagerClock
from cachemgr.types import ManagerConfig
from protos.errors import ServiceError
from protos.kvcache.v1 import kvcache_pb2 as pb
from tests.support.direct_calls import DirectCalls

SMALLER = pb.UpdatePoolRequest(
    pool=pb.Pool(pool_id="e/0", total_blocks=30), update_mask=FieldMask(paths=["total_blocks"])
)
CONFIG = ManagerConfig(capacity_ahead_tokens=0, free_watermark=0.0)
LONG_CALLS = {
    "forget": ("ForgetBlocks", pb.ForgetBlocksRequest(salt="a")),
    "pool": ("UpdatePool", SMALLER),
    "purge": ("PurgeBlocks", pb.PurgeBlocksRequest(skip_used=True)),
    "quota": ("SetQuota", pb.SetQuotaRequest(quota=pb.Quota(salt="a", device_floor_blocks=2))),
    "rule": (
        "CreateRetentionRule",
        pb.CreateRetentionRuleRequest(
            rule=pb.RetentionRule(name="r", match=pb.RuleMatch(salt="a"), action=pb.RuleAction(retention_priority=90))
        ),
    ),
}


class Caller:
    """A scheduler whose prompts are computed at once, and a log of all that it asks for."""

    def __init__(self) -> None:
        self.file = io.BytesIO()
        clock = ManagerClock(map(float, itertools.count(1)).__next__)
        self.manager = CacheManager(3, clock, CONFIG)
        self.calls = DirectCalls(self.manager, clock, self.file)
        self.calls.run("RegisterScheduler", pb.RegisterSchedulerRequest(scheduler_id="s", scheduler_epoch=1))
        pools = [pb.PoolSpec(group=0, num_blocks=100)]
        self.calls.register(
            pb.RegisterExecutorRequest(
                executor_id="e", executor_epoch=1, model_fingerprint=b"f", block_size=4, pools=pools
            )
        )
        self.count = 0

    def prompt(self, first: int, salt: str) -> None:
        """Admits, computes and releases a prompt of four blocks."""
        self.count += 1
        request = pb.AdmitSequenceRequest(
            sequence_id=f"q{self.count}",
            scheduler_id="s",
            scheduler_epoch=1,
            executor_id="e",
            token_ids=range(first, first + 16),
            salt=salt,
        )
        handle = self.calls.run("AdmitSequence", request).sequence_handle
        self.calls.run(
            "SyncSequences",
            pb.SyncSequencesRequest(
                scheduler_id="s",
                scheduler_epoch=1,
                manager_epoch=3,
                sync_number=self.count,
                step=self.count,
                handles=[handle],
                computed_tokens=[16],
                new_token_counts=[0],
                released_handles=[handle],
            ),
        )

    def state(self) -> str:
        return state_hash(self.manager.queries.state())


@pytest.fixture
def one_block_per_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "LOOKS", 1)
    monkeypatch.setattr(slices, "CHANGES", 1)
    monkeypatch.setattr(mutations, "SLICE_SECONDS", 0.0)


def filled() -> Caller:
    caller = Caller()
    for number in range(12):
        caller.prompt(number // 2 * 100, "ab"[number % 2])
    return caller


@pytest.mark.parametrize("name", LONG_CALLS)
def test_without_calls_in_between_steps_come_to_what_the_call_comes_to_at_once(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, request = LONG_CALLS[name]
    at_once, in_steps = filled(), filled()
    answer = at_once.calls.run(method, request)
    monkeypatch.setattr(slices, "LOOKS", 1)
    monkeypatch.setattr(slices, "CHANGES", 1)
    assert in_steps.calls.run(method, request) == answer
    # The clocks differ, as each step has its own time.
    without_time = [
        [line for line in caller.manager.queries.state() if '"now"' not in line] for caller in (at_once, in_steps)
    ]
    assert without_time[0] == without_time[1]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", LONG_CALLS)
async def test_others_are_answered_between_the_steps_and_a_replay_knows_each(
    name: str, seed: int, one_block_per_step: None
) -> None:
    caller, random = filled(), Random(seed)
    call = asyncio.create_task(caller.calls.run_in_slices(*LONG_CALLS[name]))
    between = 0
    while not call.done():
        caller.prompt(random.randrange(9) * 100, random.choice("ab"))
        assert caller.manager.queries.check_pool() == []
        between += 1
        await asyncio.sleep(0)
    await call
    assert between > 5
    assert replayed(caller) == caller.state()
    if name == "forget":
        kept = [json.loads(line) for line in caller.manager.queries.state()]
        assert not [one for one in kept if one["kind"] == "block" and one["key"] and one["salt"] == "a"]


async def test_others_are_answered_between_the_admissions_of_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "SLICE_SECONDS", 0.0)
    caller = filled()
    nothing: Any = None
    data = caller.calls.data
    admissions = [
        pb.AdmitSequenceRequest(
            sequence_id=f"together {number}",
            scheduler_id="s",
            scheduler_epoch=1,
            executor_id="e",
            token_ids=range(number * 100, number * 100 + 16),
            salt="a",
        )
        for number in range(8)
    ]
    call = asyncio.create_task(data.AdmitSequences(pb.AdmitSequencesRequest(admissions=admissions), nothing))
    live = set()
    while not call.done():
        live.add(len(list(caller.manager.queries.sequences())))
        caller.prompt(5_000, "b")
        assert caller.manager.queries.check_pool() == []
        await asyncio.sleep(0)
    assert [answer.admitted for answer in (await call).answers] == [True] * 8
    assert live == set(range(8))
    assert replayed(caller) == caller.state()


def replayed(caller: Caller) -> str:
    return state_hash(replay.replay(io.BytesIO(caller.file.getvalue())).manager.queries.state())


async def test_a_call_whose_caller_has_disconnected_is_carried_out(one_block_per_step: None) -> None:
    caller = filled()
    call = asyncio.create_task(caller.calls.run_in_slices(*LONG_CALLS["purge"]))
    for _ in range(3):
        await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert caller.manager.queries.pools()[0].cached_blocks > 0
    for _ in range(1000):
        await asyncio.sleep(0)
    assert caller.manager.queries.pools()[0].cached_blocks == 0


async def test_long_calls_come_one_after_the_other(one_block_per_step: None) -> None:
    caller = filled()
    calls = [caller.calls.run_in_slices(*call) for call in LONG_CALLS.values()]
    await asyncio.gather(*calls)
    methods = [
        entry.method
        for entry in oplog.read(io.BytesIO(caller.file.getvalue()))
        if entry.method in {CONTINUE, *(method for method, _ in LONG_CALLS.values())}
    ]
    assert [method for method, _ in itertools.groupby(methods) if method != CONTINUE] == [
        method for method, _ in LONG_CALLS.values()
    ]
    assert replayed(caller) == caller.state()


async def test_a_step_that_fails_inside_is_the_last_thing_that_the_manager_does(
    one_block_per_step: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    caller = filled()
    failed: list[str] = []
    caller.calls.mutations._on_failure = lambda method, _: failed.append(method)
    call = asyncio.create_task(caller.calls.run_in_slices(*LONG_CALLS["purge"]))
    for _ in range(3):
        await asyncio.sleep(0)

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("broken")

    pool = caller.manager._state.pool("e/0")
    monkeypatch.setattr(pool, "discard", fail)
    with pytest.raises(RuntimeError):
        await call
    assert failed == ["PurgeBlocks"]
    with pytest.raises(ManagerFailedError):
        caller.calls.mutations.expire()


async def test_a_long_call_that_is_refused_changes_nothing_and_ends() -> None:
    caller = filled()
    before = caller.state()
    with pytest.raises(ServiceError):
        await caller.calls.run_in_slices("ForgetBlocks", pb.ForgetBlocksRequest(salt=""))
    with pytest.raises(ServiceError):
        await caller.calls.run_in_slices("DeleteQuota", pb.DeleteQuotaRequest(salt="none"))
    await caller.calls.run_in_slices(*LONG_CALLS["purge"])
    assert caller.state() != before
    assert replayed(caller) == caller.state()
