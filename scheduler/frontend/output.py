"""The output of a request: text, stop strings, usage, and the stream to its caller. On the asyncio loop."""

import asyncio
import time
from collections import deque
from collections.abc import Sequence as Seq

from protos.execution.v1 import execution_pb2
from protos.generation.v1 import generation_pb2 as pb
from protos.kvcommon.v1 import kvcommon_pb2 as common
from protos.rpc.errors import ServiceError
from scheduler.bridge import TokenMeta
from scheduler.frontend.detokenizer import Detokenizer
from scheduler.frontend.model_info import ModelInfo
from scheduler.frontend.stop_strings import StopStrings
from scheduler.request import Request

# The pause between two messages of a stream is at least these seconds times the number of streams. Few streams get
# every token separately; very many streams get several tokens at once, so that writing leaves time for other work.
MESSAGE_SECONDS = 2.5e-4


class _NoText:
    """Replaces a detokenizer for output without text."""

    def push(self, _token_ids: Seq[int]) -> str:
        return ""

    def flush(self) -> str:
        return ""


class Generation:
    """One sample's output. Times are in seconds of the monotonic clock; None before the event."""

    def __init__(
        self, request: Request, model: ModelInfo | None, ready: asyncio.Event, *, is_gathered: bool = False
    ) -> None:
        """model: turns tokens into text; None for output without text. ready: set when there is output, or an error.

        is_gathered: whether many requests' output is taken together, so that every token is worth a notification.
        """
        self.request = request
        self.is_gathered = is_gathered
        # The request's other samples, which share the prompt once this sample has computed it.
        self.followers: Seq[Request] = ()
        # If text can end the output, every token has to become text at once.
        self.has_stop_strings = bool(request.stop or _ends_behind_call(request))
        self.finished = False
        # Whether the engine has accepted the sample, as far as is known.
        self.was_taken = True
        # Whether the sample has had blocks: from then on, it is known how much of its prompt is cached.
        self.admitted = False
        # Version of the weights at the sample's admission; None if the version is not known.
        self.weight_version: str | None = None
        # Unspecified even after an error.
        self.finish_reason = pb.FINISH_REASON_UNSPECIFIED
        # What is counted while the sample runs. Only the first sample counts the prompt.
        self.counted = pb.Usage(prompt_tokens=0 if request.sample_index else len(request.prompt_ids))
        # The eviction policy as the cache manager resolved it; None if no token is evicted.
        self.policy: common.EvictionPolicy | None = None
        # The most tokens kept at once, over all attempts.
        self.most_kept = 0
        self._evicted_tokens = 0
        # Shares of the scores that were kept, one per eviction.
        self._masses: list[float] = []
        self.started_at: float | None = None
        self.first_token_at: float | None = None
        self.last_token_at = request.arrived_at
        self._detokenizer = (
            _NoText()
            if model is None
            else Detokenizer(model.tokenizer, request.prompt_ids, keep_special=request.keep_special_tokens)
        )
        self._stop_strings = StopStrings(request.stop, included=request.include_stop_text)
        # Finds the call that ends the output.
        self._first_call = model.output_parser(request) if model and _ends_behind_call(request) else None
        # Number of tokens that have become text or end the output. The other ids are pending: without stop strings,
        # tokens become text only when they are sent.
        self._num_detokenized = 0
        # Number of prompt tokens, without the first, whose log-probabilities are known.
        self._scored = 0
        self._pending: list[int] = []
        self._chunk = self._empty_chunk()
        self._error: ServiceError | None = None
        self._ready = ready

    @property
    def output_tokens(self) -> int:
        return self._num_detokenized + len(self._pending)

    @property
    def has_output(self) -> bool:
        # A sample that is aborted may end without a token.
        return bool(self._pending or self._chunk.token_ids or self._chunk.finish_reason)

    def feed(self, token_id: int, now: float, meta: TokenMeta | None = None) -> None:
        """Takes the next token, which prewarming drops, without `notify`. `finished` then says if the output ended."""
        if self.request.is_prewarm:
            self.first_token_at = self.last_token_at = now
            self._finish(pb.FINISH_REASON_LENGTH)
            return
        self._pending.append(token_id)
        self.last_token_at = now
        if meta is not None:
            self.first_token_at = self.first_token_at or now
            if meta.logprobs is not None:
                self._chunk.logprobs.append(_logprobs(meta.logprobs))
            if meta.finished:
                self._end(pb.FINISH_REASON_STOP if meta.stopped else pb.FINISH_REASON_LENGTH)
                return
        if self.has_stop_strings:
            self._detokenize()

    def score_prompt(self, logprobs: Seq[execution_pb2.TokenLogprobs]) -> None:
        """Adds log-probabilities of prompt tokens; ignores those that are computed again after a preemption."""
        for one in logprobs:
            if one.index == self._scored + 1:
                self._scored = one.index
                self._chunk.prompt_logprobs.append(_logprobs(one))

    def evict(self, tokens: int, mass: float) -> None:
        """Counts an eviction. mass: share of the scores that was kept, negative without scores."""
        self._evicted_tokens += tokens
        if mass >= 0:
            self._masses.append(mass)

    def notify(self) -> None:
        self._ready.set()

    def abort(self) -> None:
        """Ends the output with the tokens so far, and notifies. Held-back text may still complete a stop string."""
        self._end(pb.FINISH_REASON_ABORT)
        self._ready.set()

    def fail(self, error: ServiceError) -> None:
        """Ends the stream with an error; does nothing if the output has ended, whose rest can still be taken."""
        if self.finished:
            return
        self._error = error
        self.finished = True
        self._ready.set()

    def take(self) -> pb.StreamGenerateResponse | None:
        """Returns new output, if any, without usage; the last chunk has a finish reason. Raises the error of `fail`."""
        if self._error is not None:
            raise self._error
        if not self.has_output:
            return None
        self._detokenize()
        chunk, self._chunk = self._chunk, self._empty_chunk()
        return chunk

    def _empty_chunk(self) -> pb.StreamGenerateResponse:
        return pb.StreamGenerateResponse(request_id=self.request.request_id, sample_index=self.request.sample_index)

    def usage(self) -> pb.Usage:
        usage = pb.Usage(output_tokens=self.output_tokens)
        usage.MergeFrom(self.counted)
        if self.policy is not None:
            usage.eviction.CopyFrom(self._eviction(self.policy))
        times = (
            (usage.queue_time, self.started_at),
            (usage.time_to_first_token, self.first_token_at),
            (usage.total_time, self.last_token_at),
        )
        for duration, at in times:
            if at is not None:
                duration.FromNanoseconds(int((at - self.request.arrived_at) * 1e9))
        return usage

    def _eviction(self, policy: common.EvictionPolicy) -> pb.EvictionReport:
        report = pb.EvictionReport(
            policy=policy,
            evicted_tokens=self._evicted_tokens,
            tainted=self._evicted_tokens > 0,
            peak_cache_tokens=self.most_kept,
        )
        if self._masses:
            report.kept_mass = sum(self._masses) / len(self._masses)
        return report

    def _detokenize(self, *, stopped: bool = False) -> bool:
        """Turns pending tokens into text; returns whether a stop string or the only wanted call has ended the output.

        stopped: whether the last token stopped the output; such a token becomes text only if the request says so.
        """
        token_ids, self._pending = self._pending, []
        self._chunk.token_ids.extend(token_ids)
        self._num_detokenized += len(token_ids)
        text_ids = token_ids[:-1] if stopped and not self.request.include_stop_text else token_ids
        return self._push(self._detokenizer.push(text_ids)) if text_ids else False

    def _push(self, text: str) -> bool:
        may_end = self._num_detokenized > self.request.sampling.min_tokens
        text, stopped = self._stop_strings.push(text, may_end=may_end)
        self._chunk.text += text
        if self._first_call is not None:
            self._first_call.push(text)
            stopped = stopped or self._first_call.num_complete > 0
        if stopped:
            self._finish(pb.FINISH_REASON_STOP)
        return stopped

    def _end(self, reason: pb.FinishReason) -> None:
        """Adds held-back text and ends the output for `reason`, unless a stop string or call in that text ends it."""
        stopped = reason == pb.FINISH_REASON_STOP
        if not self._detokenize(stopped=stopped) and not self._push(self._detokenizer.flush()):
            self._chunk.text += self._stop_strings.flush()
            self._finish(reason)

    def _finish(self, reason: pb.FinishReason) -> None:
        self._chunk.finish_reason = self.finish_reason = reason
        self.finished = True


