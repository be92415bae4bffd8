"""Requests of a trace in Mooncake's format: a JSON object per line, prompts as ids of 512-token blocks.

The id of a block stands for everything up to its end, so that equal ids mean equal prefixes.
"""

from __future__ import annotations

import json
from array import array
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

BLOCK_TOKENS = 512
# Each id below this has 512 token ids below 2^31; the token ids from 2^31 on are for generated tokens.
_IDS = 1 << 22


class TraceError(ValueError):
    """The file cannot be used; the message says where and why."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request. `time` in seconds, lengths in tokens.

    `conversation` is a number; requests that begin with a whole earlier request share its number.
    """

    time: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]
    conversation: int = 0
    follows: bool = False

    def tokens(self) -> array[int]:
        """The prompt: each id stands for 512 unique tokens; the last block may have fewer of them."""
        tokens = array("I")
        for number in self.hash_ids:
            tokens.extend(range(number * BLOCK_TOKENS, (number + 1) * BLOCK_TOKENS))
        del tokens[self.input_length :]
        return tokens


def read(path: Path, limit: int | None = None) -> list[Request]:
    """The first `limit` requests, with the conversations that they belong to. Raises TraceError."""
    requests: list[Request] = []
    conversations = Conversations()
    try:
        with path.open(encoding="utf-8") as file:
            for line, text in enumerate(islice(file, limit), 1):
                request = _parse(line, text)
                if requests and request.time < requests[-1].time:
                    raise TraceError(f"line {line}: timestamp must not be less than that of the line before")
                requests.append(conversations.assign(request))
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"cannot read {path}: {error}") from error
    if not requests:
        raise TraceError(f"{path} has no requests")
    return requests


class Conversations:
    """Finds the conversation of each request among the requests before."""

    def __init__(self) -> None:
        # By the last whole block of a prompt. A single block may be a system prompt, and makes no conversation.
        self._ends: dict[int, int] = {}
        self._count = 0

    def assign(self, request: Request) -> Request:
        """The request with its conversation; it is a follow-up if it begins with a whole prompt of the conversation."""
        whole = request.hash_ids[: request.input_length // BLOCK_TOKENS]
        known = next((self._ends[number] for number in reversed(whole) if number in self._ends), None)
        if known is None:
            self._count += 1
        conversation = self._count if known is None else known
        if len(whole) > 1:
            self._ends[whole[-1]] = conversation
        return Request(
            request.time,
            request.input_length,
            request.output_length,
            request.hash_ids,
            conversation,
            known is not None,
        )


def _parse(line: int, text: str) -> Request:
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise TraceError(f"line {line}: is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise TraceError(f"line {line}: must be an object with timestamp, input_length, output_length and hash_ids")
    timestamp = fields.get("timestamp")
    if isinstance(timestamp, bool) or not isinstance(timestamp, int | float) or not 0 <= timestamp < float("inf"):
        raise TraceError(f"line {line}: timestamp must be milliseconds from 0 on")
    length = _whole(line, "input_length", fields.get("input_length"), 1)
    output = _whole(line, "output_length", fields.get("output_length"), 0)
    ids = fields.get("hash_ids")
    if not isinstance(ids, list) or len(ids) != -(-length // BLOCK_TOKENS):
        raise TraceError(f"line {line}: hash_ids must have one entry per {BLOCK_TOKENS} tokens of input_length")
    for index, number in enumerate(ids):
        if _whole(line, f"hash_ids[{index}]", number, 0) >= _IDS:
            raise TraceError(f"line {line}: hash_ids[{index}] must be less than {_IDS}")
    return Request(timestamp / 1e3, length, output, tuple(ids))


def _whole(line: int, field: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise TraceError(f"line {line}: {field} must be a whole number of at least {least}")
    return value
