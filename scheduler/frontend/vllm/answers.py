"""Turns the output of a request into answers of vLLM's engine contract."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from protos.generation.v1 import generation_pb2 as pb
from protos.vllm import engine_pb2 as vllm
from scheduler.frontend.stop_strings import first
from scheduler.request import Request

_REASONS = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_ABORT: "abort",
}


@dataclass(slots=True)
class _Sample:
    """The output of a sample so far."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: vllm.OutputLogProbs | None = None
    # Whether the sample has had a chunk.
    is_begun: bool = False


class Answers:
    """The answers to one request: chunks and an end for each sample, or only the end."""

    def __init__(self, asked: vllm.GenerateRequest) -> None:
        params = asked.sampling_params
        self._streams = asked.stream
        self._has_top = params.logprobs > 0
        self._scores_prompt = params.HasField("prompt_logprobs")
        self._has_prompt_top = params.prompt_logprobs > 0
        self._stop = params.stop
        self._stop_token_ids = frozenset(params.stop_token_ids)
        # Samples by index.
        self._samples: defaultdict[int, _Sample] = defaultdict(_Sample)
        # Counts of the request, which its first sample has.
        self._prompt_tokens = self._cached_tokens = 0
        self._input: vllm.InputLogProbs | None = None
        self._prompt_ids: Sequence[int] = ()

    def accept(self, samples: Sequence[Request]) -> None:
        """Takes the samples of the request that will run."""
        self._prompt_ids = samples[0].prompt_ids

    def of(self, chunk: pb.StreamGenerateResponse) -> Iterator[vllm.GenerateResponse]:
        """Yields the answers to a chunk, which has a usage. No answer names the stop string that ended the sample."""
        sample = self._samples[chunk.sample_index]
        if not chunk.sample_index:
            # The first sample's first chunk comes before those of all other samples, which share its prompt.
            self._prompt_tokens, self._cached_tokens = chunk.usage.prompt_tokens, chunk.usage.cached_tokens
            if self._scores_prompt and self._input is None:
                self._input = self._prompt_logprobs(chunk)
        sample.token_ids += chunk.token_ids
        logprobs = self._logprobs(chunk) if chunk.logprobs else None
        if self._streams and chunk.token_ids:
            yield vllm.GenerateResponse(
                chunk=vllm.GenerateStreamChunk(
                    token_ids=chunk.token_ids,
                    prompt_tokens=self._prompt_tokens,
                    completion_tokens=len(chunk.token_ids),
                    cached_tokens=self._cached_tokens,
                    output_logprobs=logprobs,
                    input_logprobs=None if sample.is_begun else self._input,
                    index=chunk.sample_index,
                )
            )
            sample.is_begun = True
        elif logprobs is not None:
            sample.logprobs = sample.logprobs or vllm.OutputLogProbs()
            sample.logprobs.MergeFrom(logprobs)
        if chunk.finish_reason:
            yield self._complete(chunk.sample_index, _REASONS[chunk.finish_reason])

    def is_stopped_by_text(self, complete: vllm.GenerateComplete, eos_token_ids: tuple[int, ...]) -> bool:
        """Returns whether a stop string has ended the output. eos_token_ids: ids that end this output."""
        stopped = complete.finish_reason == "stop" and not complete.HasField("matched_stop")
        return stopped and bool(self._stop) and not set(complete.output_ids[-1:]) & set(eos_token_ids)

    def matched(self, text: str, least: int) -> str | None:
        """Returns the stop string that comes first in the text of an output and ends after `least` characters."""
        found = [(at, stop) for stop in self._stop if (at := first(stop, text, least)) >= 0]
        return min(found)[1] if found else None

    def _complete(self, index: int, reason: str) -> vllm.GenerateResponse:
        sample = self._samples[index]
        complete = vllm.GenerateComplete(
            output_ids=sample.token_ids,
            finish_reason=reason,
            prompt_tokens=self._prompt_tokens,
            completion_tokens=len(sample.token_ids),
            cached_tokens=self._cached_tokens,
            output_logprobs=sample.logprobs,
            input_logprobs=None if self._streams else self._input,
            index=index,
        )
        last = sample.token_ids[-1:]
        if reason == "stop" and self._stop_token_ids.issuperset(last) and last:
            [complete.matched_token_id] = last
        return vllm.GenerateResponse(complete=complete)

    def _logprobs(self, chunk: pb.StreamGenerateResponse) -> vllm.OutputLogProbs:
        found = vllm.OutputLogProbs(
            token_logprobs=[token.logprob for token in chunk.logprobs], token_ids=chunk.token_ids
        )
        if self._has_top:
            for token in chunk.logprobs:
                _add_top(found.top_logprobs.add(), token)
        return found

    def _prompt_logprobs(self, chunk: pb.StreamGenerateResponse) -> vllm.InputLogProbs:
        found = vllm.InputLogProbs(token_ids=self._prompt_ids)
        # Nothing precedes the first token.
        found.token_logprobs.add()
        if self._has_prompt_top:
            found.top_logprobs.add()
        for token in chunk.prompt_logprobs:
            found.token_logprobs.add(value=token.logprob)
            if self._has_prompt_top:
                _add_top(found.top_logprobs.add(), token)
        return found


def _add_top(top: vllm.TopLogProbs, token: pb.TokenLogprobs) -> None:
    top.values.extend(one.logprob for one in token.top)
    top.token_ids.extend(one.token_id for one in token.top)
