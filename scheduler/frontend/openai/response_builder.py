"""Builds responses and events of chat completions and of completions."""

from abc import ABC, abstractmethod
from array import array
from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate
from typing import Any, ClassVar

from protos.generation.v1 import generation_pb2 as pb
from scheduler.frontend.chat_output import OutputParser
from scheduler.frontend.model_info import ModelInfo
from scheduler.frontend.openai import cache_report, responses
from scheduler.frontend.tool_calls.parser import CallPiece
from scheduler.request import Request


def merged(pieces: Sequence[pb.StreamGenerateResponse]) -> pb.StreamGenerateResponse:
    """Merges the pieces of a sample's output, of which only the last has a usage."""
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
        self,
        model: ModelInfo,
        request_id: str,
        *,
        logprobs: bool,
        include_usage: bool,
        continuous_usage: bool = False,
        token_ids: bool = False,
        prompt_logprobs: bool = False,
        comparisons: Collection[str] = (),
    ) -> None:
        """include_usage: whether a stream ends with an event that has the usage.

        continuous_usage: whether each event has the usage so far. token_ids: whether to add the ids of prompts and
        output. prompt_logprobs: whether to add log-probabilities of prompts. comparisons: the answer's fields for a
        comparison.
        """
        self.include_usage = include_usage
        self.continuous_usage = continuous_usage
        self._model = model
        self._comparisons = comparisons
        self._logprobs = logprobs
        self._token_ids = token_ids
        self._prompt_logprobs = prompt_logprobs
        # By index of a sample: the ids of its prompt, and the index of the first sample with this prompt, whose first
        # piece has the prompt's log-probabilities.
        self._prompt_ids: dict[int, array[int]] = {}
        self._firsts: dict[int, int] = {}
        self._scored: dict[int, Sequence[pb.TokenLogprobs]] = {}
        # Number of samples of each prompt.
        self._samples = 1
        self.id = request_id
        self._created = responses.now()

    @abstractmethod
    def content(self, sample: pb.StreamGenerateResponse) -> dict[str, Any]:
        """Returns the text of a whole sample."""

    @abstractmethod
    def delta(self, piece: pb.StreamGenerateResponse, *, first: bool) -> dict[str, Any]:
        """Returns the text of a chunk. first: whether nothing of the sample was sent earlier."""

    @abstractmethod
    def has_text(self, delta: dict[str, Any]) -> bool:
        """Returns whether the text of a chunk adds something to the earlier text."""

    @abstractmethod
    def tokens(self, piece: pb.StreamGenerateResponse, offset: int) -> dict[str, Any]:
        """Returns the log-probabilities in the endpoint's shape. offset: characters of the sample before the piece."""

    def accept(self, first: int, samples: Sequence[Request]) -> None:
        """Notes that the samples of a prompt will run. first: index of the first sample."""
        self._prompt_ids |= {first + sample.sample_index: sample.prompt_ids for sample in samples}
        self._firsts |= {first + sample.sample_index: first for sample in samples}
        self._samples = len(samples)

    def begun(self, piece: pb.StreamGenerateResponse) -> pb.StreamGenerateResponse:
        """Converts the first piece of a sample, or the whole sample, to what the caller gets."""
        if piece.prompt_logprobs:
            self._scored[piece.sample_index] = piece.prompt_logprobs
        return piece

    def scored_prompt(self, index: int) -> responses.PromptLogprobs:
        """Returns log-probabilities of a prompt's tokens in vLLM's shape: by id, None for the first token."""
        token_ids, scored = self._prompt_ids[index], self._scored.get(self._firsts[index], ())
        # An aborted request may lack the log-probabilities of some tokens.
        pairs = zip(token_ids[1:], scored, strict=False)
        found = [responses.prompt_logprob(self._model, token_id, one) for token_id, one in pairs]
        return [None, *found, *[None] * (len(token_ids) - 1 - len(found))]

    @abstractmethod
    def add_prompt_ids(self, answer: dict[str, Any], token_ids: Sequence[int]) -> None:
        """Adds the ids of a prompt to an answer or event whose last choice is the prompt's sample."""

    @abstractmethod
    def add_prompt_logprobs(self, answer: dict[str, Any], scored: Sequence[object]) -> None:
        """Adds the log-probabilities of a prompt in the same way."""

    def whole(self, samples: Sequence[pb.StreamGenerateResponse]) -> dict[str, Any]:
        """Returns the response of a request that does not stream."""
        answer = self._answer(self.whole_object, [])
        for sample in samples:
            answer["choices"].append(self._choice(sample, self.content(sample)))
            self._add_prompt_ids(answer, sample)
        answer["usage"] = responses.usage([sample.usage for sample in samples])
        for sample in samples:
            self._add_outcomes(answer, sample)
        return answer

    def chunk(
        self, piece: pb.StreamGenerateResponse, usages: Iterable[pb.Usage], *, first: bool, offset: int
    ) -> dict[str, Any] | None:
        """Returns an event of a stream. usages: of all samples so far. offset: the sample's characters before `piece`.

        Returns None if there is nothing to send: a chunk may have tokens whose text is held back.
        """
        delta = self.delta(piece, first=first)
        if not (first or piece.finish_reason or self._logprobs or self._token_ids or self.has_text(delta)):
            return None
        choice = self._choice(piece, delta, offset)
        answer = self._answer(self.chunk_object, [choice])
        if first:
            self._add_prompt_ids(answer, piece)
        if self.continuous_usage:
            answer["usage"] = responses.usage(usages)
        elif self.include_usage:
            answer["usage"] = None
        if piece.finish_reason:
            self._add_outcomes(answer, piece)
        return answer

    def _add_outcomes(self, answer: dict[str, Any], sample: pb.StreamGenerateResponse) -> None:
        responses.outcomes(answer, sample.usage)
        if sample.sample_index == 0:
            cache_report.add(answer, sample.usage, self._comparisons, self._model.layout.block_size)

    def usage_chunk(self, usages: Iterable[pb.Usage]) -> dict[str, Any]:
        """Returns the event with the usage, which only [DONE] follows."""
        answer = self._answer(self.chunk_object, [])
        answer["usage"] = responses.usage(usages)
        return answer

    def finish_reason(self, piece: pb.StreamGenerateResponse) -> responses.FinishReason | None:
        """Returns why a sample ended, once its text has been read; None if it has not ended."""
        return responses.finish_reason(piece.finish_reason)

    def _add_prompt_ids(self, answer: dict[str, Any], piece: pb.StreamGenerateResponse) -> None:
        if self._token_ids:
            self.add_prompt_ids(answer, self._prompt_ids[piece.sample_index].tolist())
        if self._prompt_logprobs:
            self.add_prompt_logprobs(answer, self.scored_prompt(piece.sample_index))

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
            "finish_reason": self.finish_reason(piece),
        }
        if self._token_ids:
            choice["token_ids"] = list(piece.token_ids)
        if piece.finish_reason and piece.usage.HasField("eviction"):
            choice["eviction"] = responses.eviction(piece.usage.eviction)
        return choice

    def _alternatives(self, logprobs: pb.TokenLogprobs) -> list[responses.Alternative]:
        return [responses.alternative(self._model, top.token_id, top.logprob) for top in logprobs.top]


