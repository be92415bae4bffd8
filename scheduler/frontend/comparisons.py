"""Recent responses by name, and why a request reused less of an earlier prompt than it could. On the asyncio loop."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable
from hashlib import blake2b
from typing import NamedTuple

from protos.generation.v1 import generation_pb2 as pb
from protos.kvcommon.tokens import TOKEN_BYTES
from scheduler.request import NO_PARTS, PromptParts, Request

# Most responses that are kept, most blocks of all their prompts, and how long responses are kept. A block takes eight
# bytes.
MAX_RESPONSES = 4096
MAX_BLOCKS = 1 << 20
KEPT_SECONDS = 3600.0
# Roles of messages that contain instructions.
_SYSTEM_ROLES = ("system", "developer")


class _Response(NamedTuple):
    """What is kept of a request with a complete response: hashes of its prompt's whole blocks, no tokens."""

    ended_at: float
    salt: str | None
    adapter: str
    adapter_id: int | None
    weight_version: str | None
    parts: PromptParts
    blocks: array[int]


class RecentResponses:
    """The last responses. A caller finds only those of its own tenant or, without a tenant, of its salt."""

    def __init__(self, block_size: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._block_size = block_size
        self._clock = clock
        # The oldest first.
        self._responses: dict[tuple[str, ...], _Response] = {}
        self._num_blocks = 0

    def __len__(self) -> int:
        return len(self._responses)

    def add(self, request: Request, weight_version: str | None) -> None:
        """Notes a request whose response is complete. weight_version: None if it is not known."""
        owner = _owner(request, request.response_id)
        self._drop(owner)
        response = _Response(
            self._clock(),
            request.cache.salt,
            "" if request.adapter is None else request.adapter.name,
            request.adapter_id,
            weight_version,
            request.parts,
            self._hashes(request.prompt_ids),
        )
        self._responses[owner] = response
        self._num_blocks += len(response.blocks)
        self._drop_old()

    def diagnose(self, request: Request, cached_tokens: int, weight_version: str | None) -> pb.CacheDiagnosis:
        """Compares an admitted request with the response that it names.

        cached_tokens: of its prompt. weight_version: as for `add`.
        """
        self._drop_old()
        earlier = self._responses.get(_owner(request, request.cache.comparison_id or ""))
        if earlier is None:
            return pb.CacheDiagnosis(outcome=pb.CACHE_OUTCOME_COMPARISON_NOT_FOUND)
        size = self._block_size
        mine = self._hashes(request.prompt_ids)
        # The last token of a prompt is always computed.
        most = min(len(earlier.blocks), (len(request.prompt_ids) - 1) // size)
        common = next((index for index in range(most) if mine[index] != earlier.blocks[index]), most)
        divided = _divided(request, earlier, weight_version)
        changed = divided or (_changed(request.parts, earlier.parts) if common < most else None)
        reusable = (most if changed is None else len(earlier.blocks)) * size
        missed = max(0, reusable - cached_tokens)
        if changed is None and missed:
            changed = pb.CACHE_MISS_REASON_NOT_CACHED
        return pb.CacheDiagnosis(
            outcome=pb.CACHE_OUTCOME_MISS if missed else pb.CACHE_OUTCOME_HIT,
            reason=changed,
            reusable_tokens=reusable,
            missed_tokens=missed,
            common_tokens=0 if divided else common * size,
        )

    def _hashes(self, prompt_ids: array[int]) -> array[int]:
        """Returns a hash of each whole block alone, without the blocks before it."""
        packed, width = prompt_ids.tobytes(), self._block_size * TOKEN_BYTES
        # Python's hash has a key that nobody outside the process knows, and is the fastest available.
        return array("q", [hash(packed[end - width : end]) for end in range(width, len(packed) + 1, width)])

    def _drop(self, owner: tuple[str, ...]) -> None:
        if (response := self._responses.pop(owner, None)) is not None:
            self._num_blocks -= len(response.blocks)

    def _drop_old(self) -> None:
        begin = self._clock() - KEPT_SECONDS
        while self._responses:
            oldest = next(iter(self._responses))
            is_over = self._responses[oldest].ended_at < begin
            if not is_over and len(self._responses) <= MAX_RESPONSES and self._num_blocks <= MAX_BLOCKS:
                return
            self._drop(oldest)


def _owner(request: Request, name: str) -> tuple[str, ...]:
    """Returns the key of a response, which only its tenant or, without a tenant, its salt can name."""
    tenant, salt = request.cache.tenant_id, request.cache.salt
    if tenant:
        return ("tenant", tenant, name)
    return ("", name) if salt is None else ("salt", salt, name)


def _divided(request: Request, earlier: _Response, weight_version: str | None) -> pb.CacheMissReason | None:
    """Returns the change in the root of the block keys, which makes every block different; None for no change."""
    if request.adapter_id != earlier.adapter_id:
        name = "" if request.adapter is None else request.adapter.name
        is_same = name == earlier.adapter
        return pb.CACHE_MISS_REASON_WEIGHTS_CHANGED if is_same else pb.CACHE_MISS_REASON_MODEL_CHANGED
    versions = {weight_version, earlier.weight_version}
    if None not in versions and len(versions) > 1:
        return pb.CACHE_MISS_REASON_WEIGHTS_CHANGED
    return None if request.cache.salt == earlier.salt else pb.CACHE_MISS_REASON_SALT_CHANGED


def _changed(mine: PromptParts, earlier: PromptParts) -> pb.CacheMissReason:
    """Returns what has changed in prompts that differ."""
    if mine.tools != earlier.tools:
        return pb.CACHE_MISS_REASON_TOOLS_CHANGED
    if mine.system != earlier.system:
        return pb.CACHE_MISS_REASON_SYSTEM_CHANGED
    if mine.template != earlier.template:
        return pb.CACHE_MISS_REASON_TEMPLATE_CHANGED
    return pb.CACHE_MISS_REASON_INPUT_CHANGED


_CHOICE = frozenset({"tool_choice", "tool_name", "single_tool_call"})


def parts_of(message: pb.StreamGenerateRequest) -> PromptParts:
    """Returns digests of what a conversation is rendered from, except for its ordinary messages.

    For a prompt that a front end has rendered, these are the front end's digests; for any other prompt, there are none.
    """
    if message.cache.HasField("parts"):
        given = message.cache.parts
        return PromptParts(given.tools, given.system, given.template)
    if message.WhichOneof("input") != "chat":
        return NO_PARTS
    chat = message.chat
    inputs = {field.name: value for field, value in chat.ListFields() if field.name != "messages"}
    tools = inputs.pop("tools", "")
    if chat.tool_choice == pb.TOOL_CHOICE_NONE:
        tools = ""
    # The choice of tools is not in the prompt.
    template = [f"{name}={value}" for name, value in inputs.items() if name not in _CHOICE]
    system = (f"{said.role}:{said.content}" for said in chat.messages if said.role in _SYSTEM_ROLES)
    return PromptParts(_digest([str(tools)]), _digest(system), _digest(template))


def _digest(texts: Iterable[str]) -> int:
    """Returns a digest of texts; 0 for no text."""
    whole = "\0".join(texts)
    return int.from_bytes(blake2b(whole.encode(), digest_size=8).digest(), "little") if whole else 0
