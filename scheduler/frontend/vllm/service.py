"""vLLM's engine contract over gRPC, for gateways. Like all other requests, its requests use GenerationService."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime

import grpc

from protos.generation.v1 import generation_pb2 as pb
from protos.rpc.errors import InvalidField, ServiceError
from protos.rpc.identity import current
from protos.smg import common_pb2 as smg
from protos.vllm import engine_pb2 as vllm
from protos.vllm import engine_pb2_grpc as rpc
from scheduler.errors import UnknownRequestError
from scheduler.frontend.engine_service import EngineSource
from scheduler.frontend.grpc_service import Context, GenerationService
from scheduler.frontend.vllm import translate
from scheduler.frontend.vllm.answers import Answers
from scheduler.frontend.vllm.gateway_events import KvEvents, NoEventsError
from scheduler.frontend.vllm.tokenizer_archive import archive

VLLM_SERVICE = "vllm.grpc.engine.VllmEngine"
# Most requests that one call may abort.
MAX_ABORTED = 1024
# Most bytes of the tokenizer in one message.
CHUNK_BYTES = 1 << 18
# The contract has 32 bits for numbers of tokens, and 64 bits for numbers of batches.
_MOST_TOKENS, _MOST_BATCHES = (1 << 31) - 1, 1 << 63
# No hub has such a name: otherwise, a gateway could fetch the tokenizer of a different model with the same name.
_NO_HUB = "kvkeep:"


class NoEmbeddingsError(ServiceError):
    """The model generates text only."""

    code = grpc.StatusCode.UNIMPLEMENTED
    reason = "NO_EMBEDDINGS"


class VllmEngine(rpc.VllmEngineServicer):
    """Served from the start; calls that need the request table are answered with UNAVAILABLE until it exists."""

    def __init__(self, source: EngineSource, generation: GenerationService, events: KvEvents | None) -> None:
        """events: None to serve no events."""
        self._source = source
        self._generation = generation
        self._events = events
        self._started = time.monotonic()
        # Made only once, because the model of a process never changes.
        self._archive = b""

    async def Generate(self, request: vllm.GenerateRequest, context: Context) -> None:  # type: ignore[override]  # noqa: N802
        """Writes to the context, as StreamGenerate does."""
        answers = Answers(request)

        async def write(chunk: pb.StreamGenerateResponse) -> None:
            for answer in answers.of(chunk):
                if answer.HasField("complete"):
                    await self._name_stop(request, answers, answer.complete)
                await context.write(answer)

        async with self._generation.call(context):
            message = translate.request(request)
            try:
                await self._generation.generate(message, write, usage=True, accept=answers.accept)
            except InvalidField as error:
                raise translate.renamed(error) from None

    async def _name_stop(
        self, request: vllm.GenerateRequest, answers: Answers, complete: vllm.GenerateComplete
    ) -> None:
        """Adds the stop string that ended an output."""
        model = self._source.requests.model
        eos = () if request.sampling_params.ignore_eos else model.eos_token_ids
        if answers.is_stopped_by_text(complete, eos):
            least = complete.output_ids[: request.sampling_params.min_tokens]
            found = answers.matched(await model.decode(complete.output_ids), len(await model.decode(least)))
            if found is not None:
                complete.matched_stop_str = found

    async def Embed(self, _request: vllm.EmbedRequest, _context: Context) -> vllm.EmbedResponse:  # noqa: N802
        raise NoEmbeddingsError("the model generates text and has no embeddings")

    async def HealthCheck(  # noqa: N802
        self, _request: vllm.HealthCheckRequest, _context: Context
    ) -> vllm.HealthCheckResponse:
        obstacle = self._generation.obstacle
        return vllm.HealthCheckResponse(healthy=not obstacle, message=obstacle)

    async def Abort(self, request: vllm.AbortRequest, _context: Context) -> vllm.AbortResponse:  # noqa: N802
        if len(request.request_ids) > MAX_ABORTED:
            raise InvalidField("request_ids", f"has more than {MAX_ABORTED} entries")
        for request_id in filter(None, request.request_ids):
            with contextlib.suppress(UnknownRequestError):
                await self._generation.abort(request_id)
        return vllm.AbortResponse()

    async def GetModelInfo(  # noqa: N802
        self, _request: vllm.GetModelInfoRequest, _context: Context
    ) -> vllm.GetModelInfoResponse:
        model, special = self._source.requests.model, self._source.engine.model.special_tokens
        pad, bos = (model.tokenizer.token_to_id(special.get(name, "")) or 0 for name in ("pad_token", "bos_token"))
        return vllm.GetModelInfoResponse(
            model_path=model.name,
            is_generation=True,
            max_context_length=model.max_tokens,
            vocab_size=model.vocab_size,
            served_model_name=model.name,
            tokenizer_path=_NO_HUB + model.name,
            eos_token_ids=model.eos_token_ids,
            pad_token_id=pad,
            bos_token_id=bos,
            max_req_input_len=min(model.max_tokens - 1, _MOST_TOKENS),
        )

    async def GetServerInfo(  # noqa: N802
        self, _request: vllm.GetServerInfoRequest, _context: Context
    ) -> vllm.GetServerInfoResponse:
        requests, engine = self._source.requests, self._source.engine
        return vllm.GetServerInfoResponse(
            active_requests=requests.num_running + requests.num_waiting,
            is_paused=requests.is_draining,
            uptime_seconds=time.monotonic() - self._started,
            server_type="kvkeep",
            data_parallel_size=1,
            kv_cache_dtype=engine.model.kv_cache_dtype,
            block_size=engine.executor.block_size,
            model_dtype=engine.model.dtype,
            max_num_seqs=requests.loads().max_running_requests,
            constrained_decoding_start="first_token",
        )

    async def GetLoads(self, request: vllm.GetLoadsRequest, _context: Context) -> vllm.GetLoadsResponse:  # noqa: N802
        if request.dp_rank:
            raise InvalidField("dp_rank", "must be 0: the engine has one part")
        requests, executor = self._source.requests, self._source.engine.executor
        loads, usage, tokens = requests.loads(), requests.metrics.used_share, min(executor.max_tokens, _MOST_TOKENS)
        return vllm.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(),
            dp_rank_count=1,
            loads=[
                vllm.SchedulerLoad(
                    num_running_reqs=loads.running_requests,
                    num_waiting_reqs=loads.waiting_requests,
                    num_total_reqs=loads.running_requests + loads.waiting_requests,
                    num_used_tokens=round(usage * tokens),
                    max_total_num_tokens=tokens,
                    token_usage=usage,
                    max_running_requests=loads.max_running_requests,
                    num_waiting_uncached_tokens=min(loads.queued_prompt_tokens, _MOST_TOKENS),
                )
            ],
        )

    async def GetTokenizer(  # noqa: N802
        self, _request: smg.GetTokenizerRequest, _context: Context
    ) -> AsyncIterator[smg.GetTokenizerChunk]:
        if not self._archive:
            self._archive = await asyncio.to_thread(archive, self._source.engine.model)
        whole = self._archive
        digest = hashlib.sha256(whole).hexdigest()
        for start in range(0, len(whole), CHUNK_BYTES):
            data = whole[start : start + CHUNK_BYTES]
            yield smg.GetTokenizerChunk(data=data, sha256=digest if start + CHUNK_BYTES >= len(whole) else "")

    async def SubscribeKvEvents(  # noqa: N802
        self, request: smg.SubscribeKvEventsRequest, _context: Context
    ) -> AsyncIterator[smg.KvEventBatch]:
        if self._events is None:
            raise NoEventsError("no events are served here: KVKEEP_SCHEDULER_KV_EVENTS=1 turns on those of a scheduler")
        if request.start_sequence_number >= _MOST_BATCHES:
            raise InvalidField("start_sequence_number", "must be less than 2^63")
        identity = current()
        # A caller's token has a tenant.
        salt = None if identity is None else identity.bound_salt(None)
        batches = self._events.batches(self._source.engine.executor, salt, request.start_sequence_number)
        async with contextlib.aclosing(batches):
            async for batch in batches:
                yield batch
