"""The description of the HTTP API, which the scheduler serves at /openapi.json, and its page of docs/."""

import json
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from typing import Any

from prometheus_client import CollectorRegistry
from reference_text import GENERATED, anchor, code, escaped, paragraph, table

from scheduler.errors import NotReadyError
from scheduler.frontend.access_log import AccessLog
from scheduler.frontend.grpc_service import GenerationService
from scheduler.frontend.openai.app import create_app
from scheduler.frontend.requests import RequestTable
from scheduler.metrics import RequestMetrics

# Larger bounds only show how many bits a number has.
_LARGEST = 2**31
# The description of a field without effect.
_IGNORED = "Ignored."
_ROUTES = {
    "Output": ("/v1/chat/completions", "/v1/completions", "/abort_request"),
    "Tokens": ("/tokenize", "/detokenize", "/tokenizer_info"),
    "Models and adapters": ("/v1/models", "/v1/models/{model}", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
    "State of the server": ("/health", "/ping", "/load", "/server_info", "/model_info", "/version", "/metrics"),
}


class _NotServing:
    """The requests of a process that only describes its routes."""

    @property
    def requests(self) -> RequestTable:
        raise NotReadyError("this process serves nothing", retry_after=1.0)


@cache
def description() -> dict[str, Any]:
    """The HTTP API in the format of OpenAPI."""
    metrics = RequestMetrics(CollectorRegistry())
    return create_app(GenerationService(_NotServing(), AccessLog(metrics)), max_prompt_bytes=1).openapi()


def page() -> str:
    """Every route, and every object in bodies and answers."""
    found = description()
    listed = [path for paths in _ROUTES.values() for path in paths]
    groups = _ROUTES | ({"Others": tuple(others)} if (others := found["paths"].keys() - set(listed)) else {})
    text = "# The HTTP API\n\n" + GENERATED
    text += paragraph(
        "The scheduler describes these routes at `/openapi.json`; [the same document](openapi.json) is a file of this "
        "site. [The API by example](api.md) shows requests with their answers. Where tokens are in use, a request has "
        "the header `Authorization: Bearer TOKEN`, unless its route says that it needs none. An error is an "
        "[`ErrorAnswer`](#erroranswer)."
    )
    for title, paths in groups.items():
        text += f"\n## {title}\n"
        for path in paths:
            for method, operation in found["paths"].get(path, {}).items():
                text += _route(path, method.upper(), operation)
    text += "\n## Objects\n"
    for name, schema in sorted(found["components"]["schemas"].items()):
        text += f"\n### {_shown(name)}\n\n" + _schema(schema)
    return text


def _route(path: str, method: str, operation: dict[str, Any]) -> str:
    text = f"\n### {method} {path}\n\n" + paragraph(escaped(operation.get("description", "")))
    lines = []
    if body := operation.get("requestBody"):
        lines.append(f"- Body: {_type(body['content']['application/json']['schema'])}")
    answer = operation["responses"]["200"]
    content = answer.get("content", {})
    kinds = [
        _type(inner["schema"]) if kind == "application/json" and inner.get("schema") else code(kind)
        for kind, inner in content.items()
    ]
    said = answer.get("description", "")
    told = "" if said in ("", "Successful Response") else f": {escaped(said)}"
    lines.append(f"- Answer: {' or '.join(kinds) or 'no body'}{told}")
    if "security" not in operation:
        lines.append("- Needs no token")
    return text + "\n" + "\n".join(lines) + "\n"


def _schema(schema: dict[str, Any]) -> str:
    text = paragraph(escaped(schema["description"])) + "\n" if schema.get("description") else ""
    if "enum" in schema:
        return text + f"One of {_values(schema)}.\n"
    properties = schema.get("properties")
    if not properties:
        return text + f"{_type(schema) or 'An object'}.\n"
    required = set(schema.get("required", ()))
    fixed = defaultdict(list)
    for name, one in properties.items():
        if None in one.get("enum", ()):
            fixed[_type(one) or code("null")].append(name)
    ignored = [name for name, one in properties.items() if one.get("description") == _IGNORED]
    rows = [
        (code(name) + (" (required)" if name in required else ""), _bounded(one), escaped(one.get("description", "")))
        for name, one in properties.items()
        if None not in one.get("enum", ()) and name not in ignored
    ]
    if any(meaning for _, _, meaning in rows):
        text += table(("field", "type", "meaning"), rows)
    else:
        text += table(("field", "type"), [row[:2] for row in rows])
    if fixed:
        text += "\nThese fields are for clients that always send them. Another value than the one shown is refused.\n\n"
        text += table(("value", "fields"), [(value, ", ".join(map(code, names))) for value, names in fixed.items()])
    if ignored:
        text += "\n" + paragraph(f"Without effect: {', '.join(map(code, ignored))}.")
    return text


def _bounded(schema: dict[str, Any]) -> str:
    """A type with its bounds."""
    return ", ".join(part for part in (_type(schema), *_bounds(schema)) if part)


def _bounds(schema: dict[str, Any]) -> Iterator[str]:
    least, most = schema.get("minimum"), schema.get("maximum")
    for inner in schema.get("anyOf", ()):
        least = inner.get("minimum") if least is None else least
        most = inner.get("maximum") if most is None else most
    least, most = (None if bound is None or abs(bound) >= _LARGEST else f"{bound:g}" for bound in (least, most))
    if least is not None and most is not None:
        yield f"{least} to {most}"
    elif least is not None:
        yield f"from {least}"
    elif most is not None:
        yield f"up to {most}"
    if (items := schema.get("maxItems")) is not None:
        yield f"at most {items}"
    if schema.get("default") not in (None, "", [], {}):
        yield f"default {code(str(schema['default']))}"


def _type(schema: dict[str, Any]) -> str:
    if name := schema.get("$ref", "").rpartition("/")[2]:
        return f"[{code(_shown(name))}](#{anchor(_shown(name))})"
    if "enum" in schema:
        return _values(schema)
    if "const" in schema:
        return code(json.dumps(schema["const"]))
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            kinds = [_type(one) for one in schema[key] if one.get("type") != "null"]
            return " or ".join(dict.fromkeys(kind for kind in kinds if kind))
    kind = str(schema.get("type", ""))
    if kind == "array":
        inner = _type(schema.get("items", {}))
        return f"list of {inner}" if inner else "list"
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        inner = _type(schema["additionalProperties"])
        return f"map to {inner}" if inner else "object"
    return kind


def _values(schema: dict[str, Any]) -> str:
    return ", ".join(code(json.dumps(value)) for value in schema["enum"] if value is not None)


def _shown(name: str) -> str:
    """The shown name of an object; some objects have more fields in answers than in requests."""
    for end, where in (("-Input", " in requests"), ("-Output", " in answers")):
        if name.endswith(end):
            return name.removesuffix(end) + where
    return name
