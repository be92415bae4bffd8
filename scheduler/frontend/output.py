"""The output of a request: text, stop strings, usage, and the stream to its caller. On the asyncio loop."""

import asyncio
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from protos.execution.v1 import execution_pb2
from protos.generation.v1 import generation_pb2 as pb
from protos.kvcache.v1 import kvcache_pb2
from protos.rpc.errors import ServiceError
from scheduler.bridge import TokenMeta
from scheduler.frontend.detokenizer import Detokenizer
from scheduler.frontend.stop_strings import StopStrings
from scheduler.frontend.tokenizer import Model
from scheduler.request import Request


@dataclass(slots=True)
class Chunk:
    """Output since the caller last looked."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[execution_pb2.TokenLogprobs] = field(default_factory=list)
    finish: pb.FinishReason = pb.FINISH_REASON_UNSPECIFIED


class Generation:
    """One sample's output. Times are in seconds of one monotonic clock; None while the thing has not happened."""

    def __init__(self, request: Request, model: Model, news: asyncio.Event) -> None:
        """news: set whenever there is something to take."""
        self.request = request
        # Samples that share the prompt once this one has computed it.
        self.followers: Seq[Request] = ()
        # Whether the output ends with certain strings, so that every token has to become text at once.
        self.stops = bool(request.stop)
        self.finished = False
        # Unspecified also when it failed.
        self.finish_reason = pb.FINISH_REASON_UNSPECIFIED
        self.preemptions = 0
        # As of the attempt that began first.
        self.cached_tokens = 0
        self.host_tokens = 0
        self.disk_tokens = 0
        # What the cache manager said to the wishes and hints when it admitted that one.
        self.receipts: tuple[kvcache_pb2.RetentionReceipt, ...] = ()
        self.hint_answers: tuple[kvcache_pb2.HintAnswer, ...] = ()
        # As the cache manager resolved it; None when nothing is evicted.
        self.policy: kvcache_pb2.EvictionPolicy | None = None
        # Tokens, in whichever attempt there were most.
        self.most_kept = 0
        self._evicted_tokens = 0
        # Shares of the scores that stayed, one per eviction.
        self._masses: list[float] = []
        self.started_at: float | None = None
        self.first_token_at: float | None = None
        self.last_token_at = request.arrived_at
        self._detokenizer = Detokenizer(model.tokenizer, request.prompt_ids)
        self._stops = StopStrings(request.stop)
        # Tokens that are text, or end it, and those that are not yet: without stop strings nobody asks for their text
        # before it is sent.
        self._told = 0
        self._untold: list[int] = []
        self._chunk = Chunk()
        self._error: ServiceError | None = None
        self._news = news

    @property
    def output_tokens(self) -> int:
        """Tokens of the output so far."""
        return self._told + len(self._untold)

    @property
    def has_news(self) -> bool:
        """Whether there are tokens to take."""
        return bool(self._untold or self._chunk.token_ids)

    def feed(self, token_id: int, now: float, meta: TokenMeta | None = None) -> None:
        """Takes a new token; `announce` tells the caller's side of it.

        Afterwards `finished` says whether the output has ended, here or by a stop string.
        """
        self._untold.append(token_id)
        self.last_token_at = now
        if meta is not None:
            self._take_meta(meta, now)
        elif self.stops:
            self._tell()

    def _take_meta(self, meta: TokenMeta, now: float) -> None:
        self.first_token_at = self.first_token_at or now
        if meta.logprobs is not None:
            self._chunk.logprobs.append(meta.logprobs)
        if meta.finished:
            self._end(stopped=meta.stopped)
        elif self.stops:
            self._tell()

    def evict(self, tokens: int, mass: float) -> None:
        """Notes an eviction. mass: share of the scores that stayed, negative without scores."""
        self._evicted_tokens += tokens
        if mass >= 0:
            self._masses.append(mass)

    def announce(self) -> None:
        """There is something to take."""
        self._news.set()

    def fail(self, error: ServiceError) -> None:
        """Ends the stream with an error."""
        self._error = error
        self.finished = True
        self._news.set()

    def take(self) -> Chunk | None:
        """New output, if there is any; the last chunk has `finish` set. Raises the error that `fail` was given."""
        if self._error is not None:
            raise self._error
        if not self.has_news:
            return None
        self._tell()
        chunk, self._chunk = self._chunk, Chunk()
        return chunk

    def usage(self) -> pb.Usage:
        """What the sample used; the prompt is the first one's."""
        usage = pb.Usage(
            prompt_tokens=0 if self.request.sample_index else len(self.request.prompt_ids),
            cached_tokens=self.cached_tokens,
            host_tokens=self.host_tokens,
            disk_tokens=self.disk_tokens,
            output_tokens=self.output_tokens,
            preemptions=self.preemptions,
            # The same messages in the terms of callers.
            retention_receipts=[pb.RetentionReceipt.FromString(one.SerializeToString()) for one in self.receipts],
            hint_answers=[pb.HintAnswer.FromString(one.SerializeToString()) for one in self.hint_answers],
        )
        if self.policy is not None:
            usage.eviction.CopyFrom(self._eviction(self.policy))
        arrived = self.request.arrived_at
        times = (
            (usage.queue_time, self.started_at),
            (usage.time_to_first_token, self.first_token_at),
            (usage.total_time, self.last_token_at),
        )
        for duration, at in times:
            if at is not None:
                duration.FromNanoseconds(int((at - arrived) * 1e9))
        return usage

    def _eviction(self, policy: kvcache_pb2.EvictionPolicy) -> pb.EvictionReport:
        report = pb.EvictionReport(
            policy=pb.EvictionPolicy.FromString(policy.SerializeToString()),
            evicted_tokens=self._evicted_tokens,
            tainted=self._evicted_tokens > 0,
            most_tokens=self.most_kept,
        )
        if self._masses:
            report.kept_mass = sum(self._masses) / len(self._masses)
        return report

    def _tell(self, *, stopped: bool = False) -> bool:
        """Turns tokens into text, but the last one if it `stopped` the output; whether a stop string ends it."""
        token_ids, self._untold = self._untold, []
        self._chunk.token_ids += token_ids
        self._told += len(token_ids)
        text_ids = token_ids[:-1] if stopped else token_ids
        return self._push(self._detokenizer.push(text_ids)) if text_ids else False

    def _push(self, text: str) -> bool:
        text, stopped = self._stops.push(text)
        self._chunk.text += text
        if stopped:
            self._finish(pb.FINISH_REASON_STOP)
        return stopped

    def _end(self, *, stopped: bool) -> None:
        """The tokens have ended, by a stop id or by their number: sends what was held back."""
        if not self._tell(stopped=stopped) and not self._push(self._detokenizer.flush()):
            self._chunk.text += self._stops.flush()
            self._finish(pb.FINISH_REASON_STOP if stopped else pb.FINISH_REASON_LENGTH)

    def _finish(self, reason: pb.FinishReason) -> None:
        self._chunk.finish = self.finish_reason = reason
        self.finished = True


class Stream:
    """The outputs of all samples of one request, in the order in which they come."""

    def __init__(self, samples: Seq[Request], model: Model) -> None:
        self._news = asyncio.Event()
        self.generations = [Generation(request, model, self._news) for request in samples]
        self.generations[0].followers = samples[1:]

    @property
    def finished(self) -> bool:
        """Whether all outputs have ended; the last pieces may still have to be taken."""
        return all(generation.finished for generation in self.generations)

    async def next(self) -> list[tuple[Generation, Chunk]]:
        """Waits for output. Raises the error of a sample that failed."""
        await self._news.wait()
        self._news.clear()
        taken = [(generation, generation.take()) for generation in self.generations]
        return [(generation, chunk) for generation, chunk in taken if chunk is not None]
