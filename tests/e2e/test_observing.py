"""Traces, the access log and metrics of the real stack, as a receiver, a file's reader and Prometheus get them."""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from protos.generation.v1 import generation_pb2 as pb
from protos.generation.v1 import generation_pb2_grpc as rpc
from tests.stack import Stack, metrics
from tests.support.otlp_receiver import OtlpReceiver, attributes
from tests.support.patience import patience
from tests.support.ports import free_address

pytestmark = pytest.mark.model

PROMPT = "Ambergris and vellichor: " + "the quick brown fox jumps over the lazy dog. " * 5
SALT = "a salt that no other may know"
SERVICES = {"kvkeep-scheduler", "kvkeep-cachemgr", "kvkeep-executor"}


class Observed:
    """The stack with all that watches it."""

    def __init__(self, stack: Stack, receiver: OtlpReceiver, access_log: Path, addresses: dict[str, str]) -> None:
        self.stack = stack
        self.receiver = receiver
        self.access_log = access_log
        self._addresses = addresses

    def samples(self, process: str) -> dict[tuple[str, str], float]:
        """All that Prometheus gets of a process."""
        return {(name, labels): value for name, labels, value in metrics(self._addresses[process])}

    def lines(self, request_id: str) -> list[dict[str, object]]:
        """What the access log says of a request."""
        lines = map(json.loads, self.access_log.read_text().splitlines())
        return [line for line in lines if line.get("generation") == request_id]

    async def lines_soon(self, request_id: str) -> list[dict[str, object]]:
        """The lines, as soon as there are any: a thread writes them."""
        async with asyncio.timeout(patience(30)):
            while not (found := self.lines(request_id)):
                await asyncio.sleep(0.01)
        return found


@pytest.fixture(scope="module", params=[0, 2], ids=["http in the scheduler", "front ends"])
def observed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observed]:
    access_log = tmp_path_factory.mktemp("observing") / "access.jsonl"
    addresses = {"scheduler": free_address(), "cachemgr": free_address()}
    with OtlpReceiver() as receiver, pytest.MonkeyPatch.context() as environment:
        environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
        environment.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        stack = Stack(
            scheduler_metrics_address=addresses["scheduler"],
            cachemgr_metrics_address=addresses["cachemgr"],
            scheduler_http_address=free_address(),
            scheduler_frontends=request.param,
            scheduler_vllm_metrics=1,
            scheduler_access_log=access_log,
        )
        with stack:
            yield Observed(stack, receiver, access_log, addresses)


def traced(sampled: bool = True) -> tuple[str, str, str]:
    """A caller's trace, its span, and both as it sends them."""
    trace_id, span_id = secrets.token_hex(16), secrets.token_hex(8)
    return trace_id, span_id, f"00-{trace_id}-{span_id}-{int(sampled):02x}"


def asked(request_id: str, *, max_tokens: int = 8, **fields: object) -> pb.StreamGenerateRequest:
    return pb.StreamGenerateRequest(
        text=PROMPT,
        max_tokens=max_tokens,
        ignore_eos=True,
        request_id=request_id,
        cache=pb.CacheOptions(salt=SALT),
        **fields,  # type: ignore[arg-type]
    )


async def answer(stack: Stack, request: pb.StreamGenerateRequest, traceparent: str = "") -> list[pb.Usage]:
    """The usage of each sample."""
    metadata = (("traceparent", traceparent),) if traceparent else ()
    async with grpc.aio.insecure_channel(stack.scheduler) as channel:
        stub: rpc.GenerationServiceAsyncStub = rpc.GenerationServiceStub(channel)
        call = stub.StreamGenerate(request, timeout=patience(60), metadata=metadata)
        return [message.usage async for message in call if message.finish_reason]


