"""Receipts of retention requests, and what operators can do while requests run, on the real stack."""

from __future__ import annotations

import asyncio
import random

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from protos.generation.v1 import generation_pb2 as pb
from protos.generation.v1 import generation_pb2_grpc as generation_rpc
from protos.kvcache.v1 import kvcache_pb2 as kv
from protos.kvcache.v1 import kvcache_pb2_grpc as kvcache_rpc
from protos.kvcommon.v1 import kvcommon_pb2 as common
from tests.stack import Stack
from tests.support.generation import greedy_request
from tests.support.idle import until_idle
from tests.support.patience import patience

RETAIN = common.HintAction(action_id="keep", action_type="Retain", action_version="0.1")
RETAIN.payload.update({"priority": 70, "duration_seconds": 600})


def prompt_of(seed: int) -> list[int]:
    """Random ids of four blocks."""
    rng = random.Random(seed)
    return [rng.randrange(1000, 40_000) for _ in range(65)]


async def usage_of(stack: Stack, request: pb.StreamGenerateRequest) -> pb.Usage:
    """What the last message says."""
    async with grpc.aio.insecure_channel(stack.scheduler) as channel:
        stub: generation_rpc.GenerationServiceAsyncStub = generation_rpc.GenerationServiceStub(channel)
        *_, last = [message async for message in stub.StreamGenerate(request, timeout=patience(60))]
        return last.usage


@pytest.mark.model
async def test_callers_get_receipts_of_retention_requests_and_of_hints(stack: Stack) -> None:
    request = greedy_request(prompt_of(101), 4)
    request.cache.tenant_id = "team"
    request.cache.retention_ranges.add(
        start=0, end=1000, retention_priority=60, retention_duration=Duration(seconds=60)
    )
    request.cache.kv_hints.CopyFrom(common.KvHints(protocol_version="0.1", message_id="m", actions=[RETAIN]))
    usage = await usage_of(stack, request)
    (receipt,) = usage.retention_receipts
    assert (receipt.request, receipt.outcome, receipt.num_blocks) == ("ranges[0]", common.OUTCOME_CLIPPED, 5)
    assert "65" in receipt.reason
    assert [(answer.action_id, answer.outcome) for answer in usage.hint_answers] == [
        ("keep", common.HINT_OUTCOME_DEFERRED)
    ]


@pytest.mark.model
async def test_blocks_of_a_forgotten_salt_are_scrubbed_and_never_hit_again(stack: Stack) -> None:
    request = greedy_request(prompt_of(102), 4)
    request.cache.salt = "to be forgotten"
    await usage_of(stack, request)
    assert (await usage_of(stack, request)).cached_tokens == 64
    # Blocks are released after the last answer.
    await until_idle(stack.admin)
    async with grpc.aio.insecure_channel(stack.admin) as channel:
        admin: kvcache_rpc.CacheAdminServiceAsyncStub = kvcache_rpc.CacheAdminServiceStub(channel)
        before = (await admin.ListPools(kv.ListPoolsRequest(), timeout=patience(5))).pools[0]
        receipt = await admin.ForgetBlocks(kv.ForgetBlocksRequest(salt="to be forgotten"), timeout=patience(5))
        assert receipt.zeroing_blocks == sum(count.num_blocks for count in receipt.removed) >= 4
        assert receipt.store_updated
        # The slots can be used again when the executor has overwritten them.
        while (await admin.ListPools(kv.ListPoolsRequest(), timeout=patience(5))).pools[0].used_blocks:
            await asyncio.sleep(0.05)
        after = (await admin.ListPools(kv.ListPoolsRequest(), timeout=patience(5))).pools[0]
        assert after.cached_blocks == before.cached_blocks - receipt.zeroing_blocks
    assert (await usage_of(stack, request)).cached_tokens == 0
    report = await until_idle(stack.admin)
    assert not report.violations
