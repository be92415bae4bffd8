"""Builds responses and events of chat completions and of completions."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, ClassVar

from protos.generation.v1 import generation_pb2 as pb
from scheduler.frontend.model_info import ModelInfo
from scheduler.frontend.openai import responses


def merged(pieces: Sequence[pb.StreamGenerateResponse]) -> pb.StreamGenerateResponse:
    """The whole output of a sample, of which only the last piece has a usage."""
    whole = pb.StreamGenerateResponse()
    for piece in pieces:
        whole.MergeFrom(piece)
    whole.text = "".join(piece.text for piece in pieces)
    return whole


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
    def content(self, text: str) -> dict[str, Any]:
        """The text of a whole sample."""

    @abstractmethod
    def delta(self, text: str, *, first: bool) -> dict[str, Any]:
        """The text of a chunk. first: nothing of the sample was sent before."""

    @abstractmethod
    def tokens(self, piece: pb.StreamGenerateResponse, offset: int) -> dict[str, Any]:
        """The log-probabilities in the endpoint's shape. offset: characters of the sample before the piece."""

    def whole(self, samples: Sequence[pb.StreamGenerateResponse]) -> dict[str, Any]:
        """The response of a request that does not stream."""
        choices = [self._choice(sample, self.content(sample.text)) for sample in samples]
        answer = self._answer(self.whole_object, choices)
        answer["usage"] = responses.usage([sample.usage for sample in samples])
        for sample in samples:
            responses.outcomes(answer, sample.usage)
        return answer

    def chunk(
        self, piece: pb.StreamGenerateResponse, usages: Iterable[pb.Usage], *, first: bool, offset: int
    ) -> dict[str, Any]:
        """An event of a stream. usages: of all samples so far. offset: characters of the sample before it."""
        choice = self._choice(piece, self.delta(piece.text, first=first), offset)
        answer = self._answer(self.chunk_object, [choice])
        if self.continuous_usage:
            answer["usage"] = responses.usage(usages)
        elif self.include_usage:
            answer["usage"] = None
        if piece.finish_reason:
            responses.outcomes(answer, piece.usage)
        return answer

    def usage_chunk(self, usages: Iterable[pb.Usage]) -> dict[str, Any]:
        """The last event of a stream."""
        answer = self._answer(self.chunk_object, [])
        answer["usage"] = responses.usage(usages)
        return answer

    def says_something(self, piece: pb.StreamGenerateResponse) -> bool:
        """Whether a chunk deserves an event: a chunk may have tokens whose text is held back."""
        return bool(piece.finish_reason or self._logprobs or piece.text)

    def _answer(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self._created,
            "model": self._model.name,
            "choices": choices,
        }

    def _choice(self, piece: pb.StreamGenerateResponse, content: dict[str, Any], offset: int = 0) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": piece.sample_index,
            **content,
            "logprobs": self.tokens(piece, offset) if self._logprobs else None,
            "finish_reason": responses.finish_reason(piece.finish_reason),
        }
        if piece.finish_reason and piece.usage.HasField("eviction"):
            choice["eviction"] = responses.eviction(piece.usage.eviction)
        return choice

    def _alternatives(self, logprobs: pb.TokenLogprobs) -> list[responses.Alternative]:
        return [responses.alternative(self._model, top.token_id, top.logprob) for top in logprobs.top]


class ChatResponseBuilder(ResponseBuilder):
    """/v1/chat/completions."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def content(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text}}

    def delta(self, text: str, *, first: bool) -> dict[str, Any]:
        role = {"role": "assistant"} if first else {}
        return {"delta": {**role, "content": text}}

    def tokens(self, piece: pb.StreamGenerateResponse, offset: int) -> dict[str, Any]:  # noqa: ARG002
        pairs = zip(piece.token_ids, piece.logprobs, strict=True)
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

    def content(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def delta(self, text: str, *, first: bool) -> dict[str, Any]:  # noqa: ARG002
        return self.content(text)

    def tokens(self, piece: pb.StreamGenerateResponse, offset: int) -> dict[str, Any]:
        pairs = zip(piece.token_ids, piece.logprobs, strict=True)
        chosen = [responses.alternative(self._model, token_id, item.logprob) for token_id, item in pairs]
        lengths = (len(item["token"]) for item in chosen[:-1])
        return {
            "tokens": [item["token"] for item in chosen],
            "token_logprobs": [item["logprob"] for item in chosen],
            "top_logprobs": [
                {top["token"]: top["logprob"] for top in self._alternatives(logprobs)} for logprobs in piece.logprobs
            ],
            "text_offset": list(accumulate(lengths, initial=offset)) if chosen else [],
        }