async def test_a_request_has_one_span_in_each_service_below_its_callers(observed: Observed) -> None:
    trace_id, span_id, traceparent = traced()
    await answer(observed.stack, asked("warm"))
    [usage] = await answer(observed.stack, asked("one"), traceparent)
    spans = observed.receiver.wait_for(lambda found: {name for name, _ in found} == SERVICES, trace_id)
    assert len(spans) == 3
    by_service = dict(spans)
    mine, admission, steps = (by_service[f"kvkeep-{name}"] for name in ("scheduler", "cachemgr", "executor"))
    assert mine.parent_span_id.hex() == span_id
    assert admission.parent_span_id == steps.parent_span_id == mine.span_id
    assert mine.start_time_unix_nano <= admission.start_time_unix_nano <= admission.end_time_unix_nano
    assert admission.end_time_unix_nano <= mine.end_time_unix_nano
    assert mine.name.startswith("text_completion ")
    said = attributes(mine)
    assert said["gen_ai.usage.input_tokens"] == usage.prompt_tokens
    assert said["gen_ai.usage.cache_read.input_tokens"] == usage.cached_tokens > 0
    assert said["gen_ai.usage.output_tokens"] == usage.output_tokens == 8
    assert said["gen_ai.response.finish_reasons"] == ("length",)
    assert said["gen_ai.response.id"] == "one"
    assert said["gen_ai.request.max_tokens"] == 8
    assert attributes(admission)["kvkeep.cached_tokens"] == usage.cached_tokens
    assert attributes(steps)["kvkeep.cached_tokens"] == usage.cached_tokens
    assert attributes(steps)["kvkeep.sampled_tokens"] == 8
    for _, span in spans:
        assert b"mbergris" not in span.SerializeToString()
        assert SALT.encode() not in span.SerializeToString()


