"""Blocks in two tiers, and blocks that outlive the executor, through every door to the manager."""

from pathlib import Path

import pytest

from protos.kvcache.v1 import kvcache_pb2 as pb
from tests.conformance.backends import BACKENDS, Backend
from tests.conformance.cases import BACKEND_NAMES
from tests.conformance.observer import Observer
from tests.conformance.player import EXECUTOR, Player
from tests.conformance.runner import Clock

BLOCK, HOST_BLOCKS = 4, 6
POOL = pb.PoolSpec(group=0, num_blocks=4, host_blocks=HOST_BLOCKS, num_layers=1, num_kv_heads=1, head_dim=8)


class Executor:
    """Does the work of renewals, and remembers which ticket filled which slot."""

    def __init__(self, backend: Backend, player: Player) -> None:
        self._backend = backend
        self._player = player
        self._generations = [0] * HOST_BLOCKS

    def renew(self) -> int:
        """Runs and confirms the copies that a renewal brings; returns how many."""
        request = pb.RenewExecutorRequest(
            executor_id=EXECUTOR, executor_epoch=1, manager_epoch=self._player.manager_epoch
        )
        transfers = self._backend.call("RenewExecutor", request).transfers
        self._player.copy(transfers)
        for transfer in transfers:
            self._generations[transfer.target_slot - 1] = transfer.ticket
        return len(transfers)

    def start_again(self) -> pb.RegisterExecutorResponse:
        """A newer epoch; the scheduler has one, too."""
        request = pb.RegisterSchedulerRequest(scheduler_id="front", scheduler_epoch=2)
        self._backend.call("RegisterScheduler", request)
        pool = pb.PoolSpec(host_generations=self._generations)
        pool.MergeFrom(POOL)
        registration = pb.RegisterExecutorRequest(
            executor_id=EXECUTOR,
            executor_epoch=2,
            model="m",
            model_fingerprint=bytes(32),
            block_size=BLOCK,
            pools=[pool],
        )
        return self._backend.call("RegisterExecutor", registration)


@pytest.mark.parametrize("name", BACKEND_NAMES)
def test_blocks_are_copied_in_the_background_and_outlive_the_executor(name: str, tmp_path: Path) -> None:
    clock = Clock()
    backend = BACKENDS[name]({}, clock, tmp_path)
    try:
        player = Player(backend, BLOCK, [POOL])
        executor, observer = Executor(backend, player), Observer(backend, player)
        player.add("a", list(range(13)))
        player.release("a")
        assert executor.renew() == 3
        assert executor.renew() == 0
        observer.read_events()
        # All of the device: what lies below already needs no copy.
        player.add("b", list(range(100, 116)))
        assert player.transfers == []
        assert [event.block.tier for event in observer.read_events()] == [pb.TIER_HOST] * 3
        backend.verify()
        answer = executor.start_again()
        assert (answer.restored_blocks, answer.restored_lower_blocks) == (0, 3)
        assert list(backend.call("CheckPool", pb.CheckPoolRequest()).violations) == []
        request = player.admission("c", list(range(13)))
        request.scheduler_epoch = 2
        answers = []
        for tier in (pb.TIER_DEVICE, pb.TIER_HOST):
            request.lowest_tier = tier
            asked = pb.PreviewAdmissionRequest(admission=request, max_new_tokens=1)
            answers.append(backend.call("PreviewAdmission", asked).cached_tokens)
        assert answers == [0, 12]
        backend.verify()
    finally:
        backend.close()
