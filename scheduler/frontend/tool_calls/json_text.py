"""Parses JSON that arrives in pieces; writes each part, repaired if necessary, once it continues a valid beginning."""

import json
import re
from collections.abc import Callable

from scheduler.frontend.tool_calls.source import MismatchError, Source, Steps, Write

# Most levels of nesting in arguments.
MAX_LEVELS = 64
_SPACE = re.compile(r"[ \t\r\n]+")
_RUN = re.compile(r'[^"\\\x00-\x1f]+')
_ESCAPED = re.compile(r'["\\/bfnrt]')
_HEX = re.compile(r"[0-9a-fA-F]{4}")
# The first and the second surrogate of a pair, as escapes.
_FIRST_HALF, _SECOND_HALF = re.compile(r"\\u[dD][89abAB]"), re.compile(r"\\u[dD][c-fC-F][0-9a-fA-F]{2}")
# Replaces an unpaired surrogate: a later request that contained one would be refused.
_REPLACEMENT = "\\ufffd"
_WORD = re.compile(r"[-+.0-9A-Za-z]+")
_SCALAR = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?|true|false|null")
# Most characters of a number: Python does not parse whole numbers of more than 4,300 digits.
_MAX_SCALAR = 4000


def read_value(source: Source, write: Write, levels: int = MAX_LEVELS) -> Steps[None]:
    """Reads a value, and repairs strings. Raises MismatchError for text that is not JSON, is nested more than `levels`
    deep, or has a very long number.
    """
    match (yield from source.peek()):
        case '"':
            yield from _read_string(source, write)
        case "{":
            yield from _read_items(source, write, "{", "}", _read_member, levels)
        case "[":
            yield from _read_items(source, write, "[", "]", read_value, levels)
        case _:
            scalar = yield from source.read(_WORD, _MAX_SCALAR)
            if not _SCALAR.fullmatch(scalar):
                raise MismatchError
            write(scalar)


def read_text(source: Source) -> Steps[str]:
    """Reads a string; returns its decoded value."""
    parts: list[str] = []
    yield from _read_string(source, parts.append)
    return str(json.loads("".join(parts)))


def object_in(text: str) -> str:
    """Returns the JSON object that makes up the whole text, as JSON text. Raises MismatchError for any other text."""
    source = Source()
    source.push(text)
    source.end()
    parts: list[str] = []
    for _ in _whole_object(source, parts.append):
        pass
    return "".join(parts)


def _whole_object(source: Source, write: Write) -> Steps[None]:
    if (yield from source.skip_space()) != "{":
        raise MismatchError
    yield from read_value(source, write)
    if (yield from source.skip_space()):
        raise MismatchError


def _read_items(
    source: Source,
    write: Write,
    begin: str,
    end: str,
    read_item: Callable[[Source, Write, int], Steps[None]],
    levels: int,
) -> Steps[None]:
    """Reads an object or an array."""
    if levels == 0:
        raise MismatchError
    yield from _expect(source, write, begin)
    if (yield from _space(source, write)) != end:
        yield from read_item(source, write, levels - 1)
        while (yield from _space(source, write)) == ",":
            yield from _expect(source, write, ",")
            yield from _space(source, write)
            yield from read_item(source, write, levels - 1)
    yield from _expect(source, write, end)


def _read_member(source: Source, write: Write, levels: int) -> Steps[None]:
    yield from _read_string(source, write)
    yield from _space(source, write)
    yield from _expect(source, write, ":")
    yield from _space(source, write)
    yield from read_value(source, write, levels)


def _read_string(source: Source, write: Write) -> Steps[None]:
    yield from _expect(source, write, '"')
    while (following := (yield from source.peek())) != '"':
        if following == "\\":
            yield from _read_escape(source, write)
        elif run := source.match(_RUN):
            write(run)
        else:
            # Models write raw line breaks, where JSON allows only escapes.
            write(json.dumps((yield from source.following(1)))[1:-1])
    yield from _expect(source, write, '"')


def _read_escape(source: Source, write: Write) -> Steps[None]:
    """Reads an escape, and the escapes after a first surrogate. Each unpaired surrogate becomes U+FFFD."""
    escape = yield from source.following(2)
    if escape[1] == "u":
        escape += yield from source.following(4)
    if not (_HEX.fullmatch(escape[2:]) if len(escape) > 2 else _ESCAPED.fullmatch(escape[1])):
        raise MismatchError
    while _FIRST_HALF.match(escape):
        if not (yield from source.take("\\u")):
            break
        other = "\\u" + (yield from source.following(4))
        if not _HEX.fullmatch(other[2:]):
            raise MismatchError
        if _SECOND_HALF.fullmatch(other):
            write(escape + other)
            return
        write(_REPLACEMENT)
        escape = other
    write(_REPLACEMENT if _FIRST_HALF.match(escape) or _SECOND_HALF.fullmatch(escape) else escape)


def _space(source: Source, write: Write) -> Steps[str]:
    """Reads white space; returns the next character without consuming it."""
    while (following := (yield from source.peek())) and (space := source.match(_SPACE)):
        write(space)
    return following


def _expect(source: Source, write: Write, literal: str) -> Steps[None]:
    yield from source.expect(literal)
    write(literal)
