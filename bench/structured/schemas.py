"""JSON Schemas of the kinds that callers send: function calls, records, settings, trees, and kinds of fields.

All are drawn from a seed. Their kinds are those of the public collections that JSONSchemaBench gathers (Geng et al.
2025, arXiv 2501.10868): calls of functions, settings of programs, resources of clusters, events, and articles.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

_WORDS = (
    "name", "kind", "size", "color", "price", "status", "owner", "label", "count", "level", "origin", "region", "note",
    "title", "score", "weight", "phase", "source", "target", "version",
)  # fmt: skip
_FORMATS = ("date", "time", "date-time", "email", "ipv4", "uuid", "hostname")
_PATTERNS = ("^[A-Z]{2}-[0-9]{3}$", "^#[0-9a-f]{6}$", "^(low|mid|high)-[a-z]+$", "^v[0-9]+\\.[0-9]+$")


def schemas(count: int, seed: int) -> list[Schema]:
    """`count` schemas, equally many of each kind."""
    kinds = list(_KINDS.values())
    return [kinds[number % len(kinds)](random.Random(f"{seed} {number}")) for number in range(count)]


def _text(luck: random.Random) -> Schema:
    match luck.randrange(6):
        case 0:
            return {"type": "string", "enum": luck.sample(_WORDS, luck.randint(2, 6))}
        case 1:
            return {"type": "string", "pattern": luck.choice(_PATTERNS)}
        case 2:
            return {"type": "string", "format": luck.choice(_FORMATS)}
        case 3:
            return {"type": "string", "minLength": luck.randint(0, 3), "maxLength": luck.randint(4, 20)}
        case 4:
            return {"const": luck.choice(_WORDS)}
        case _:
            return {"type": "string", "maxLength": 24}


def _number(luck: random.Random) -> Schema:
    low = luck.randint(-100, 100)
    match luck.randrange(4):
        case 0:
            return {"type": "integer", "minimum": low, "maximum": low + luck.randint(1, 1000)}
        case 1:
            return {"type": "number", "exclusiveMinimum": low, "maximum": low + 10}
        case 2:
            return {"type": "integer", "enum": sorted({luck.randint(0, 99) for _ in range(4)})}
        case _:
            return {"type": ["integer", "null"], "minimum": 0, "maximum": 99_999}


def _leaf(luck: random.Random) -> Schema:
    return luck.choice((_text, _text, _number, lambda _: {"type": "boolean"}))(luck)


def _object(luck: random.Random, depth: int, *, least: int = 2) -> Schema:
    names = luck.sample(_WORDS, luck.randint(least, least + 3))
    properties = {name: _value(luck, depth) for name in names}
    return {
        "type": "object",
        "properties": properties,
        "required": luck.sample(names, luck.randint(1, len(names))),
        "additionalProperties": False,
    }


def _value(luck: random.Random, depth: int) -> Schema:
    if depth <= 0 or luck.random() < 0.6:
        return _leaf(luck)
    match luck.randrange(3):
        case 0:
            return _object(luck, depth - 1)
        case 1:
            return {"type": "array", "items": _value(luck, depth - 1), "minItems": luck.randint(0, 2), "maxItems": 4}
        case _:
            return {"anyOf": [_leaf(luck), _object(luck, depth - 1)]}


def _call(luck: random.Random) -> Schema:
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": f"get_{name}"}, "arguments": _object(luck, 1, least=1)},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for name in luck.sample(_WORDS, luck.randint(1, 4))
    ]
    return calls[0] if len(calls) == 1 else {"anyOf": calls}


def _record(luck: random.Random) -> Schema:
    return _object(luck, 2, least=3)


def _open(luck: random.Random) -> Schema:
    # As pydantic writes it: other properties may come.
    return {keyword: value for keyword, value in _object(luck, 1).items() if keyword != "additionalProperties"}


def _settings(luck: random.Random) -> Schema:
    defined = {f"d{number}": _object(luck, 1) for number in range(luck.randint(1, 3))}
    properties = {name: {"$ref": f"#/$defs/{luck.choice(list(defined))}"} for name in luck.sample(_WORDS, 2)}
    properties["mode"] = {"enum": ["fast", "safe", None, 3]}
    return {
        "$defs": defined,
        "type": "object",
        "properties": properties,
        "required": ["mode"],
        "additionalProperties": False,
    }


def _tree(luck: random.Random) -> Schema:
    return {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "value": _leaf(luck),
                    "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
                },
                "required": ["value"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/node",
    }


def _events(luck: random.Random) -> Schema:
    return {
        "type": "array",
        "minItems": 1,
        "maxItems": 3,
        "items": {
            "type": "object",
            "properties": {
                "id": {"type": "string", "format": "uuid"},
                "at": {"type": "string", "format": "date-time"},
                "tags": {"type": "object", "additionalProperties": _leaf(luck), "maxProperties": 3},
                "data": _value(luck, 1),
            },
            "required": ["id", "at"],
            "additionalProperties": False,
        },
    }


def _tuple(luck: random.Random) -> Schema:
    items = [_leaf(luck) for _ in range(luck.randint(1, 4))]
    return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}


def _limits(luck: random.Random) -> Schema:
    """Keywords that combine schemas or limit numbers and names."""
    one, two, *names = luck.sample(_WORDS, 6)
    step = luck.choice([5, 10, 0.25])
    return {
        "type": "object",
        "properties": {
            names[0]: {"type": "number", "multipleOf": step, "minimum": 0, "maximum": 100},
            names[1]: {"oneOf": [{"type": "string", "maxLength": 8}, {"type": "integer"}, _object(luck, 0)]},
            names[2]: {
                "allOf": [
                    {"type": "object", "properties": {one: _leaf(luck)}, "required": [one]},
                    {"properties": {one: {}, two: _leaf(luck)}, "required": [two], "additionalProperties": False},
                ]
            },
            names[3]: {
                "type": "object",
                "patternProperties": {"^[a-z]{1,4}$": _leaf(luck)},
                "additionalProperties": False,
                "minProperties": 1,
                "maxProperties": 3,
            },
        },
        "required": luck.sample(names, luck.randint(1, 4)),
        "additionalProperties": False,
    }


_KINDS: dict[str, Callable[[random.Random], Schema]] = {
    "call": _call,
    "record": _record,
    "open": _open,
    "settings": _settings,
    "tree": _tree,
    "events": _events,
    "tuple": _tuple,
    "limits": _limits,
}
