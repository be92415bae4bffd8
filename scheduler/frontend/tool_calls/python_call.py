"""Reads a Python call with keyword arguments, such as f(a=1, b=["x"])."""

import ast
import json
import re
import warnings
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter

from scheduler.frontend.tool_calls.json_text import MAX_LEVELS
from scheduler.frontend.tool_calls.parser import Calls
from scheduler.frontend.tool_calls.source import MismatchError, Source, Steps

_NAME = re.compile(r"[A-Za-z0-9_-]+")
_MAX_NAME = 64
_PLAIN = re.compile(r"[^'\"()\[\]{}]+")
# The inside of a string up to its end, or up to an escape.
_INSIDE = {quote: re.compile(rf"[^{quote}\\]+") for quote in "'\""}
# The name of an argument. Names of parameters may be Python's keywords, so each name gets a prefix.
_ARGUMENT, _PREFIX = re.compile(r"(?<![\w=])(?=[^\W\d]\w*\s*=)"), "_"
_PAIRS = {"(": ")", "[": "]", "{": "}"}
# Models write JSON's names, too.
_NAMES = {"true": True, "false": False, "null": None}


def read_python_call(source: Source, calls: Calls) -> Steps[None]:
    """Reads a call, which is written once it is complete. Raises MismatchError."""
    name = yield from source.read(_NAME, _MAX_NAME)
    if name not in calls.names:
        raise MismatchError
    arguments = _arguments((yield from _parenthesized(source)))
    calls.begin(name)
    calls.write_arguments(arguments)
    calls.complete()


def _parenthesized(source: Source) -> Steps[str]:
    """Returns the text up to the parenthesis that closes the first one, with a prefix to the name of each argument."""
    # Whether names of arguments may be in a part, and the part.
    parts: list[tuple[bool, str]] = []
    open_brackets: list[str] = []
    while True:
        following = yield from source.peek()
        if plain := source.match(_PLAIN) if open_brackets else "":
            parts.append((len(open_brackets) == 1, plain))
        elif following in _INSIDE and open_brackets:
            parts.append((False, (yield from _string(source))))
        elif following in _PAIRS and len(open_brackets) < MAX_LEVELS and (open_brackets or following == "("):
            parts.append((False, (yield from source.following(1))))
            open_brackets.append(_PAIRS[following])
        elif open_brackets and following == open_brackets[-1]:
            parts.append((False, (yield from source.following(1))))
            open_brackets.pop()
            if not open_brackets:
                return "".join(_with_prefixes(parts))
        else:
            raise MismatchError


def _with_prefixes(parts: list[tuple[bool, str]]) -> Iterator[str]:
    for has_names, members in groupby(parts, key=itemgetter(0)):
        # A name may be cut into several parts.
        text = "".join(part for _, part in members)
        yield _ARGUMENT.sub(_PREFIX, text) if has_names else text


def _string(source: Source) -> Steps[str]:
    quote = yield from source.following(1)
    parts = [quote]
    while (following := (yield from source.peek())) != quote:
        if following == "\\":
            parts.append((yield from source.following(2)))
        else:
            inside = source.match(_INSIDE[quote]) or (yield from source.following(1))
            # As in JSON, a line break may be no escape.
            parts.append(inside.replace("\n", "\\n").replace("\r", "\\r"))
    return "".join([*parts, (yield from source.following(1))])


def _arguments(text: str) -> str:
    """Returns the arguments as JSON text. Raises MismatchError if JSON has no such value."""
    try:
        with warnings.catch_warnings():
            # An unknown escape in a string must not cause a warning of this process.
            warnings.simplefilter("ignore")
            call = ast.parse(f"f{text}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise MismatchError
        values: dict[str, object] = {}
        for keyword in call.keywords:
            if keyword.arg is None:
                raise MismatchError
            name = keyword.arg.removeprefix(_PREFIX)
            if name in values:
                raise MismatchError
            values[name] = _value(keyword.value)
        said = json.dumps(values, ensure_ascii=False, allow_nan=False)
        said.encode()
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise MismatchError from error
    return said


def _value(node: ast.expr) -> object:
    match node:
        case ast.Constant(value=str() | bool() | int() | float() | None as value):
            return value
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=items):
            names = [_value(key) if key is not None else None for key in keys]
            if not all(isinstance(name, str) for name in names):
                raise MismatchError
            return dict(zip(names, map(_value, items), strict=True))
    raise MismatchError
