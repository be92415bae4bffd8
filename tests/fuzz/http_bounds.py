"""Numbers at the bounds of their types in bodies over HTTP, one request at a time, so that its costs can be read."""

from __future__ import annotations

import copy
import http.client
import json
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

from tests.fuzz import values
from tests.fuzz.limits import keep_body
from tests.fuzz.messages import NUMBERS_SET
from tests.fuzz.meter import Meter
from tests.fuzz.report import Report
from tests.support.patience import patience

SECONDS = patience(60)
VALID: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1},
    "/v1/completions": {"prompt": [1000, 1001, 1002], "max_tokens": 1},
    "/tokenize": {"prompt": "Hello"},
    "/detokenize": {"tokens": [1000, 1001]},
}
_INTEGERS = (0, *(sign * (1 << power) + off for power in (7, 8, 15, 16, 31, 32, 53, 63, 64) for sign in (1, -1)
                  for off in (-1, 0, 1)), 10**400)  # fmt: skip
_TEXTS = ("999999999999d", "0.000000001s", "1e999", "9" * 400)
_ACTIONS = ("Retain", "Pin", "Demote", "Prefetch", "Share")
_PROGRESS_SECONDS = 5.0
# Keys of a hint's payload, which the description leaves open.
_PAYLOAD = ("priority", "duration_seconds")

Schema = dict[str, Any]
# From a body to a number: keys, each with the description of its holder.
Path = tuple[tuple[str | int, Schema], ...]


def fuzz(address: str, report: Report, count: int, meter: Meter, progress: Callable[[str], None]) -> None:
    """Sends `count` bodies, each with a few numbers of its description at bounds."""
    routes = _routes(address)
    connection = http.client.HTTPConnection(address, timeout=SECONDS)
    reported = time.monotonic()
    for number in range(count):
        rng = random.Random(f"{report.seed} bounds {number}")
        [(route, paths)] = rng.choices(routes, [len(paths) for _, paths in routes])
        body = json.dumps(_body(route, paths, rng))
        name, readings, begin = f"POST {route}, at bounds", meter.begin(), time.monotonic()
        call: dict[str, object] = {"curl": f"curl -X POST {route} -H 'Content-Type: application/json' -d", "body": body}
        try:
            connection.request("POST", route, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            text, status = answer.read(), answer.status
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            report.hang(f"no answer of {name}", f"{error!r}\n{body[:1500]}", begin, call)
            report.count(name, "no answer", time.monotonic() - begin)
            continue
        report.count(name, str(status), time.monotonic() - begin)
        if status == http.HTTPStatus.INTERNAL_SERVER_ERROR:
            report.fault(f"500 of {name}", f"{text[:300]!r}\n{body[:1500]}", call)
        meter.end(readings, name, body[:1500], call)
        if time.monotonic() - reported > _PROGRESS_SECONDS:
            reported = time.monotonic()
            progress(f"HTTP at bounds: {number + 1} of {count} calls, {report.num_faults} faults")
    connection.close()


def _routes(address: str) -> list[tuple[str, list[Path]]]:
    """Routes that take bodies, with the paths to the numbers of these."""
    connection = http.client.HTTPConnection(address, timeout=SECONDS)
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
            # With the required fields beside it.
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
    for path in rng.sample(paths, min(len(paths), rng.choice(NUMBERS_SET))):
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