class ChatResponseBuilder(ResponseBuilder):
    """/v1/chat/completions."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, *args: Any, include_reasoning: bool = True, **options: Any) -> None:
        """include_reasoning: whether answers have the reasoning, if the model's form of reasoning is known."""
        super().__init__(*args, **options)
        self._include_reasoning = include_reasoning
        # The parser of each sample, and the number of calls that each sample has begun.
        self._parsers: dict[int, OutputParser] = {}
        self._num_calls: dict[int, int] = {}

    def accept(self, first: int, samples: Sequence[Request]) -> None:
        super().accept(first, samples)
        self._parsers |= {first + sample.sample_index: self._model.output_parser(sample) for sample in samples}

    def content(self, sample: pb.StreamGenerateResponse) -> dict[str, Any]:
        message = self._fields(sample)
        calls = [{name: value for name, value in call.items() if name != "index"} for call in message["tool_calls"]]
        fields = {name: value for name, value in message.items() if value and name != "tool_calls"}
        said = {"role": "assistant", "content": None if fields or calls else "", **fields}
        return {"message": said | ({"tool_calls": calls} if calls else {})}

    def delta(self, piece: pb.StreamGenerateResponse, *, first: bool) -> dict[str, Any]:
        role = {"role": "assistant"} if first else {}
        fields = {name: value for name, value in self._fields(piece).items() if value}
        return {"delta": {**role, **(fields or {"content": ""})}}

    def has_text(self, delta: dict[str, Any]) -> bool:
        return any(value for name, value in delta["delta"].items() if name != "role")

    def finish_reason(self, piece: pb.StreamGenerateResponse) -> responses.FinishReason | None:
        begun = self._num_calls.get(piece.sample_index, 0)
        # A caller cannot carry out a call that broke off.
        if piece.finish_reason == pb.FINISH_REASON_STOP and begun == self._parsers[piece.sample_index].num_complete > 0:
            return "tool_calls"
        return super().finish_reason(piece)

    def _fields(self, piece: pb.StreamGenerateResponse) -> dict[str, Any]:
        """Returns what a piece of a sample adds to its message."""
        added = self._parsers[piece.sample_index].push(piece.text, last=bool(piece.finish_reason))
        for call in added.calls:
            self._num_calls[piece.sample_index] = call.index + 1
        reasoning = added.reasoning if self._include_reasoning else ""
        return {
            "content": added.content,
            "reasoning_content": reasoning,
            "reasoning": reasoning,
            "tool_calls": [self._call(call) for call in added.calls],
        }

    def _call(self, piece: CallPiece) -> dict[str, Any]:
        """Returns a piece of a call; the first piece has the call's name and an id."""
        function = {"arguments": piece.arguments}
        if not piece.name:
            return {"index": piece.index, "function": function}
        call_id = self._model.output_forms.new_call_id()
        return {"index": piece.index, "id": call_id, "type": "function", "function": {"name": piece.name, **function}}

    def add_prompt_ids(self, answer: dict[str, Any], token_ids: Sequence[int]) -> None:
        # A conversation is the only prompt of its request.
        answer["prompt_token_ids"] = token_ids

    def add_prompt_logprobs(self, answer: dict[str, Any], scored: Sequence[object]) -> None:
        answer["prompt_logprobs"] = scored

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

    def __init__(
        self, *args: Any, echoed: Sequence[str | Sequence[int]] = (), is_truncated: bool = False, **options: Any
    ) -> None:
        """echoed: the prompts, if each sample's text begins with its prompt. is_truncated: whether these may be cut."""
        super().__init__(*args, **options)
        self._echoed = echoed
        self._is_truncated = is_truncated
        # Prompts of samples whose first log-probabilities have yet to be sent.
        self._leading: dict[int, tuple[Sequence[int], Sequence[pb.TokenLogprobs]]] = {}

    def begun(self, piece: pb.StreamGenerateResponse) -> pb.StreamGenerateResponse:
        piece = super().begun(piece)
        if not self._echoed:
            return piece
        index = piece.sample_index
        first, token_ids = self._firsts[index], self._prompt_ids[index]
        # Every prompt has the same number of samples.
        prompt = token_ids.tolist() if self._is_truncated else self._echoed[first // self._samples]
        text = prompt if isinstance(prompt, str) else self._model.tokenizer.decode(prompt, skip_special_tokens=False)
        self._leading[index] = token_ids, self._scored.get(first, ())
        begun = pb.StreamGenerateResponse()
        begun.CopyFrom(piece)
        begun.text = text + piece.text
        return begun

    def content(self, sample: pb.StreamGenerateResponse) -> dict[str, Any]:
        return {"text": sample.text}

    def delta(self, piece: pb.StreamGenerateResponse, *, first: bool) -> dict[str, Any]:  # noqa: ARG002
        return self.content(piece)

    def has_text(self, delta: dict[str, Any]) -> bool:
        return bool(delta["text"])

    def add_prompt_ids(self, answer: dict[str, Any], token_ids: Sequence[int]) -> None:
        answer["choices"][-1]["prompt_token_ids"] = token_ids

    def add_prompt_logprobs(self, answer: dict[str, Any], scored: Sequence[object]) -> None:
        answer["choices"][-1]["prompt_logprobs"] = scored

    def tokens(self, piece: pb.StreamGenerateResponse, offset: int) -> dict[str, Any]:
        leading, scored = self._leading.pop(piece.sample_index, ((), ()))
        # The first token of a prompt has no log-probability, because nothing precedes it. An aborted request may also
        # lack the log-probabilities of the last tokens.
        of_prompt = [None, *scored, *[None] * len(leading)][: len(leading)]
        pairs = list(zip([*leading, *piece.token_ids], [*of_prompt, *piece.logprobs], strict=True))
        texts = [self._model.token_text(token_id) for token_id, _ in pairs]
        return {
            "tokens": texts,
            "token_logprobs": [
                None if item is None else max(item.logprob, responses.LEAST_LOGPROB) for _, item in pairs
            ],
            "top_logprobs": [None if item is None else _by_text(self._alternatives(item)) for _, item in pairs],
            "text_offset": list(accumulate(map(len, texts[:-1]), initial=offset)) if texts else [],
        }


def _by_text(alternatives: Iterable[responses.Alternative]) -> dict[str, float]:
    """Returns log-probabilities by text. Of several tokens with the same text, the likeliest counts."""
    found: dict[str, float] = {}
    for one in alternatives:
        found[one["token"]] = max(one["logprob"], found.get(one["token"], one["logprob"]))
    return found
