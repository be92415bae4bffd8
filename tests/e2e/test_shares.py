"""Memory that layer groups share, moved by an operator while a real executor of a model with windows serves."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import torch
from google.protobuf.field_mask_pb2 import FieldMask
from transformers import AutoModelForCausalLM, Gemma3TextConfig

from protos.kvcache.v1 import kvcache_pb2 as kv
from protos.kvcache.v1 import kvcache_pb2_grpc as kv_rpc
from protos.rpc.errors import RemoteError, from_rpc_error
from tests.stack import Stack
from tests.support.generation import generate_all, greedy_request
from tests.support.patience import patience
from tests.support.reference import first_mismatch, greedy
from tests.unit.executor.conftest import save_model

VOCABULARY, OUTPUT = 97, 12
CONFIG = Gemma3TextConfig(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    query_pre_attn_scalar=8,
    max_position_embeddings=512,
    sliding_window=32,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
)
# Blocks of each group, were they equally many.
EQUAL = 128


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five layers with a window to one with full attention."""
    return save_model(CONFIG, tmp_path_factory.mktemp("models") / "gemma3")


@pytest.fixture
def stack(model: Path) -> Iterator[Stack]:
    with Stack(executor_model=model, executor_max_tokens=EQUAL * 16, executor_expected_tokens=512) as running:
        yield running


class Operator:
    """Looks at pools and changes them; no look finds them beyond their memory."""

    def __init__(self, stub: kv_rpc.CacheAdminServiceAsyncStub) -> None:
        self._stub = stub

    async def pools(self) -> tuple[kv.Pool, kv.Pool]:
        """Of full attention and of the window."""
        found = (await self._stub.ListPools(kv.ListPoolsRequest(), timeout=patience(10))).pools
        windowed, full = sorted(found, key=lambda pool: not pool.spec.HasField("attention_window"))
        memory = EQUAL * (full.spec.block_bytes + windowed.spec.block_bytes)
        assert sum(pool.total_blocks * pool.spec.block_bytes for pool in (full, windowed)) <= memory
        return full, windowed

    async def update(self, pool: kv.Pool, blocks: int) -> None:
        """Again as long as blocks are in use, or the executor has memory to return. Raises RemoteError."""
        changed = kv.Pool(pool_id=pool.pool_id, total_blocks=blocks)
        request = kv.UpdatePoolRequest(pool=changed, update_mask=FieldMask(paths=["total_blocks"]))
        async with asyncio.timeout(patience(30)):
            while True:
                try:
                    await self._stub.UpdatePool(request, timeout=patience(10))
                except grpc.aio.AioRpcError as failed:
                    error = from_rpc_error(failed)
                    if error.reason != "POOL_IN_USE":
                        raise error from failed
                    await asyncio.sleep(0.05)
                else:
                    return

    async def check(self) -> None:
        """Nothing contradicts itself, and nothing is in use."""
        for pool in await self.pools():
            answer = await self._stub.CheckPool(kv.CheckPoolRequest(pool_id=pool.pool_id), timeout=patience(10))
            assert not answer.violations


def prompts(seed: int) -> list[list[int]]:
    """Lengths from a few tokens to nearly the model's limit."""
    rng = random.Random(seed)
    return [[rng.randrange(VOCABULARY) for _ in range(length)] for length in (5, 40, 150, 300, 480)]


async def check_output(stack: Stack, reference: torch.nn.Module, seed: int) -> None:
    asked = prompts(seed)
    outputs = await generate_all(stack.scheduler, [greedy_request(one, OUTPUT) for one in asked], concurrency=5)
    for prompt, output in zip(asked, outputs, strict=True):
        mismatch = first_mismatch(greedy(reference, prompt, OUTPUT), output.token_ids)
        assert mismatch is None or mismatch.is_tie


async def move_while_it_serves(stack: Stack, reference: torch.nn.Module) -> list[tuple[int, int]]:
    """Generates with each of several shares, and while they change; returns the shares."""
    seen = []
    async with grpc.aio.insecure_channel(stack.admin) as admin:
        operator = Operator(kv_rpc.CacheAdminServiceStub(admin))
        full, windowed = await operator.pools()
        memory = full.total_blocks * full.spec.block_bytes + windowed.total_blocks * windowed.spec.block_bytes
        for seed, share in enumerate((40, 112, 64, windowed.total_blocks)):
            full, windowed = await operator.pools()
            seen.append((full.total_blocks, windowed.total_blocks))
            with pytest.raises(RemoteError) as refused:
                await operator.update(full, full.spec.num_blocks)
            assert "make another pool smaller first" in refused.value.fields["pool.total_blocks"]
            serving = asyncio.create_task(check_output(stack, reference, seed))
            changes = [(windowed, share), (full, (memory - share * windowed.spec.block_bytes) // full.spec.block_bytes)]
            # What grows comes last.
            for pool, blocks in sorted(changes, key=lambda change: change[1] - change[0].total_blocks):
                await operator.update(pool, blocks)
            await serving
            # From the cache as far as blocks are there still.
            await check_output(stack, reference, seed)
            await operator.check()
        full, windowed = await operator.pools()
        seen.append((full.total_blocks, windowed.total_blocks))
    return seen


def test_an_operator_moves_memory_while_sequences_run_and_outputs_stay_the_same(stack: Stack, model: Path) -> None:
    reference = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager")
    seen = asyncio.run(move_while_it_serves(stack, reference))
    assert seen[0] == seen[-1]
    assert seen[0][0] > EQUAL > seen[0][1]
    assert [windowed for _, windowed in seen[1:4]] == [40, 112, 64]


def test_given_shares_stay(model: Path) -> None:
    settings = {"executor_model": model, "executor_max_tokens": EQUAL * 16}
    with Stack(**settings, executor_pool_shares="5,1") as stack:
        asyncio.run(check_given(stack))


async def check_given(stack: Stack) -> None:
    async with grpc.aio.insecure_channel(stack.admin) as admin:
        operator = Operator(kv_rpc.CacheAdminServiceStub(admin))
        full, windowed = await operator.pools()
        assert (full.total_blocks, windowed.total_blocks) == (EQUAL, EQUAL)
        await operator.update(windowed, EQUAL - 8)
        with pytest.raises(RemoteError) as refused:
            await operator.update(full, EQUAL + 8)
        bound = f"must be from 1 to the {EQUAL} slots of the pool; the pools of this executor have fixed memory"
        assert refused.value.fields["pool.total_blocks"] == bound
