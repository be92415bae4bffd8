"""The JSON schema of an output that is nothing but calls."""

import json
from collections.abc import Sequence
from typing import Any

from protos.kvcommon.json_schema import rewritten
from scheduler.frontend.tool_calls.definitions import Tool


def forced_calls_schema(tools: Sequence[Tool], name: str, *, single: bool) -> str:
    """JSON text of the schema: of the parameters of the tool with a name; of an array of calls where it is empty."""
    schema = _parameters(tools, name) if name else _array(tools, single=single)
    return json.dumps(schema, ensure_ascii=False)


def _parameters(tools: Sequence[Tool], name: str) -> dict[str, Any]:
    return next(_of_object(tool) for tool in tools if tool.name == name)


def _array(tools: Sequence[Tool], *, single: bool) -> dict[str, Any]:
    bounds = {"minItems": 1} | ({"maxItems": 1} if single else {})
    return {
        "type": "array",
        **bounds,
        "items": {"anyOf": [_call(tool.name) for tool in tools]},
        "$defs": {tool.name: _moved(_of_object(tool), f"#/$defs/{tool.name}") for tool in tools},
    }


def _call(name: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "parameters": {"$ref": f"#/$defs/{name}"}},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _of_object(tool: Tool) -> dict[str, Any]:
    return {"type": "object"} | tool.parameters


def _moved(schema: Any, place: str) -> Any:
    """A schema whose references to itself lead to its place in another one."""

    def change(found: dict[str, Any]) -> dict[str, Any]:
        reference = found.get("$ref")
        if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
            return found | {"$ref": place + reference[1:]}
        return found

    return rewritten(schema, change)