async def test_a_request_by_http_is_traced_and_logged_alike(observed: Observed) -> None:
    trace_id, span_id, traceparent = traced()
    body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 3, "cache_salt": SALT}
    call = urllib.request.Request(
        f"http://{observed.stack.http}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json", "traceparent": traceparent},
    )
    with await asyncio.to_thread(urllib.request.urlopen, call, timeout=patience(60)) as answered:
        told = json.load(answered)
    usage = told["usage"]
    spans = observed.receiver.wait_for(lambda found: len(found) >= 3, trace_id)
    assert sorted(name for name, _ in spans) == sorted(SERVICES)
    mine = dict(spans)["kvkeep-scheduler"]
    assert mine.parent_span_id.hex() == span_id
    assert mine.name.startswith("chat ")
    said = attributes(mine)
    assert said["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert said["gen_ai.usage.cache_read.input_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
    assert said["gen_ai.response.id"] == told["id"]
    [line] = await observed.lines_soon(told["id"])
    assert (line["method"], line["trace_id"]) == ("POST /v1/chat/completions", trace_id)


async def test_a_request_by_http_whose_trace_begins_here_has_its_id_in_the_line(observed: Observed) -> None:
    call = urllib.request.Request(
        f"http://{observed.stack.http}/v1/completions",
        json.dumps({"prompt": PROMPT, "max_tokens": 1, "request_id": "begun"}).encode(),
        {"content-type": "application/json"},
    )
    with await asyncio.to_thread(urllib.request.urlopen, call, timeout=patience(60)) as answered:
        assert json.load(answered)["id"] == "begun"
    [line] = await observed.lines_soon("begun")
    spans = observed.receiver.wait_for(lambda found: len(found) >= 3, str(line["trace_id"]))
    assert attributes(dict(spans)["kvkeep-scheduler"])["gen_ai.response.id"] == "begun"


async def test_requests_that_are_admitted_and_run_together_keep_their_traces(observed: Observed) -> None:
    traces = [traced() for _ in range(12)]
    async with asyncio.TaskGroup() as group:
        for index, (_, _, traceparent) in enumerate(traces):
            group.create_task(answer(observed.stack, asked(f"many-{index}", max_tokens=4), traceparent))
    for trace_id, span_id, _ in traces:
        spans = observed.receiver.wait_for(lambda found: len(found) >= 3, trace_id)
        assert sorted(name for name, _ in spans) == sorted(SERVICES)
        mine = dict(spans)["kvkeep-scheduler"]
        assert mine.parent_span_id.hex() == span_id
        assert {span.parent_span_id for name, span in spans if name != "kvkeep-scheduler"} == {mine.span_id}


async def test_unsampled_spans_are_not_sent_and_invalid_contexts_are_ignored(
    observed: Observed,
) -> None:
    trace_id, _, traceparent = traced(sampled=False)
    await answer(observed.stack, asked("unsampled"), traceparent)
    await answer(observed.stack, asked("garbled"), f"00-{trace_id}-{'0' * 16}-01")

    def came(found: list) -> bool:
        return any(attributes(span).get("gen_ai.response.id") == "garbled" for _, span in found)

    observed.receiver.wait_for(came)
    assert observed.receiver.spans(trace_id) == []
    [garbled] = [
        span for _, span in observed.receiver.spans() if attributes(span).get("gen_ai.response.id") == "garbled"
    ]
    assert garbled.parent_span_id == b""
    [line] = await observed.lines_soon("garbled")
    assert line["trace_id"] == garbled.trace_id.hex()


async def test_a_refused_request_has_a_span_and_a_line_that_say_why(observed: Observed) -> None:
    trace_id, _, traceparent = traced()
    with pytest.raises(grpc.aio.AioRpcError):
        await answer(observed.stack, asked("bad", n=65), traceparent)
    [(_, span)] = observed.receiver.wait_for(lambda found: len(found) == 1, trace_id)
    assert attributes(span)["error.type"] == "INVALID_FIELD"
    assert span.status.code == 2
    [line] = await observed.lines_soon("bad")
    assert (line["event"], line["error"], line["trace_id"]) == ("request refused", "INVALID_FIELD", trace_id)


async def test_the_access_log_has_one_line_per_request_and_neither_prompt_nor_salt(observed: Observed) -> None:
    trace_id, _, traceparent = traced()
    usages = await answer(observed.stack, asked("logged", n=2), traceparent)
    [line] = await observed.lines_soon("logged")
    assert line["trace_id"] == trace_id
    assert line["method"] == "generation.v1.GenerationService/StreamGenerate"
    assert line["finish_reason"] == "length"
    assert line["samples"] == 2
    for name in ("prompt_tokens", "cached_tokens", "output_tokens"):
        assert line[name] == sum(getattr(usage, name) for usage in usages)
    queued, first, whole = (float(str(line[name])) for name in ("queue_seconds", "ttft_seconds", "seconds"))
    assert 0 <= queued <= first <= whole
    assert line["salt_sha256"] == hashlib.sha256(SALT.encode()).hexdigest()[:16]
    everything = observed.access_log.read_text()
    assert "mbergris" not in everything
    assert SALT not in everything
    assert "request ended" not in observed.stack.log_path("scheduler").read_text()


async def test_metrics_add_up_to_the_answers(observed: Observed) -> None:
    before = observed.samples("scheduler")
    requests = [asked(f"counted-{index}", max_tokens=3 + index, n=1 + index % 2) for index in range(4)]
    usages = [usage for request in requests for usage in await answer(observed.stack, request)]
    after = observed.samples("scheduler")

    def grown(name: str, labels: str = "") -> float:
        return after[name, labels] - before.get((name, labels), 0)

    ours, theirs = "kvkeep_scheduler_", "vllm:"
    [labels] = {labels for name, labels in after if name == "vllm:prompt_tokens_total"}
    assert 'engine="0"' in labels
    for name, counted in (
        ("time_to_first_token_seconds_count", len(requests)),
        ("queue_seconds_count", len(requests)),
        ("request_seconds_count", len(requests)),
        ("inter_token_latency_seconds_count", sum(usage.output_tokens - 1 for usage in usages)),
        ("prompt_tokens_total", sum(usage.prompt_tokens for usage in usages)),
        ("cached_tokens_total", sum(usage.cached_tokens for usage in usages)),
        ("output_tokens_total", sum(usage.output_tokens for usage in usages)),
    ):
        assert grown(ours + name) == counted > 0, name
    for name, counted in (
        ("time_to_first_token_seconds_count", len(requests)),
        ("prefix_cache_queries_total", sum(usage.prompt_tokens for usage in usages)),
        ("prefix_cache_hits_total", sum(usage.cached_tokens for usage in usages)),
        ("generation_tokens_total", sum(usage.output_tokens for usage in usages)),
    ):
        assert grown(theirs + name, labels) == counted, name


async def test_the_cache_manager_names_salts_by_their_hash(observed: Observed) -> None:
    [usage] = await answer(observed.stack, asked("salted"))
    digest = hashlib.sha256(SALT.encode()).hexdigest()[:16]
    labels = f'pool="executor-0/0",salt_sha256="{digest}"'
    async with asyncio.timeout(patience(30)):
        # Housekeeping brings them up to date.
        while not (hit := observed.samples("cachemgr").get(("kvkeep_salt_hit_tokens_total", labels), 0)):
            await asyncio.sleep(0.05)
    found = observed.samples("cachemgr")
    assert usage.cached_tokens <= hit < found["kvkeep_salt_queried_tokens_total", labels]
    assert found["kvkeep_pool_broken_leases_total", 'pool="executor-0/0"'] == 0
    assert ("kvkeep_tier_removed_blocks_total", 'cause="evicted",pool="executor-0/0",tier="device"') in found
