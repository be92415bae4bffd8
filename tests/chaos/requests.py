"""Requests with known greedy outputs: mixed prompts, retention requests, samples, stop strings, eviction policies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from protos.generation.v1 import generation_pb2 as pb
from protos.generation.v1 import generation_pb2_grpc as rpc
from protos.kvcommon.v1 import kvcommon_pb2 as common
from tests.support.patience import patience
from tests.support.prompts import QUESTIONS, chat, prose

CALM_SECONDS = patience(60)
CALM_CONCURRENCY = 8
# The rounding of another batch could change the order of logits that are closer than this: such outputs are not used.
MARGIN = 2e-3

POLICIES: dict[str, dict[str, Any]] = {
    "window": {"kind": "EVICTION_KIND_SLIDING_WINDOW", "start_tokens": 4, "recent_tokens": 76},
    "norm-sum": {"kind": "EVICTION_KIND_NORM_SUM", "start_tokens": 16, "recent_tokens": 32, "max_cache_tokens": 96},
    "snapkv": {"kind": "EVICTION_KIND_SNAPKV", "max_cache_tokens": 96},
    "h2o": {"kind": "EVICTION_KIND_H2O", "max_cache_tokens": 96},
    "key-difference": {"kind": "EVICTION_KIND_KEYDIFF", "max_cache_tokens": 96},
    "compacted": {
        "kind": "EVICTION_KIND_SLIDING_WINDOW",
        "recent_tokens": 80,
        "period_tokens": 16,
        "positions": "EVICTION_POSITIONS_COMPACTED",
    },
}


@dataclass
class Sample:
    """Output of a sample."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: int = pb.FINISH_REASON_UNSPECIFIED

    def take(self, message: pb.StreamGenerateResponse) -> None:
        """Adds a piece."""
        self.token_ids += message.token_ids
        self.text += message.text
        self.finish_reason = message.finish_reason

    def begins(self, whole: Sample) -> bool:
        """Whether this is the whole output, or a beginning of the output."""
        if self.finish_reason:
            return self == whole
        return self.token_ids == whole.token_ids[: len(self.token_ids)] and whole.text.startswith(self.text)


@dataclass(frozen=True)
class Known:
    """A request with the output of each of its samples."""

    name: str
    request: pb.StreamGenerateRequest
    samples: tuple[Sample, ...]

    @property
    def tokens(self) -> int:
        """Output tokens of all samples."""
        return sum(len(sample.token_ids) for sample in self.samples)


def base_requests() -> dict[str, pb.StreamGenerateRequest]:
    """The requests that depend on no other request's output."""
    requests: dict[str, pb.StreamGenerateRequest] = {}
    for index, question in enumerate(QUESTIONS):
        requests[f"short {index}"] = _request(chat(question), 12 + 7 * index)
    for index in range(2):
        requests[f"long {index}"] = _request(f"Text {index}: {prose(index)[index * 977 :][:1800]}", 24)
    for family in range(3):
        begin = f"Variant {family}. {prose(family + 3)[:640]}"
        for tail in range(3):
            requests[f"prefix {family}.{tail}"] = _request(begin + chat(QUESTIONS[family + tail]), 16 + 4 * tail)
    for index in range(2):
        session = _request(chat(f"{QUESTIONS[index + 2]} Think of {index}."), 20)
        session.cache.session_id = f"session-{index}"
        retained = session.cache.retention_ranges.add(start=0, end=16, retention_priority=80)
        retained.retention_duration.FromSeconds(20)
        session.cache.decode_retention_priority = 60
        session.cache.decode_retention_duration.FromSeconds(10)
        requests[f"session {index}"] = session
    for index, (name, policy) in enumerate(POLICIES.items()):
        request = _request(f"Policy {index}: {prose(index)[index * 331 :][:700]}", 40)
        request.eviction_policy.CopyFrom(common.EvictionPolicy(**policy))
        requests[f"policy {name}"] = request
    return requests


def _request(text: str, max_tokens: int) -> pb.StreamGenerateRequest:
    return pb.StreamGenerateRequest(text=text, max_tokens=max_tokens, ignore_eos=True)


async def learn(
    stub: rpc.GenerationServiceAsyncStub, tell: Callable[[str], None], *, evicting: bool = True
) -> list[Known]:
    """Runs every request in calm and returns those whose output cannot depend on the batch.

    evicting: also requests with an eviction policy.
    """
    base = base_requests()
    if not evicting:
        base = {name: one for name, one in base.items() if not one.HasField("eviction_policy")}
    known = await _run(stub, base, tell)
    by_name = {one.name: one for one in known}
    more: dict[str, pb.StreamGenerateRequest] = {}
    for one in known:
        if one.name.startswith("session"):
            request = _copy(one.request)
            request.text += one.samples[0].text + chat("And why is that so?")
            more[f"{one.name}, second turn"] = request
    for name in ("short 2", "short 5", "long 0"):
        if name in by_name and (stop := _word_within(by_name[name].samples[0].text)):
            request = _copy(by_name[name].request)
            request.stop.append(stop)
            more[f"{name}, stop string"] = request
    known += await _run(stub, more, tell)
    # Greedy samples are equal.
    for name, count in (("short 3", 3), ("prefix 1.1", 2), ("long 1", 2), ("policy norm-sum", 2)):
        if name in by_name:
            request = _copy(by_name[name].request)
            request.n = count
            known.append(Known(f"{name}, {count} samples", request, by_name[name].samples * count))
    return known


def _copy(request: pb.StreamGenerateRequest) -> pb.StreamGenerateRequest:
    copy = pb.StreamGenerateRequest()
    copy.CopyFrom(request)
    return copy


def _word_within(text: str) -> str:
    """A word of the text's second half that does not occur before; empty if there is none."""
    words = text[len(text) // 2 :].split()[1:-1]
    return next((word for word in words if text.index(word) >= len(text) // 2), "")


async def _run(
    stub: rpc.GenerationServiceAsyncStub, requests: dict[str, pb.StreamGenerateRequest], tell: Callable[[str], None]
) -> list[Known]:
    free = asyncio.Semaphore(CALM_CONCURRENCY)

    async def one(name: str, request: pb.StreamGenerateRequest) -> Known | None:
        cold = _copy(request)
        cold.cache.no_read = cold.cache.no_store = True
        cold.sampling.num_logprobs = 2
        sample, margins = Sample(), []
        async with free:
            async for message in stub.StreamGenerate(cold, timeout=CALM_SECONDS):
                sample.take(message)
                margins += _margins(message.logprobs)
        if min(margins) < MARGIN:
            tell(f"not used: {name}, two tokens are as likely within {min(margins):.1e}")
            return None
        return Known(name, request, (sample,))

    found: Sequence[Known | None] = await asyncio.gather(*[one(*item) for item in requests.items()])
    return [one for one in found if one is not None]


def _margins(logprobs: Iterable[pb.TokenLogprobs]) -> list[float]:
    """The difference of log-probabilities between the best and the second best token."""
    return [one.top[0].logprob - one.top[1].logprob for one in logprobs]
