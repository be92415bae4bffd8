"""The model as the executor describes it: its limits, its tokenizer, its chat template."""

import asyncio
import contextlib
from bisect import bisect_right
from collections.abc import Mapping, Sequence

from tokenizers import Encoding, Tokenizer

from protos.execution.v1 import execution_pb2
from protos.kvcache.eviction import Layout, Policy
from scheduler.chat import ChatTemplate

# Tokenized one at a time beyond this many characters, so that short prompts find a free thread.
LARGE_PROMPT = 65_536
# Tokens of a sequence that is bounded by nothing else.
ENDLESS = 1 << 24


class Model:
    """The served model. `max_tokens` is the longest prompt plus output that model and pool can hold."""

    def __init__(self, model: execution_pb2.GetModelResponse, executor: execution_pb2.GetExecutorResponse) -> None:
        self.name = model.model
        self.vocab_size = model.vocab_size
        self.dtype = model.dtype
        self.max_tokens = min(model.max_positions, executor.max_tokens)
        self.layout = Layout(
            executor.block_size,
            tuple(window or None for window in executor.attention_windows),
            executor.plain_rotary,
        )
        self._max_positions = model.max_positions
        self.eos_token_ids = tuple(model.eos_token_ids)
        self.tokenizer = Tokenizer.from_str(model.tokenizer_json.decode())
        # A prompt that is too long must be refused, never cut.
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self._large = asyncio.Semaphore(1)
        self._chat = ChatTemplate(model.chat_template, model.special_tokens) if model.chat_template else None

    def longest(self, policy: Policy | None) -> int:
        """Longest prompt plus output of a sequence that evicts by a policy: what the pool holds is no bound for it."""
        if policy is None or policy.most_kept is None:
            return self.max_tokens
        return ENDLESS if policy.compacted else self._max_positions

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be rendered."""
        return self._chat is not None

    async def encode_text(self, text: str) -> list[int]:
        """Ids of plain text, with the special tokens that the tokenizer puts around it."""
        return list((await self._encode(text, add_special_tokens=True)).ids)

    async def encode_chat(
        self, messages: Sequence[Mapping[str, str]], places: Sequence[tuple[int, int]] = ()
    ) -> tuple[list[int], list[int]]:
        """Ids of a conversation, whose special tokens the template brings, and how many are in front of each place.

        A place is a message's index, and characters of its content. Raises ChatTemplateError.
        """
        assert self._chat is not None
        prompt = self._chat.render(messages)
        positions = [self._chat.position(prompt, messages, *place) for place in places]
        encoding = await self._encode(prompt, add_special_tokens=False)
        offsets = encoding.offsets if places else []
        ends = [bisect_right(offsets, position, key=lambda offset: offset[1]) for position in positions]
        return list(encoding.ids), ends

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Text of ids, special tokens included."""
        async with self._large if len(token_ids) > LARGE_PROMPT else contextlib.nullcontext():
            return str(await asyncio.to_thread(self.tokenizer.decode, list(token_ids), skip_special_tokens=False))

    def token_text(self, token_id: int) -> str:
        """Text of one token; U+FFFD stands for a part of a character."""
        # Twice less once: a decoder that strips the space in front of a text strips no second one.
        twice, once = (str(self.tokenizer.decode([token_id] * count, skip_special_tokens=False)) for count in (2, 1))
        return twice[len(once) :]

    async def _encode(self, text: str, *, add_special_tokens: bool) -> Encoding:
        async with self._large if len(text) > LARGE_PROMPT else contextlib.nullcontext():
            return await asyncio.to_thread(self.tokenizer.encode, text, add_special_tokens=add_special_tokens)
