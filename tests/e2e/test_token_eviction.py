"""Token eviction through the whole stack: with prefix reuse, by rule and by request, and its effects for callers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from protos.generation.v1 import generation_pb2 as pb
from protos.generation.v1 import generation_pb2_grpc as generation_rpc
from protos.kvcache.v1 import kvcache_pb2 as kv
from protos.kvcache.v1 import kvcache_pb2_grpc as kvcache_rpc
from protos.kvcommon.eviction import Layout, parse
from protos.kvcommon.v1 import kvcommon_pb2 as common
from protos.rpc.errors import from_rpc_error
from scheduler.core.prefill_budget import LEAST_CHUNK
from tests.stack import Stack
from tests.support.generation import Output, generate_all, generate_samples, greedy_request
from tests.support.idle import until_idle
from tests.support.patience import patience

PROMPT, OUTPUT = 220, 20
POLICIES: dict[str, dict[str, Any]] = {
    "window": {"kind": "EVICTION_KIND_SLIDING_WINDOW", "start_tokens": 4, "recent_tokens": 92},
    "norm sum": {"kind": "EVICTION_KIND_NORM_SUM", "start_tokens": 16, "recent_tokens": 32, "max_cache_tokens": 96},
    "key difference": {"kind": "EVICTION_KIND_KEYDIFF", "max_cache_tokens": 96},
    "snapkv": {"kind": "EVICTION_KIND_SNAPKV", "max_cache_tokens": 96},
    "batch-max": {"kind": "EVICTION_KIND_AVERAGE", "max_cache_tokens": 96, "period_tokens": 32, "during_prefill": True},
    "compacted": {
        "kind": "EVICTION_KIND_SLIDING_WINDOW",
        "recent_tokens": 96,
        "period_tokens": 16,
        "positions": "EVICTION_POSITIONS_COMPACTED",
    },
}
# Every other kind.
MORE: dict[str, dict[str, Any]] = {
    "h2o and tova": {"kind": "EVICTION_KIND_H2O_TOVA", "max_cache_tokens": 96},
    "sum": {"kind": "EVICTION_KIND_SUM", "start_tokens": 16, "recent_tokens": 32, "max_cache_tokens": 96},
    "adaptive rkv": {
        "kind": "EVICTION_KIND_ADAPTIVE_RKV",
        "start_tokens": 16,
        "recent_tokens": 32,
        "max_cache_tokens": 96,
    },
    "kvcrush": {
        "kind": "EVICTION_KIND_SUM",
        "start_tokens": 16,
        "recent_tokens": 32,
        "max_cache_tokens": 80,
        "kvcrush": common.KvCrush(budget_blocks=1),
    },
    "h2o": {"kind": "EVICTION_KIND_H2O", "max_cache_tokens": 96},
    "tova": {"kind": "EVICTION_KIND_TOVA", "max_cache_tokens": 96},
    "roco": {"kind": "EVICTION_KIND_ROCO", "max_cache_tokens": 96},
    "key norm": {"kind": "EVICTION_KIND_KNORM", "max_cache_tokens": 96},
    "last": {"kind": "EVICTION_KIND_LAST", "max_cache_tokens": 65},
    "random": {"kind": "EVICTION_KIND_RANDOM", "max_cache_tokens": 96, "seed": 1},
    "adaptive window": {
        "kind": "EVICTION_KIND_ADAPTIVE_WINDOW",
        "start_tokens": 16,
        "recent_tokens": 32,
        "max_cache_tokens": 80,
    },
}
LAYOUT = Layout(16, (None,), plain_rotary=True)


def uses_scores(name: str) -> bool:
    """Whether a policy looks at attention."""
    chosen = parse(common.EvictionPolicy(**(POLICIES | MORE)[name]), LAYOUT)
    assert chosen is not None
    return chosen.uses_scores


# Sums of scores are rounded as steps are composed: output of policies by scores is equal if the steps are equal.
ALONE = [name for name in [*POLICIES, *MORE] if uses_scores(name)]
TOGETHER = [name for name in [*POLICIES, *MORE] if not uses_scores(name)]


@pytest.fixture(scope="module")
def exact() -> Iterator[Stack]:
    """A stack that rounds alike in every batch, and whose chunks of a prompt depend on no time."""
    with Stack(executor_batch_invariant=1, scheduler_max_batched_tokens=LEAST_CHUNK) as running:
        yield running


@pytest.fixture(scope="module")
def small() -> Iterator[Stack]:
    """A stack in which one request fits, and not its cached prompt beside it."""
    with Stack(executor_max_tokens=320) as running:
        yield running


def prompt_of(name: str) -> list[int]:
    """Random ids."""
    rng = random.Random(name)
    return [rng.randrange(1000, 40_000) for _ in range(PROMPT)]


def request_of(name: str, fields: dict[str, Any] | None, salt: str = "", **options: Any) -> pb.StreamGenerateRequest:
    """A greedy request by a policy, if any."""
    request = greedy_request(prompt_of(name), OUTPUT, **options)
    if salt:
        request.cache.salt = salt
    if fields is not None:
        request.eviction_policy.CopyFrom(common.EvictionPolicy(**fields))
    return request


async def run(stack: Stack, *requests: pb.StreamGenerateRequest) -> list[Output]:
    """All at once."""
    return await generate_all(stack.scheduler, requests, concurrency=len(requests), seconds=patience(60))


@pytest.mark.model
@pytest.mark.parametrize("names", [TOGETHER, *([name] for name in ALONE)], ids=", ".join)
async def test_an_evicting_run_leaves_its_prompt_to_others_and_to_itself(exact: Stack, names: list[str]) -> None:
    await asyncio.gather(*[check_reuse(exact, name) for name in names])
    assert not (await until_idle(exact.admin)).violations


async def check_reuse(stack: Stack, name: str) -> None:
    """What a policy's run hits in the cache, leaves there, and reports."""
    fields = (POLICIES | MORE)[name]
    chosen = parse(common.EvictionPolicy(**fields), LAYOUT)
    assert chosen is not None
    (plain,) = await run(stack, request_of(name, None, reuse=False))
    (cold,) = await run(stack, request_of(name, fields, reuse=False))
    for _ in range(2):
        (first,) = await run(stack, request_of(name, fields))
        assert first.token_ids == cold.token_ids
    # All tokens except those that the policy has to see, and the last token, which is always computed.
    reusable = min(chosen.reusable(PROMPT, PROMPT), PROMPT - 1)
    assert max(0, reusable - 16) <= first.usage.cached_tokens <= reusable
    (after,) = await run(stack, request_of(name, None))
    assert after.token_ids == plain.token_ids
    clean = 96 if name == "batch-max" else PROMPT - 1
    assert clean - 16 < after.usage.cached_tokens <= clean
    report = first.usage.eviction
    assert report.evicted_tokens >= PROMPT - 96
    assert report.tainted
    assert report.peak_cache_tokens == (96 if name == "batch-max" else PROMPT)
    assert report.policy.kind == common.EvictionPolicy(**fields).kind
    assert report.policy.HasField("recent_tokens")
    assert report.HasField("kept_mass") == chosen.uses_scores
    assert not after.usage.HasField("eviction")


