"""A cache manager that has not run for a while: it blames no process for renewals that it could not receive."""

import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import pytest

from cachemgr.errors import ExecutorLeaseError
from cachemgr.manager import CacheManager
from cachemgr.operators.state_dump import state_hash
from cachemgr.oplog import replay
from cachemgr.rpc.mutations import EXPIRE_SECONDS, ManagerClock
from cachemgr.types import ManagerConfig
from protos.kvcache.v1 import kvcache_pb2 as pb
from tests.support.direct_calls import DirectCalls

LEASE = 10.0
CONFIG = ManagerConfig(lease_seconds=LEASE)


@dataclass
class Life:
    """A manager whose clock the test moves, with an executor, a scheduler, and a log of all operations."""

    now: float = 100.0
    log: io.BytesIO = field(default_factory=io.BytesIO)

    def __post_init__(self) -> None:
        clock = ManagerClock(lambda: self.now)
        self.manager = CacheManager(3, clock, CONFIG)
        self.calls = DirectCalls(self.manager, clock, self.log)
        self.calls.mutations.expire()
        self.calls.register(
            pb.RegisterExecutorRequest(
                executor_id="e",
                executor_epoch=1,
                model_fingerprint=b"f",
                block_size=4,
                pools=[pb.PoolSpec(group=0, num_blocks=8)],
            )
        )
        self.calls.run("RegisterScheduler", pb.RegisterSchedulerRequest(scheduler_id="s", scheduler_epoch=1))
        admission = pb.AdmitSequenceRequest(
            sequence_id="a", scheduler_id="s", scheduler_epoch=1, executor_id="e", token_ids=range(9)
        )
        self.admitted = self.calls.run("AdmitSequence", admission)
        assert self.admitted.admitted

    def pass_time(self, seconds: float) -> None:
        """The manager runs, and there are no calls."""
        end = self.now + seconds
        while self.now + EXPIRE_SECONDS <= end:
            self.now += EXPIRE_SECONDS
            self.calls.mutations.expire()

    def pause(self, seconds: float) -> None:
        """The manager does not run; its clock does."""
        self.now += seconds
        self.calls.mutations.expire()

    def renew(self) -> None:
        request = pb.RenewExecutorRequest(executor_id="e", executor_epoch=1, manager_epoch=3)
        self.calls.run("RenewExecutor", request)

    def sync(self, number: int, released: Sequence[int] = ()) -> pb.SyncSequencesResponse:
        request = pb.SyncSequencesRequest(
            scheduler_id="s",
            scheduler_epoch=1,
            manager_epoch=3,
            sync_number=number,
            step=number,
            released_handles=released,
        )
        answer: pb.SyncSequencesResponse = self.calls.run("SyncSequences", request)
        return answer

    @property
    def sequences(self) -> list[str]:
        return [view.sequence_id for view in self.manager.queries.sequences()]


@pytest.mark.parametrize("seconds", [3.0, 12.0, 60.0, 3600.0])
def test_a_pause_of_the_manager_ends_no_lease(seconds: float) -> None:
    life = Life()
    life.pass_time(LEASE / 2)
    life.pause(seconds)
    assert life.manager.queries.knows_executor("e")
    assert life.sequences == ["a"]
    # A lease has the same remaining time as before.
    life.pass_time(LEASE / 2 - 2 * EXPIRE_SECONDS)
    life.renew()
    assert not life.sync(1).void_handles
    life.pass_time(LEASE - EXPIRE_SECONDS)
    assert life.sequences == ["a"]


def test_a_call_that_takes_long_is_a_pause_too() -> None:
    life = Life()
    for _ in range(3):
        life.pause(LEASE * 0.9)
    assert life.manager.queries.knows_executor("e")


def test_silence_while_the_manager_runs_ends_leases_also_behind_a_pause() -> None:
    life = Life()
    life.pause(60.0)
    life.pass_time(LEASE + 2 * EXPIRE_SECONDS)
    assert not life.manager.queries.knows_executor("e")
    assert life.sequences == []
    with pytest.raises(ExecutorLeaseError):
        life.renew()


def test_a_hold_counts_a_pause_as_time() -> None:
    life = Life()
    hold = pb.HoldSequenceRequest(scheduler_id="s", scheduler_epoch=1, sequence_id="a", owner="o")
    hold.duration.FromSeconds(30)
    life.calls.run("HoldSequence", hold)
    life.sync(1, released=[life.admitted.sequence_handle])
    assert len(list(life.manager.queries.holds())) == 1
    life.pause(60.0)
    assert not list(life.manager.queries.holds())


@pytest.mark.parametrize("seed", range(20))
def test_leases_count_the_time_that_the_manager_runs(seed: int) -> None:
    """Against a model that adds up the time between looks, as far as that was planned."""
    random, life, run = Random(seed), Life(), 0.0
    for _ in range(200):
        match random.choice(["time", "time", "time", "pause", "renew"]):
            case "time":
                life.pass_time(EXPIRE_SECONDS)
                run += EXPIRE_SECONDS
            case "pause":
                life.pause(random.choice([0.1, 1.0, 12.0, 60.0]) + EXPIRE_SECONDS)
                run += EXPIRE_SECONDS
            case "renew":
                life.renew()
                run = 0.0
        assert life.manager.queries.knows_executor("e") == (run <= LEASE), run
        if run > LEASE:
            return


def test_a_replay_sees_the_same_pauses() -> None:
    life = Life()
    life.pass_time(2.0)
    life.pause(60.0)
    life.renew()
    life.pause(11.0)
    life.pass_time(2.0)
    life.log.seek(0)
    replayed = replay.replay(life.log)
    assert replayed.manager.queries.knows_executor("e")
    assert state_hash(replayed.manager.queries.state()) == state_hash(life.manager.queries.state())
