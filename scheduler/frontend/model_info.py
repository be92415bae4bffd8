"""The served model as the executor describes it: limits, tokenizer and chat template."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import jinja2
from tokenizers import Tokenizer

from protos.execution.v1 import execution_pb2
from protos.kvcommon.eviction import Layout, Policy
from scheduler.errors import UnusableModelError
from scheduler.frontend.chat_output import THINK_BEGIN, OutputForms, OutputParser
from scheduler.frontend.chat_template import ASKING, ChatTemplate, Rendering
from scheduler.request import Request

# Prompts with more characters are tokenized one at a time, so that short prompts find a free thread.
LARGE_PROMPT = 65_536
# Tokens at the end of a prompt among which the tag that begins the reasoning is searched.
_OPENING_TOKENS = 16
# The length limit of a sequence that has no other limit, in tokens.
ENDLESS = 1 << 24


class TooLongError(ValueError):
    """A prompt has too many tokens; the message says how many."""


# Texts of tokens in the cache: some ten megabytes at most.
KEPT_TEXTS = 1 << 16


class ModelInfo:
    """The served model. `max_tokens` is the longest prompt plus output that model and pool can hold, in tokens."""

    def __init__(
        self,
        model: execution_pb2.GetModelResponse,
        executor: execution_pb2.GetExecutorResponse,
        names: Sequence[str] = (),
        *,
        tool_call_parser: str = "auto",
        reasoning_parser: str = "auto",
    ) -> None:
        """names: what requests may call the model; answers show the first. Default: its own name and its id on a hub.

        The parsers are the values of the settings. Raises UnusableModelError.
        """
        own = (model.model, model.hub_id) if model.hub_id else (model.model,)
        self.names = tuple(names) or own
        self.name = self.names[0]
        self.chat_template = model.chat_template
        self.special_tokens = dict(model.special_tokens)
        self.vocab_size = model.vocab_size
        self.dtype = model.dtype
        self.kv_cache_dtype = model.kv_cache_dtype
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
        # Whether the model knows every id that the tokenizer can return.
        self.own_ids_fit = max(self.tokenizer.get_vocab(with_added_tokens=True).values(), default=0) < self.vocab_size
        # Log-probabilities need the texts of many tokens, but mostly of the same few.
        self._token_text = lru_cache(KEPT_TEXTS)(self._decode_token)
        self._large = asyncio.Semaphore(1)
        self.output_forms = OutputForms.of(model.chat_template, calls=tool_call_parser, reasoning=reasoning_parser)
        self._chat = _compiled(model, drops_reasoning=self.output_forms.thinks) if model.chat_template else None
        added = self.tokenizer.get_added_tokens_decoder().values()
        special = {token.content for token in added if token.special}
        self._marks_calls = self.output_forms.marks_calls(special)
        self._marks_reasoning = self.output_forms.marks_reasoning(special)

    def called(self, name: str) -> ModelInfo:
        """Returns the model under a different name, such as an adapter's."""
        other = copy.copy(self)
        other.name = name
        return other

    def longest(self, policy: Policy | None) -> int:
        """Returns the longest prompt plus output under an eviction policy, in tokens, which may exceed the pool."""
        if policy is None or policy.most_kept is None:
            return self.max_tokens
        return ENDLESS if policy.compacted else self._max_positions

    @property
    def has_chat_template(self) -> bool:
        return self._chat is not None

    @property
    def reads_tools(self) -> bool:
        """Whether the chat template reads tools."""
        return self._chat is not None and self._chat.reads_tools

    def marks_parts(self, *, has_tools: bool) -> bool:
        """Returns whether an answer's text needs special tokens, so that calls and reasoning are found in it."""
        return self._marks_reasoning or (self._marks_calls and has_tools)

    def reserves(self, variable: str) -> bool:
        """Returns whether callers may not set a variable of the chat template."""
        return self._chat is not None and self._chat.reserves(variable)

    async def encode_text(self, text: str, most: int | None = None, *, add_special: bool = True) -> array[int]:
        """Returns the ids of plain text. add_special: whether to include the special tokens that the tokenizer adds.

        most: TooLongError is raised for more tokens, if possible without tokenizing the whole text.
        """
        async with self._turn(len(text)):
            return await asyncio.to_thread(self._encode_text, text, most, add_special)

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        breakpoints: Sequence[tuple[int, int]] = (),
        most: int | None = None,
        how: Rendering = ASKING,
        *,
        size: int | None = None,
    ) -> tuple[array[int], list[int]]:
        """Returns a conversation's ids with the template's special tokens, and how many ids precede each breakpoint.

        A breakpoint is a message's index and a number of characters of its content. size: of all texts, if known.
        Raises ChatTemplateError and UnreadFieldError, and TooLongError like `encode_text`.
        """
        size = sum(len(text) for message in messages for text in message.values()) if size is None else size
        async with self._turn(size):
            return await asyncio.to_thread(self._encode_chat, messages, breakpoints, most, how)

    async def decode(self, token_ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Returns the text of ids. skip_special: whether to leave out special tokens."""
        async with self._turn(len(token_ids)):
            # As a batch: otherwise the tokenizer keeps the GIL.
            [text] = await asyncio.to_thread(
                self.tokenizer.decode_batch, [list(token_ids)], skip_special_tokens=skip_special
            )
            return str(text)

    async def token_runs(self, words: Sequence[str]) -> list[list[int]]:
        """Returns the ids of words, each as tokenized at the beginning of a text and after a space."""
        texts = [text for word in words for text in dict.fromkeys((word, f" {word.lstrip()}"))]
        encodings = await asyncio.to_thread(self.tokenizer.encode_batch_fast, texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings if encoding.ids]

    def output_parser(self, request: Request) -> OutputParser:
        """Returns a parser for the text of a request's output."""
        is_thinking = self.output_forms.thinks and self._begins_reasoning(request.prompt_ids)
        # The text around structural tags is free.
        form = request.sampling.structured_output.WhichOneof("form")
        is_forced = form not in (None, "structural_tags")
        return OutputParser(self.output_forms, request.tools, is_thinking=is_thinking, is_forced=is_forced)

    def _begins_reasoning(self, prompt_ids: Sequence[int]) -> bool:
        end = self.tokenizer.decode(list(prompt_ids[-_OPENING_TOKENS:]), skip_special_tokens=False)
        return str(end).rstrip().endswith(THINK_BEGIN)

    def vocabulary(self, token_ids: Sequence[int]) -> list[str]:
        """Returns the vocabulary's names of tokens, such as "Ġthe"; an unknown id has an empty name."""
        return [self.tokenizer.id_to_token(token_id) or "" for token_id in token_ids]

    def token_text(self, token_id: int) -> str:
        """Returns the text of one token; U+FFFD stands for a part of a character."""
        return self._token_text(token_id)

    def _decode_token(self, token_id: int) -> str:
        # The text of two tokens minus that of one: a decoder strips the space only before the first token.
        twice, once = (str(self.tokenizer.decode([token_id] * count, skip_special_tokens=False)) for count in (2, 1))
        return twice[len(once) :]

    def _turn(self, size: int) -> contextlib.AbstractAsyncContextManager[None]:
        return self._large if size > LARGE_PROMPT else contextlib.nullcontext()

    def _encode_text(self, text: str, most: int | None, add_special: bool) -> array[int]:
        self._check_bytes(text, most)
        # As a batch: otherwise the tokenizer keeps the GIL. The fast variant has no offsets.
        [encoding] = self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special)
        return pack(encoding.ids, most)

    def _encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        breakpoints: Sequence[tuple[int, int]],
        most: int | None,
        how: Rendering,
    ) -> tuple[array[int], list[int]]:
        assert self._chat is not None
        prompt = self._chat.render(messages, how)
        self._check_bytes(prompt, most)
        encode = self.tokenizer.encode_batch if breakpoints else self.tokenizer.encode_batch_fast
        [encoding] = encode([prompt], add_special_tokens=False)
        ids = pack(encoding.ids, most)
        positions = [self._chat.position(prompt, messages, *breakpoint_, how) for breakpoint_ in breakpoints]
        offsets = encoding.offsets if breakpoints else []
        return ids, [bisect_right(offsets, position, key=lambda offset: offset[1]) for position in positions]

    def _check_bytes(self, text: str, most: int | None) -> None:
        if most is not None and self._longest_token is not None:
            least = len(text.encode()) // self._longest_token
            if least > most:
                raise TooLongError(f"has at least {least} tokens")


