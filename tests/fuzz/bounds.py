"""Numbers at the bounds of their types, in fields of messages and of bodies over HTTP."""

from __future__ import annotations

import copy
import http.client
import json
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, EncodeError, Message

from tests.fuzz import values
from tests.fuzz.http_bodies import PATIENCE, VALID
from tests.fuzz.limits import keep_body, keep_within
from tests.fuzz.memory import Memory
from tests.fuzz.messages import Made, Maker, parts
from tests.fuzz.meter import Meter
from tests.fuzz.report import Report

# Requests that stay as they are, so that what is valid can be learnt from answers.
_UNCHANGED = 0.25
_HOW_MANY = (1, 1, 1, 2, 3)
_INTEGERS = (0, *(sign * (1 << power) + off for power in (7, 8, 15, 16, 31, 32, 53, 63, 64) for sign in (1, -1)
                  for off in (-1, 0, 1)), 10**400)  # fmt: skip
_TEXTS = ("999999999999d", "0.000000001s", "1e999", "9" * 400)
_ACTIONS = ("Retain", "Pin", "Demote", "Prefetch", "Share")
_TELL_SECONDS = 5.0
# Of a payload, which may be anything.
_PAYLOAD = ("priority", "duration_seconds")

Schema = dict[str, Any]
# From a body to a number: keys, each with the description of what holds it.
Path = tuple[tuple[str | int, Schema], ...]


class MakerAtBounds(Maker):
    """Makes requests as others are made, and sets some numbers of most of them."""

    def __init__(self, memory: Memory) -> None:
        super().__init__(memory)
        self.at_bounds = 0

    def make(self, cls: type[Message], rng: random.Random, *, first: bool = False) -> Made:
        """One request."""
        made = super().make(cls, rng, first=first)
        if rng.random() < _UNCHANGED:
            return made
        try:
            message = cls.FromString(made.data)
            changed = _set_numbers(message, rng)
            keep_within(message)
            data = message.SerializeToString()
        except (DecodeError, EncodeError):
            return made
        self.at_bounds += changed
        return made._replace(data=data)


def _set_numbers(message: Message, rng: random.Random) -> bool:
    fields = [(part, field) for part in parts(message) for field in part.DESCRIPTOR.fields if _is_number(field)]
    for part, field in rng.sample(fields, min(len(fields), rng.choice(_HOW_MANY))):
        value = values.bound(rng, field)
        if field.is_repeated:
            getattr(part, field.name).append(value)
        else:
            setattr(part, field.name, value)
    return bool(fields)


def _is_number(field: FieldDescriptor) -> bool:
    return field.cpp_type in values.NUMBERS


def fuzz_http(address: str, report: Report, count: int, meter: Meter, tell: Callable[[str], None]) -> None:
    """So many bodies, each with a few numbers of its description at bounds."""
    with_numbers = _routes(address)
    connection = http.client.HTTPConnection(address, timeout=PATIENCE)
    told = time.monotonic()
    for number in range(count):
        rng = random.Random(f"{report.seed} bounds {number}")
        [(route, paths)] = rng.choices(with_numbers, [len(paths) for _, paths in with_numbers])
        body = json.dumps(_body(route, paths, rng))
        name, readings, begin = f"POST {route}, at bounds", meter.begin(), time.monotonic()
        call: dict[str, object] = {"curl": f"curl -X POST {route} -H 'Content-Type: application/json' -d", "body": body}
        try:
            connection.request("POST", route, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            said, status = answer.read(), answer.status
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            report.hang(f"no answer of {name}", f"{error!r}\n{body[:1500]}", begin, call)
            report.count(name, "no answer", time.monotonic() - begin)
            continue
        report.count(name, str(status), time.monotonic() - begin)
        if status == http.HTTPStatus.INTERNAL_SERVER_ERROR:
            report.fault(f"500 of {name}", f"{said[:300]!r}\n{body[:1500]}", call)
        meter.end(readings, name, body[:1500], call)
        if time.monotonic() - told > _TELL_SECONDS:
            told = time.monotonic()
            tell(f"HTTP at bounds: {number + 1} of {count} calls, {report.num_faults} faults")
    connection.close()


def _routes(address: str) -> list[tuple[str, list[Path]]]:
    """Routes that take bodies, with the numbers that these may have."""
    connection = http.client.HTTPConnection(address, timeout=PATIENCE)
    connection.request("GET", "/openapi.json")
    description = json.loads(connection.getresponse().read())
    connection.close()
    schemas = description["components"]["schemas"]
    found = []
    for route, methods in description["paths"].items():
        if "post" in methods:
            schema = methods["post"]["requestBody"]["content"]["application/json"]["schema"]
            found.append((route, list(_numbers(schema, schemas))))
    return found


def _numbers(schema: Schema, schemas: Schema) -> Iterator[Path]:
    """Paths to all numbers."""
    schema = _resolved(schema, schemas)
    for kind in ("anyOf", "oneOf"):
        for variant in schema.get(kind, ()):
            yield from _numbers(variant, schemas)
    if schema.get("type") in ("integer", "number"):
        yield ()
    elif schema.get("type") == "array" and "items" in schema:
        yield from (((0, schema), *rest) for rest in _numbers(schema["items"], schemas))
    elif "properties" in schema:
        for name, field in schema["properties"].items():
            # With what is needed beside it.
            holder = schema | {"beside": _sample(schema, schemas)}
            yield from (((name, holder), *rest) for rest in _numbers(field, schemas))
    elif schema.get("type") == "object":
        yield from (((name, schema),) for name in _PAYLOAD)


def _resolved(schema: Schema, schemas: Schema) -> Schema:
    return schemas[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema


def _sample(schema: Schema, schemas: Schema) -> Any:
    """Something small that a description allows."""
    schema = _resolved(schema, schemas)
    if "const" in schema or "enum" in schema:
        return schema.get("const", schema.get("enum", [None])[0])
    for kind in ("anyOf", "oneOf"):
        if kind in schema and "properties" not in schema:
            return _sample(schema[kind][0], schemas)
    match schema.get("type"):
        case "object":
            return {name: _sample(schema["properties"][name], schemas) for name in schema.get("required", ())}
        case "array":
            return [_sample(schema.get("items", {}), schemas)]
        case "integer" | "number":
            return schema.get("minimum", 1)
        case "boolean":
            return False
        case _:
            return "a"


def _body(route: str, paths: list[Path], rng: random.Random) -> Any:
    body: Any = copy.deepcopy(VALID[route])
    for path in rng.sample(paths, min(len(paths), rng.choice(_HOW_MANY))):
        body = _put(body, path, _value(rng))
    if "top_logprobs" in body:
        body["logprobs"] = True
    hints = body.get("kv_hints")
    for action in hints["actions"] if isinstance(hints, dict) else ():
        action["action_type"] = rng.choice(_ACTIONS)
    return keep_body(body)


def _put(holder: Any, path: Path, value: Any) -> Any:
    """The holder with a value at the end of a path."""
    if not path:
        return value
    (key, schema), *rest = path
    if isinstance(key, int):
        return [_put(holder[0] if isinstance(holder, list) and holder else None, tuple(rest), value)]
    if not isinstance(holder, dict):
        holder = copy.deepcopy(schema.get("beside", {}))
    holder[key] = _put(holder.get(key), tuple(rest), value)
    return holder


def _value(rng: random.Random) -> object:
    draw = rng.random()
    return rng.choice(_TEXTS) if draw < 0.02 else rng.choice(values.FLOATS) if draw < 0.2 else rng.choice(_INTEGERS)
