"""Resident memory of every process: at the start, with a full pool, and over many requests.

Run it with `make bench-memory`. Requests with different texts fill the pool and evict from it. A process that keeps
something of each request would grow. Histories with a bound, above all the cache manager's last 100,000 events, are
filled first: blocks are small, so that a request makes many events. It ends with status 1 when the executor's memory
beside weights and pool, the cache manager's memory at the start, or the growth of any process is above its
bound.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys

import grpc
import psutil

from bench.limits import ELEMENT_BYTES, ModelShape
from bench.result import Result, add_json_argument
from bench.runs import processes
from bench.tables import table
from executor.models.files import resolve
from protos.execution.v1 import execution_pb2 as execution
from protos.execution.v1 import execution_pb2_grpc as execution_rpc
from tests.stack import Stack, metrics
from tests.support.generation import generate_all, greedy_request
from tests.support.ports import free_address

MB = 1e6
EXECUTOR_BESIDE_MB = 600
CACHEMGR_START_MB = 120
# Growth that allocators and measuring cause, as a share of a process's memory after the warm-up.
GROWTH_SHARE, GROWTH_MB = 0.02, 4
WARM_UP = 6_000
BATCH = 1_000
BLOCK_SIZE = 4
CONCURRENCY = 64
PROMPT_TOKENS, OUTPUT_TOKENS = (8, 64), 4


async def pool_tokens(stack: Stack) -> int:
    """Tokens that the executor's pool holds."""
    async with grpc.aio.insecure_channel(stack.executor) as channel:
        stub: execution_rpc.ExecutorServiceAsyncStub = execution_rpc.ExecutorServiceStub(channel)
        return (await stub.GetExecutor(execution.GetExecutorRequest(), timeout=10)).max_tokens


def weight_bytes(stack: Stack) -> float:
    """Bytes of the model's matrices, which compiled code keeps in fewer bytes than their dtype has."""
    found = {name: value for name, _, value in metrics(stack.executor_metrics)}
    if not found["kvkeep_executor_weight_bytes"]:
        sys.exit("the model does not run in compiled code here: its log says why; the weights' memory is not known")
    return found["kvkeep_executor_weight_bytes"]


def batch(rng: random.Random, vocabulary: int, count: int) -> list[list[int]]:
    """Prompts with unique beginnings."""
    return [[rng.randrange(vocabulary) for _ in range(rng.randint(*PROMPT_TOKENS))] for _ in range(count)]


def resident(running: dict[str, psutil.Process]) -> dict[str, float]:
    """Megabytes of each process except the client."""
    return {name: process.memory_info().rss / MB for name, process in running.items() if name != "client"}


def main() -> int:
    """Measures and judges."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--dtype", choices=ELEMENT_BYTES, default="bfloat16")
    parser.add_argument("--pool-tokens", type=int, default=8_192)
    add_json_argument(parser)
    given = parser.parse_args()
    shape = ModelShape.read(resolve(""))
    rng = random.Random(3)
    settings = {"executor_dtype": given.dtype, "executor_max_tokens": given.pool_tokens}
    settings["executor_metrics_address"] = free_address()
    with Stack(executor_block_size=BLOCK_SIZE, **settings) as stack:
        running = processes(stack)
        pool = asyncio.run(pool_tokens(stack)) * shape.kv_elements * ELEMENT_BYTES[given.dtype] / MB
        weights = weight_bytes(stack) / MB
        seen = {0: resident(running)}
        print(f"{given.dtype}: weights {weights:.0f} MB, KV pool {pool:.0f} MB; resident MB", flush=True)
        while (done := max(seen)) < WARM_UP + given.requests:
            prompts = batch(rng, shape.vocabulary, min(BATCH, WARM_UP + given.requests - done))
            requests = [greedy_request(prompt, OUTPUT_TOKENS) for prompt in prompts]
            asyncio.run(generate_all(stack.scheduler, requests, concurrency=CONCURRENCY))
            seen[done + len(prompts)] = resident(running)
            print(f"{max(seen)} requests", file=sys.stderr, flush=True)
    rows = [[f"{done} requests", *(f"{value:.1f}" for value in one.values())] for done, one in seen.items()]
    print(table(("after", *seen[0]), rows))
    warm, last = seen[WARM_UP], seen[max(seen)]
    verdicts = [
        ("executor beside weights and pool", last["executor"] - weights - pool, EXECUTOR_BESIDE_MB),
        ("cachemgr at the start", seen[0]["cachemgr"], CACHEMGR_START_MB),
        *((f"growth of {name}", last[name] - warm[name], GROWTH_MB + GROWTH_SHARE * warm[name]) for name in warm),
    ]
    for what, found, bound in verdicts:
        print(f"{what:<34}{found:8.1f} MB, {'less' if found < bound else 'NOT less'} than {bound:.1f}")
    figures = {
        "weights_mb": weights,
        "pool_mb": pool,
        "resident_mb": seen,
        "bounds_mb": {what: {"found": found, "bound": bound} for what, found, bound in verdicts},
    }
    asked = {name: value for name, value in vars(given).items() if name != "json"}
    Result("memory", figures, asked).write(given.json)
    return 0 if all(found < bound for _, found, bound in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
