"""Waiting for a stack that no client uses any more."""

import asyncio

import grpc

from protos.kvcache.v1 import kvcache_pb2 as kv
from protos.kvcache.v1 import kvcache_pb2_grpc as kvcache_rpc
from tests.support.patience import patience


async def until_idle(address: str) -> kv.CheckPoolResponse:
    """Waits until no sequence is live, then recounts every pool."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub: kvcache_rpc.CacheAdminServiceAsyncStub = kvcache_rpc.CacheAdminServiceStub(channel)
        async with asyncio.timeout(patience(30)):
            while (await stub.ListSequences(kv.ListSequencesRequest(), timeout=patience(5))).sequences:
                await asyncio.sleep(0.1)
        return await stub.CheckPool(kv.CheckPoolRequest(), timeout=patience(30))