@pytest.mark.model
async def test_a_window_that_is_granted_all_that_it_asks_for_changes_nothing(stack: Stack) -> None:
    fields = {
        "kind": "EVICTION_KIND_ADAPTIVE_WINDOW",
        "start_tokens": 16,
        "recent_tokens": 32,
        "max_cache_tokens": 16 + 512,
        "attention_mass": 1.0,
    }
    requests = [greedy_request(prompt_of("granted"), 150, reuse=False) for _ in range(2)]
    requests[1].eviction_policy.CopyFrom(common.EvictionPolicy(**fields))
    running = asyncio.create_task(run(stack, *requests))
    seen: set[tuple[int, int]] = set()
    async with grpc.aio.insecure_channel(stack.admin) as channel:
        admin: kvcache_rpc.CacheAdminServiceAsyncStub = kvcache_rpc.CacheAdminServiceStub(channel)
        while not running.done():
            for sequence in (await admin.ListSequences(kv.ListSequencesRequest(), timeout=patience(30))).sequences:
                if sequence.evicting:
                    seen.add((sequence.window_tokens, sequence.granted_blocks))
            await asyncio.sleep(0.01)
    plain, adaptive = await running
    assert adaptive.token_ids == plain.token_ids
    assert adaptive.usage.eviction.evicted_tokens == 0
    assert max(window for window, _ in seen) >= PROMPT
    assert all(blocks == (window - 32) // 16 for window, blocks in seen)
    assert not (await until_idle(stack.admin)).violations


@pytest.mark.model
@pytest.mark.parametrize("most", [48, 40])
async def test_all_that_may_be_kept_of_a_prompt_comes_from_the_cache_and_nothing_changes(
    exact: Stack, most: int
) -> None:
    together = ("SLIDING_WINDOW", "KEYDIFF", "KNORM", "RANDOM")
    await asyncio.gather(*[check_prefix(exact, kind, most) for kind in together])
    await check_prefix(exact, "TOVA", most)
    assert not (await until_idle(exact.admin)).violations


async def check_prefix(stack: Stack, kind: str, most: int) -> None:
    """That a policy which evicts during the prompt finds so much of it."""
    fields = {"kind": f"EVICTION_KIND_{kind}", "start_tokens": 4, "period_tokens": 8, "during_prefill": True}
    fields |= {"recent_tokens": most - 12} if kind == "SLIDING_WINDOW" else {"recent_tokens": 8}
    fields |= {} if kind == "SLIDING_WINDOW" else {"max_cache_tokens": most}
    name = f"prefix {kind} {most}"
    (cold,) = await run(stack, request_of(name, fields, reuse=False))
    await run(stack, request_of(name, None))
    (warm,) = await run(stack, request_of(name, fields))
    assert warm.token_ids == cold.token_ids
    assert warm.usage.cached_tokens == most - 1


@pytest.mark.model
async def test_an_executor_that_dies_costs_an_evicting_request_nothing_though_it_is_longer_than_the_pool(
    small: Stack,
) -> None:
    request = request_of("long", POLICIES["window"], reuse=False)
    request.max_tokens = 128
    (expected,) = await run(small, request)
    async with grpc.aio.insecure_channel(small.scheduler) as channel:
        stub: generation_rpc.GenerationServiceAsyncStub = generation_rpc.GenerationServiceStub(channel)
        tokens: list[int] = []
        async for message in stub.StreamGenerate(request, timeout=patience(60)):
            before = len(tokens)
            tokens += message.token_ids
            if before < 104 <= len(tokens):
                small.kill("executor")
                small.start("executor")
            usage = message.usage
    assert tokens == expected.token_ids
    assert usage.eviction.peak_cache_tokens == expected.usage.eviction.peak_cache_tokens == PROMPT
    assert not (await until_idle(small.admin)).violations


@pytest.mark.model
@pytest.mark.parametrize("fields", [MORE["h2o"], None], ids=["h2o", "no policy"])
async def test_a_cached_prompt_is_recomputed_where_it_does_not_fit_twice(
    small: Stack, fields: dict[str, Any] | None
) -> None:
    request = request_of("again", fields)
    request.cache.no_read = fields is None
    outputs = [await run(small, request) for _ in range(3)]
    assert outputs[0][0].token_ids == outputs[1][0].token_ids == outputs[2][0].token_ids
    assert not (await until_idle(small.admin)).violations


@pytest.mark.model
async def test_a_budget_above_the_length_gives_the_same_output(stack: Stack) -> None:
    wide = {"window": {"recent_tokens": 400}, "compacted": {"recent_tokens": 400}}
    for name, fields in POLICIES.items():
        roomy = fields | wide.get(name, {"max_cache_tokens": 512})
        evicting, plain = await run(stack, request_of("roomy", roomy, salt=name), request_of("roomy", None))
        assert evicting.token_ids == plain.token_ids
        assert evicting.usage.eviction.evicted_tokens == 0
        assert evicting.usage.eviction.peak_cache_tokens == PROMPT + OUTPUT - 1
        assert not evicting.usage.eviction.tainted


@pytest.mark.model
async def test_mixed_policies_run_together_as_alone_and_leave_nothing_behind(exact: Stack) -> None:
    requests = [request_of(f"mixed {name}", fields, salt="mixed") for name, fields in POLICIES.items()]
    requests.append(request_of("mixed plain", None, salt="mixed"))
    together = await run(exact, *requests)
    for name, request, output in zip([*POLICIES, ""], requests, together, strict=True):
        request.cache.no_read = request.cache.no_store = True
        (alone,) = await run(exact, request)
        assert output.usage.eviction.evicted_tokens == alone.usage.eviction.evicted_tokens
        assert output.usage.eviction.peak_cache_tokens == alone.usage.eviction.peak_cache_tokens
        if name not in ALONE:
            assert output.token_ids == alone.token_ids
    assert not (await until_idle(exact.admin)).violations


@pytest.mark.model
async def test_each_sample_of_a_prompt_evicts_its_own_tokens(exact: Stack) -> None:
    async with grpc.aio.insecure_channel(exact.scheduler) as channel:
        stub: generation_rpc.GenerationServiceAsyncStub = generation_rpc.GenerationServiceStub(channel)
        request = request_of("samples", POLICIES["norm sum"], n=3)
        request.sampling.temperature = 0
        outputs = await generate_samples(stub, request, patience(60))
    assert outputs[0].token_ids == outputs[1].token_ids == outputs[2].token_ids
    assert all(output.usage.eviction.evicted_tokens > 0 for output in outputs)


@pytest.mark.model
async def test_a_rule_gives_a_salt_its_policy_unless_a_request_says_otherwise(stack: Stack) -> None:
    async with grpc.aio.insecure_channel(stack.admin) as channel:
        admin: kvcache_rpc.CacheAdminServiceAsyncStub = kvcache_rpc.CacheAdminServiceStub(channel)
        rule = kv.RetentionRule(name="short-memory")
        rule.match.salt = "bounded"
        rule.action.eviction_policy.CopyFrom(common.EvictionPolicy(**POLICIES["window"]))
        await admin.CreateRetentionRule(kv.CreateRetentionRuleRequest(rule=rule), timeout=patience(5))
        try:
            ruled, own, none, other = await run(
                stack,
                request_of("ruled", None, salt="bounded"),
                request_of("ruled", POLICIES["key difference"], salt="bounded"),
                request_of("ruled", {"kind": "EVICTION_KIND_NONE"}, salt="bounded"),
                request_of("ruled", None, salt="free"),
            )
        finally:
            await admin.DeleteRetentionRule(kv.DeleteRetentionRuleRequest(name="short-memory"), timeout=patience(5))
    assert ruled.usage.eviction.policy.kind == common.EVICTION_KIND_SLIDING_WINDOW
    assert own.usage.eviction.policy.kind == common.EVICTION_KIND_KEYDIFF
    assert not none.usage.HasField("eviction")
    assert not other.usage.HasField("eviction")
    assert none.token_ids == other.token_ids


@pytest.mark.model
@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"kind": "EVICTION_KIND_NORM_SUM", "recent_tokens": 100}, "eviction_policy.recent_tokens"),
        ({"kind": "EVICTION_KIND_KNORM", "max_cache_tokens": 40}, "eviction_policy.max_cache_tokens"),
        (
            {"kind": "EVICTION_KIND_ADAPTIVE_RKV", "kvcrush": common.KvCrush(budget_blocks=1)},
            "eviction_policy.kvcrush",
        ),
    ],
)
async def test_a_bad_policy_is_refused_with_the_fields_name(stack: Stack, fields: dict[str, Any], field: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await run(stack, request_of("bad", fields))
    error = from_rpc_error(caught.value)
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    assert list(error.fields) == [field]
