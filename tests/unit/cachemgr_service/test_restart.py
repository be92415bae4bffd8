"""A cache manager that comes back knows what its executors' devices still hold."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from cachemgr.process import CacheManagerProcess
from protos.kvcache.v1 import kvcache_pb2 as pb
from protos.rpc.errors import from_rpc_error
from tests.unit.cachemgr_service.conftest import EXECUTOR, NUM_BLOCKS, Client, settings_for
from tests.unit.cachemgr_service.servers import Server


@pytest.fixture
def redis_url(server: Server) -> str:
    return server.url


@asynccontextmanager
async def manager(folder: Path, redis_url: str, *, epoch: int = 7) -> AsyncIterator[Client]:
    settings = settings_for(folder)
    process = CacheManagerProcess(settings, redis_url=redis_url)
    await process.start()
    client = Client(settings, epoch=epoch)
    yield client
    await client.close()
    await process.stop()


async def store_two_blocks(folder: Path, redis_url: str) -> tuple[int, tuple[int, ...]]:
    """Computes 8 tokens in step 5 and stops; gives the manager's epoch and the sequence's slots."""
    async with manager(folder, redis_url) as client:
        answer = await client.register()
        admitted = await client.admit("a", 9)
        await client.compute(admitted, 8, step=5)
        return answer.manager_epoch, tuple(admitted.block_tables[0].slots)


def steps(slots: tuple[int, ...], *written_in: int) -> tuple[int, ...]:
    """last_write_steps of a pool in which these slots were written in these steps."""
    last = [0] * NUM_BLOCKS
    for slot, step in zip(slots, written_in, strict=False):
        last[slot - 1] = step
    return tuple(last)


async def test_blocks_that_nobody_wrote_since_are_found_again(tmp_path: Path, redis_url: str) -> None:
    epoch, slots = await store_two_blocks(tmp_path, redis_url)
    async with manager(tmp_path, redis_url) as client:
        answer = await client.register(last_write_steps=steps(slots, 5, 5))
        assert answer.manager_epoch > epoch
        assert answer.restored_blocks == 2
        again = await client.admit("b", 9)
        assert again.cached_tokens == 8
        assert tuple(again.block_tables[0].slots[:2]) == slots[:2]
        await client.check()


async def test_a_block_written_after_it_was_stored_is_not_believed(tmp_path: Path, redis_url: str) -> None:
    _, slots = await store_two_blocks(tmp_path, redis_url)
    async with manager(tmp_path, redis_url) as client:
        assert (await client.register(last_write_steps=steps(slots, 5, 6))).restored_blocks == 1
        assert (await client.admit("b", 9)).cached_tokens == 4
        await client.check()
    async with manager(tmp_path, redis_url) as client:
        # What was not believed once is gone from Redis too.
        assert (await client.register(last_write_steps=steps(slots, 5, 0))).restored_blocks == 1


async def test_remembered_blocks_are_not_believed_before_the_scheduler_has_given_up_its_sequences(
    tmp_path: Path, redis_url: str
) -> None:
    _, slots = await store_two_blocks(tmp_path, redis_url)
    async with manager(tmp_path, redis_url) as client:
        registration = client.registration(last_write_steps=steps(slots, 5, 5))
        # Until then sequences of before may still write into blocks that the old manager had taken back for them.
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await client.manager.RegisterExecutor(registration, timeout=5)
        error = from_rpc_error(refused.value)
        assert (error.code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "SCHEDULER_FIRST")
        # What the scheduler's last steps wrote is known when the executor comes again.
        assert (await client.register(last_write_steps=steps(slots, 5, 6))).restored_blocks == 1
        await client.check()


async def test_a_newer_epoch_of_the_executor_starts_empty(tmp_path: Path, redis_url: str) -> None:
    _, slots = await store_two_blocks(tmp_path, redis_url)
    async with manager(tmp_path, redis_url, epoch=8) as client:
        assert (await client.register(last_write_steps=steps(slots))).restored_blocks == 0
    async with manager(tmp_path, redis_url, epoch=7) as client:
        assert (await client.register(last_write_steps=steps(slots, 5, 5))).restored_blocks == 0


async def test_registering_again_with_a_living_manager_keeps_everything(tmp_path: Path, redis_url: str) -> None:
    async with manager(tmp_path, redis_url) as client:
        await client.register()
        admitted = await client.admit("a", 9)
        await client.compute(admitted, 8, step=5)
        slots = tuple(admitted.block_tables[0].slots)
        await client.register(last_write_steps=steps(slots, 5, 5))
        assert (await client.admit("b", 9)).cached_tokens == 8
        await client.check()


async def test_host_blocks_outlive_the_manager_and_the_executor(tmp_path: Path, redis_url: str) -> None:
    async with manager(tmp_path, redis_url) as client:
        await client.register(host_blocks=4)
        await client.compute(await client.admit("a", 9), 8)
        # Both blocks make room.
        admitted = await client.admit("b", list(range(100, 100 + 4 * NUM_BLOCKS)))
        generations = [0] * 4
        for copy in admitted.transfers:
            generations[copy.target_slot - 1] = copy.ticket
        await client.manager.ConfirmTransfers(
            pb.ConfirmTransfersRequest(
                executor_id=EXECUTOR, executor_epoch=7, tickets=[copy.ticket for copy in admitted.transfers]
            ),
            timeout=5,
        )
    async with manager(tmp_path, redis_url, epoch=8) as client:
        answer = await client.register(host_blocks=4, host_generations=generations)
        assert (answer.restored_blocks, answer.restored_lower_blocks) == (0, 2)
        assert (await client.admit("c", 9)).cached_tokens == 8
        await client.check()
    async with manager(tmp_path, redis_url, epoch=9) as client:
        # Redis holds the newer epoch, with all that was believed.
        assert (await client.register(host_blocks=4, host_generations=generations)).restored_lower_blocks == 2
        assert (await client.register(host_blocks=4)).restored_lower_blocks == 2
