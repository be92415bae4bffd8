"""The audit log: operators' calls and refused callers, as lines in the log and in the audit file."""

import asyncio
import json
import os
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import structlog
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from protos.rpc.identity import Identity

# This many refusals per second have a separate line; further refusals are counted.
_REFUSALS = 20
_WINDOW_SECONDS = 1.0
# Of the reads that a console repeats, one in this many seconds is written per token and method.
REPEAT_SECONDS = 60.0
# The limit on the length of a request that is written in full.
_MAX_REQUEST = 4096
# Fields with prompts, in any message.
_SECRET = ("token_ids", "prefix_token_ids", "extra_keys")

log = structlog.get_logger()


class Audit:
    """Writes the lines. The file is opened for each line, so that it can be moved away at any time."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._refusals = 0
        self._timer: asyncio.TimerHandle | None = None
        self._written: dict[tuple[Identity | None, str], float] = {}

    def note_read(self, identity: Identity | None, method: str) -> bool:
        """Notes a repeated read of this token that is to be written; returns False if one was written recently."""
        key, now = (identity, method), time.monotonic()
        if now - self._written.get(key, -REPEAT_SECONDS) < REPEAT_SECONDS:
            return False
        self._written[key] = now
        return True

    def called(self, identity: Identity | None, method: str, peer: str, request: Any, outcome: str) -> None:
        """Logs that an operator's call has ended, or that a stream has begun."""
        self._write("audit", **_caller(identity), method=method, peer=peer, request=_shown(request), outcome=outcome)

    def refused(self, identity: Identity | None, method: str, peer: str, outcome: str) -> None:
        """Logs that a caller was refused; very many refusals in a short time share one line."""
        self._refusals += 1
        if self._refusals <= _REFUSALS:
            self._write("call denied", **_caller(identity), method=method, peer=peer, outcome=outcome, count=1)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_WINDOW_SECONDS, self.flush)

    def flush(self) -> None:
        """Logs how many refusals have no line yet."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        more = self._refusals - _REFUSALS
        self._refusals = 0
        if more > 0:
            self._write("call denied", count=more)

    def _write(self, event: str, **fields: Any) -> None:
        log.info(event, **fields)
        if self._file is None:
            return
        line = json.dumps({"timestamp": datetime.now(UTC).isoformat(), "event": event, **fields}) + "\n"
        try:
            descriptor = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            try:
                os.write(descriptor, line.encode())
            finally:
                os.close(descriptor)
        except OSError as error:
            log.error("the audit file cannot be written", cause=str(error))


def _caller(identity: Identity | None) -> dict[str, str]:
    if identity is None:
        return {"caller": "", "role": "", "tenant": ""}
    return {"caller": identity.name, "role": identity.role.value, "tenant": identity.tenant}


def _shown(request: Any) -> Any:
    """Returns a request, which is a message or the query of a path, without prompts.

    Of a long request, only the beginning of its JSON text; "malformed" for anything else.
    """
    if isinstance(request, Message):
        shown = type(request)()
        shown.CopyFrom(request)
        _hide(shown)
        fields = MessageToDict(shown, preserving_proto_field_name=True)
    elif isinstance(request, Mapping):
        fields = dict(request)
    else:
        return "malformed"
    text = json.dumps(fields)
    return fields if len(text) <= _MAX_REQUEST else text[:_MAX_REQUEST]


def _hide(message: Message) -> None:
    for field, value in message.ListFields():
        if field.name in _SECRET:
            message.ClearField(field.name)
        elif field.message_type is not None and not field.message_type.full_name.startswith("google."):
            for part in value if field.is_repeated else [value]:
                _hide(part)
