"""JSON schemas of calls."""

import json
from collections.abc import Sequence
from typing import Any

from protos.kvcommon.json_schema import rewritten
from scheduler.frontend.tool_calls.definitions import Tool


def forced_calls_schema(tools: Sequence[Tool], name: str, *, single: bool) -> str:
    """Returns the JSON schema, as text, of an output that calls tools.

    name: of a tool: the output is the arguments of one call of this tool. If the name is empty, the output is an array,
    and each item is a call.
    """
    if name:
        return arguments_schema(next(tool for tool in tools if tool.name == name))
    return listed_calls_schema(tools, "parameters", single=single)


def arguments_schema(tool: Tool) -> str:
    """Returns the JSON schema, as text, of a tool's arguments."""
    return json.dumps(_of_object(tool), ensure_ascii=False)


def listed_calls_schema(tools: Sequence[Tool], field: str, *, single: bool) -> str:
    """Returns the JSON schema, as text, of an array of calls. field: the field of a call with its arguments."""
    bounds = {"minItems": 1} | ({"maxItems": 1} if single else {})
    schema = {
        "type": "array",
        **bounds,
        "items": {"anyOf": [_call(tool.name, field) for tool in tools]},
        "$defs": {tool.name: _moved(_of_object(tool), f"#/$defs/{tool.name}") for tool in tools},
    }
    return json.dumps(schema, ensure_ascii=False)


def _call(name: str, field: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, field: {"$ref": f"#/$defs/{name}"}},
        "required": ["name", field],
        "additionalProperties": False,
    }


def _of_object(tool: Tool) -> dict[str, Any]:
    return {"type": "object"} | tool.parameters


def _moved(schema: dict[str, Any], place: str) -> Any:
    """Returns the schema with its references to itself redirected to its place in an enclosing schema."""
    own = schema.get("$id")

    def change(found: dict[str, Any]) -> dict[str, Any]:
        if isinstance(reference := found.get("$ref"), str):
            document, _, pointer = reference.partition("#")
            if document in ("", own) and (not pointer or pointer.startswith("/")):
                return found | {"$ref": place + pointer}
        return found

    # With an $id, the moved schema's references would resolve against this $id and miss the new place.
    return rewritten({keyword: value for keyword, value in schema.items() if keyword != "$id"}, change)