def _logprobs(found: execution_pb2.TokenLogprobs) -> pb.TokenLogprobs:
    top = zip(found.top_token_ids, found.top_logprobs, strict=True)
    return pb.TokenLogprobs(
        logprob=found.logprob,
        top=[pb.TokenLogprob(token_id=token, logprob=value) for token, value in top],
        rank=found.rank,
    )


def _ends_behind_call(request: Request) -> bool:
    # A required call is already forced to be a single call.
    return request.tools.single and not request.tools.is_required


class Stream:
    """The outputs of all samples of one request."""

    def __init__(self, samples: Seq[Request], model: ModelInfo | None, ready: asyncio.Event | None = None) -> None:
        """Arguments as for Generation. ready: shared by several streams if their output is taken together."""
        self._ready = ready or asyncio.Event()
        gathered = ready is not None
        self.generations = [Generation(request, model, self._ready, is_gathered=gathered) for request in samples]
        self.generations[0].followers = samples[1:]

    @property
    def was_taken(self) -> bool:
        """Whether an engine has accepted the request."""
        return self.generations[0].was_taken

    @property
    def is_complete(self) -> bool:
        """Whether all outputs have ended, none of them in an error."""
        return all(generation.finish_reason for generation in self.generations)

    @property
    def finished(self) -> bool:
        """Whether all outputs have ended, even if their last chunks have yet to be taken."""
        return all(generation.finished for generation in self.generations)

    async def next(self) -> list[tuple[Generation, pb.StreamGenerateResponse]]:
        """Waits for output; returns the new chunks, possibly none. Raises the error of a sample that failed."""
        await self._ready.wait()
        self._ready.clear()
        taken = [(generation, generation.take()) for generation in self.generations]
        return [(generation, chunk) for generation, chunk in taken if chunk is not None]


