"""The served model as the executor describes it: limits, tokenizer and chat template."""

from __future__ import annotations

import asyncio
import contextlib
import json
from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import lru_cache

import jinja2
from tokenizers import Tokenizer

from protos.execution.v1 import execution_pb2
from protos.kvcommon.eviction import Layout, Policy
from scheduler.errors import UnusableModelError
from scheduler.frontend.chat_template import ChatTemplate

# Prompts of more characters are tokenized one after the other, so that short prompts find a free thread.
LARGE_PROMPT = 65_536
# The bound of a sequence without any other, in tokens.
ENDLESS = 1 << 24


class TooLongError(ValueError):
    """A prompt has too many tokens; the message says how many."""


# Texts of tokens in the cache: some ten megabytes at most.
KEPT_TEXTS = 1 << 16


class ModelInfo:
    """`max_tokens` is the longest prompt plus output that model and pool can hold."""

    def __init__(self, model: execution_pb2.GetModelResponse, executor: execution_pb2.GetExecutorResponse) -> None:
        """Raises UnusableModelError."""
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
        self.tokenizer, self._longest_token = _read(model)
        # A prompt that is too long must be refused, never truncated.
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        # Whether every id that the tokenizer gives is one of the model's.
        self.own_ids_fit = max(self.tokenizer.get_vocab(with_added_tokens=True).values(), default=0) < self.vocab_size
        # Log-probabilities need the texts of many tokens, most of them few different ones.
        self._token_text = lru_cache(KEPT_TEXTS)(self._decode_token)
        self._large = asyncio.Semaphore(1)
        self._chat = _compiled(model) if model.chat_template else None

    def longest(self, policy: Policy | None) -> int:
        """Longest prompt plus output under an eviction policy, in tokens: it may exceed the pool."""
        if policy is None or policy.most_kept is None:
            return self.max_tokens
        return ENDLESS if policy.compacted else self._max_positions

    @property
    def has_chat_template(self) -> bool:
        return self._chat is not None

    async def encode_text(self, text: str, most: int | None = None) -> array[int]:
        """Ids of plain text, with the special tokens that the tokenizer adds.

        most: TooLongError is raised for more tokens, without tokenizing the whole text where that is possible.
        """
        async with self._turn(len(text)):
            return await asyncio.to_thread(self._encode_text, text, most)

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, str]],
        breakpoints: Sequence[tuple[int, int]] = (),
        most: int | None = None,
    ) -> tuple[array[int], list[int]]:
        """Ids of a conversation, with the template's special tokens, and the number of ids in front of each breakpoint.

        A breakpoint is a message's index, and characters of its content. Raises ChatTemplateError and UnreadFieldError,
        and TooLongError as `encode_text` does.
        """
        async with self._turn(sum(len(text) for message in messages for text in message.values())):
            return await asyncio.to_thread(self._encode_chat, messages, breakpoints, most)

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Text of ids, special tokens included."""
        async with self._turn(len(token_ids)):
            # As a batch: else the tokenizer keeps the GIL.
            [text] = await asyncio.to_thread(self.tokenizer.decode_batch, [list(token_ids)], skip_special_tokens=False)
            return str(text)

    def vocabulary(self, token_ids: Sequence[int]) -> list[str]:
        """The vocabulary's names of tokens, such as "Ġthe"; empty for an unknown id."""
        return [self.tokenizer.id_to_token(token_id) or "" for token_id in token_ids]

    def token_text(self, token_id: int) -> str:
        """Text of one token; U+FFFD stands for a part of a character."""
        return self._token_text(token_id)

    def _decode_token(self, token_id: int) -> str:
        # Two tokens less one: a decoder strips the space in front of the first token only.
        twice, once = (str(self.tokenizer.decode([token_id] * count, skip_special_tokens=False)) for count in (2, 1))
        return twice[len(once) :]

    def _turn(self, size: int) -> contextlib.AbstractAsyncContextManager[None]:
        return self._large if size > LARGE_PROMPT else contextlib.nullcontext()

    def _encode_text(self, text: str, most: int | None) -> array[int]:
        self._check_bytes(text, most)
        # As a batch: else the tokenizer keeps the GIL. The fast variant has no offsets.
        [encoding] = self.tokenizer.encode_batch_fast([text], add_special_tokens=True)
        return pack(encoding.ids, most)

    def _encode_chat(
        self, messages: Sequence[Mapping[str, str]], breakpoints: Sequence[tuple[int, int]], most: int | None
    ) -> tuple[array[int], list[int]]:
        assert self._chat is not None
        prompt = self._chat.render(messages)
        self._check_bytes(prompt, most)
        encode = self.tokenizer.encode_batch if breakpoints else self.tokenizer.encode_batch_fast
        [encoding] = encode([prompt], add_special_tokens=False)
        ids = pack(encoding.ids, most)
        positions = [self._chat.position(prompt, messages, *breakpoint_) for breakpoint_ in breakpoints]
        offsets = encoding.offsets if breakpoints else []
        return ids, [bisect_right(offsets, position, key=lambda offset: offset[1]) for position in positions]

    def _check_bytes(self, text: str, most: int | None) -> None:
        if most is not None and self._longest_token is not None:
            least = len(text.encode()) // self._longest_token
            if least > most:
                raise TooLongError(f"has at least {least} tokens")


def pack(ids: Sequence[int], most: int | None) -> array[int]:
    """The ids as 32-bit numbers. Raises TooLongError for more than `most`."""
    if most is not None and len(ids) > most:
        raise TooLongError(f"has {len(ids)} tokens")
    return array("I", ids)


def _read(model: execution_pb2.GetModelResponse) -> tuple[Tokenizer, int | None]:
    """The tokenizer, and the bytes of its longest token."""
    if not model.tokenizer_json:
        raise UnusableModelError(
            f"the model {model.model} has no tokenizer.json, which the scheduler needs: serve a folder that has one"
        )
    try:
        text = model.tokenizer_json.decode()
        return Tokenizer.from_str(text), _longest_token(text)
    # Any exception: the library raises nothing narrower.
    except Exception as error:
        raise UnusableModelError(f"the tokenizer of the model {model.model} cannot be read: {error}") from error


def _compiled(model: execution_pb2.GetModelResponse) -> ChatTemplate:
    try:
        return ChatTemplate(model.chat_template, model.special_tokens)
    except jinja2.TemplateError as error:
        raise UnusableModelError(f"the chat template of the model {model.model} is no template: {error}") from error


def _longest_token(tokenizer_json: str) -> int | None:
    """Bytes of text that a token stands for at most; None where a token may stand for any number.

    Only byte-level BPE without normalisation has such a bound.
    """
    described = json.loads(tokenizer_json)
    model, splits, added = described["model"], described.get("pre_tokenizer") or {}, described["added_tokens"]
    steps = splits.get("pretokenizers", [splits])
    if (
        model.get("type") != "BPE"
        or described.get("normalizer") is not None
        or not any(step.get("type") == "ByteLevel" for step in steps)
        or any(step.get("behavior") == "Removed" for step in steps)
        or any(token["lstrip"] or token["rstrip"] for token in added)
    ):
        return None
    # There a character of a token is a byte; an added token stands for itself.
    return max(max(map(len, model["vocab"])), *(len(token["content"].encode()) for token in added), 1)