def pack(ids: Sequence[int], most: int | None) -> array[int]:
    """Packs ids as 32-bit numbers. Raises TooLongError for more than `most`."""
    if most is not None and len(ids) > most:
        raise TooLongError(f"has {len(ids)} tokens")
    return array("I", ids)


def _read(model: execution_pb2.GetModelResponse) -> tuple[Tokenizer, int | None]:
    """Returns the tokenizer, and the bytes of its longest token, None for no limit. Raises UnusableModelError."""
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


def _compiled(model: execution_pb2.GetModelResponse, *, drops_reasoning: bool) -> ChatTemplate:
    try:
        return ChatTemplate(model.chat_template, model.special_tokens, drops_reasoning=drops_reasoning)
    except (jinja2.TemplateError, SyntaxError) as error:
        # The second error comes from templates such as `{% break %}` outside a loop: Python does this check, not Jinja.
        raise UnusableModelError(f"the chat template of the model {model.model} is no template: {error}") from error


def _longest_token(tokenizer_json: str) -> int | None:
    """Returns how many bytes of text a token stands for at most; None if there is no limit.

    Only byte-level BPE without normalisation has such a limit.
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
    # In byte-level BPE, a character of a token is a byte; an added token stands for itself.
    return max(max(map(len, model["vocab"])), *(len(token["content"].encode()) for token in added), 1)