class StreamFlusher:
    """Notifies streams of their tokens in turn, only a few per step if there are many: the next step must not wait."""

    def __init__(self, message_seconds: float | None = None) -> None:
        """message_seconds: replaces MESSAGE_SECONDS if no step loop shares the interpreter."""
        self._message_seconds = MESSAGE_SECONDS if message_seconds is None else message_seconds
        # The first is the next in turn.
        self._order: deque[Generation] = deque()
        # Time of the last notifications, later moved by the duration of the writes that they caused: otherwise, a late
        # loop would write more and fall further behind.
        self._since = 0.0
        self._began = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def add(self, generation: Generation) -> None:
        """Notifies the generation from now on."""
        self._order.append(generation)

    def remove(self, generation: Generation) -> None:
        self._order.remove(generation)

    def flush(self) -> None:
        """Notifies as many generations, in turn, as are due. A timer notifies all of them if no other flush comes."""
        due = int((time.monotonic() - self._since) / self._message_seconds)
        if due:
            self._notify(due)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        left = len(self._order)
        if due < left:
            self._timer = asyncio.get_running_loop().call_later(left * self._message_seconds, self._notify, left)

    def _notify(self, count: int) -> None:
        loop = asyncio.get_running_loop()
        self._since = time.monotonic()
        # The two callbacks run before and after the tasks that these notifications wake up.
        loop.call_soon(self._begin)
        for _ in range(min(count, len(self._order))):
            generation = self._order[0]
            self._order.rotate(-1)
            if generation.has_output:
                generation.notify()
        loop.call_soon(self._end)

    def _begin(self) -> None:
        self._began = time.monotonic()

    def _end(self) -> None:
        self._since += time.monotonic() - self._began
