"""Builds responses and events of chat completions and of completions."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from protos.generation.v1 import generation_pb2 as pb
from scheduler.frontend.model_info import ModelInfo
from scheduler.frontend.openai import responses


@dataclass
class Sample:
    """One sample's output so far, or a chunk of it. offset: characters before it."""

    index: int = 0
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[pb.TokenLogprobs] = field(default_factory=list)
    finish_reason: int = pb.FINISH_REASON_UNSPECIFIED
    usage: pb.Usage = field(default_factory=pb.Usage)
    offset: int = 0

    def add(self, piece: pb.StreamGenerateResponse) -> None:
        """Appends a chunk."""
        self.index = piece.sample_index
        self.text.append(piece.text)
        self.token_ids += piece.token_ids
        self.logprobs += piece.logprobs
        if piece.finish_reason:
            self.finish_reason, self.usage = piece.finish_reason, piece.usage


class ResponseBuilder(ABC):
    """Builds responses and events from samples."""

    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(
        self, model: ModelInfo, request_id: str, *, logprobs: bool, include_usage: bool, continuous_usage: bool = False
    ) -> None:
        """include_usage: whether a stream ends with an event that has the usage.

        continuous_usage: whether each event has the usage so far.
        """
        self.include_usage = include_usage
        self.continuous_usage = continuous_usage
        self._model = model
        self._logprobs = logprobs
        self.id = request_id
        self._created = responses.now()

    @abstractmethod
    def choice(self, sample: Sample) -> dict[str, Any]:
        """The choice of a whole sample."""

    @abstractmethod
    def chunk_choice(self, sample: Sample, *, first: bool) -> dict[str, Any]:
        """The choice of a chunk. first: nothing of the sample was sent before."""

    @abstractmethod
    def tokens(self, sample: Sample) -> dict[str, Any]:
        """Its log-probabilities, in the endpoint's shape."""

    def whole(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """The response of a request that does not stream."""
        answer = self._answer(self.whole_object, [self.choice(sample) for sample in samples])
        answer["usage"] = responses.usage([sample.usage for sample in samples])
        for sample in samples:
            responses.outcomes(answer, sample.usage)
        return answer

    def chunk(self, sample: Sample, usages: Iterable[pb.Usage], *, first: bool) -> dict[str, Any]:
        """An event of a stream. usages: of all samples so far."""
        answer = self._answer(self.chunk_object, [self.chunk_choice(sample, first=first)])
        if self.continuous_usage:
            answer["usage"] = responses.usage(usages)
        elif self.include_usage:
            answer["usage"] = None
        responses.outcomes(answer, sample.usage)
        return answer

    def usage_chunk(self, usages: Iterable[pb.Usage]) -> dict[str, Any]:
        """The last event of a stream."""
        answer = self._answer(self.chunk_object, [])
        answer["usage"] = responses.usage(usages)
        return answer

    def says_something(self, sample: Sample) -> bool:
        """Whether a chunk deserves an event: a chunk may have tokens whose text is held back."""
        return bool(sample.finish_reason or self._logprobs or any(sample.text))

    def _answer(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self._created,
            "model": self._model.name,
            "choices": choices,
        }

    def _common(self, sample: Sample) -> dict[str, Any]:
        common: dict[str, Any] = {
            "logprobs": self.tokens(sample) if self._logprobs else None,
            "finish_reason": responses.finish_reason(sample.finish_reason),
        }
        if sample.usage.HasField("eviction"):
            common["eviction"] = responses.eviction(sample.usage.eviction)
        return common

    def _alternatives(self, logprobs: pb.TokenLogprobs) -> list[responses.Alternative]:
        return [responses.alternative(self._model, top.token_id, top.logprob) for top in logprobs.top]


class ChatResponseBuilder(ResponseBuilder):
    """/v1/chat/completions."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def choice(self, sample: Sample) -> dict[str, Any]:
        message = {"role": "assistant", "content": "".join(sample.text)}
        return {"index": sample.index, "message": message, **self._common(sample)}

    def chunk_choice(self, sample: Sample, *, first: bool) -> dict[str, Any]:
        delta = {"role": "assistant"} if first else {}
        return {
            "index": sample.index,
            "delta": {**delta, "content": "".join(sample.text)},
            **self._common(sample),
        }

    def tokens(self, sample: Sample) -> dict[str, Any]:
        pairs = zip(sample.token_ids, sample.logprobs, strict=True)
        content = [
            {
                **responses.alternative(self._model, token_id, logprobs.logprob),
                "top_logprobs": self._alternatives(logprobs),
            }
            for token_id, logprobs in pairs
        ]
        return {"content": content}


class CompletionResponseBuilder(ResponseBuilder):
    """/v1/completions."""

    whole_object = chunk_object = "text_completion"

    def choice(self, sample: Sample) -> dict[str, Any]:
        return {"index": sample.index, "text": "".join(sample.text), **self._common(sample)}

    def chunk_choice(self, sample: Sample, *, first: bool) -> dict[str, Any]:  # noqa: ARG002
        return self.choice(sample)

    def tokens(self, sample: Sample) -> dict[str, Any]:
        pairs = zip(sample.token_ids, sample.logprobs, strict=True)
        chosen = [responses.alternative(self._model, token_id, item.logprob) for token_id, item in pairs]
        offsets, at = [], sample.offset
        for item in chosen:
            offsets.append(at)
            at += len(item["token"])
        return {
            "tokens": [item["token"] for item in chosen],
            "token_logprobs": [item["logprob"] for item in chosen],
            "top_logprobs": [
                {top["token"]: top["logprob"] for top in self._alternatives(logprobs)} for logprobs in sample.logprobs
            ],
            "text_offset": offsets,
        }
