"""Tools as callers define them, and calls in a conversation: checked, and converted for chat templates."""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

from protos.generation.v1 import generation_pb2 as pb
from protos.rpc.errors import InvalidField

MAX_TOOLS = 128
MAX_TOOLS_BYTES = 256 << 10
# Most calls of one message.
MAX_CALLS = 128
MAX_CALL_ID_BYTES = 256
# Most nesting of a tool and of arguments, and most JSON marks in all arguments together: each takes memory.
MAX_LEVELS, MAX_MARKS = 64, 1 << 18
NAME_PATTERN = "^[a-zA-Z0-9_-]{1,64}$"
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_NAME_RULE = 'must be 1 to 64 letters, digits, "_" and "-"'
_MARKS = ",:[{"


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call.

    definition: as templates read it. parameters: a JSON schema of an object. strict: whether arguments must fit it.
    """

    name: str
    definition: dict[str, Any]
    parameters: dict[str, Any]
    strict: bool = False


def read_tools(chat: pb.ChatInput) -> list[Tool]:
    """Returns the tools of a conversation. Raises InvalidField."""
    if len(chat.tools) > MAX_TOOLS:
        raise InvalidField("chat.tools", f"has more than {MAX_TOOLS} entries")
    if sum(len(text.encode()) for text in chat.tools) > MAX_TOOLS_BYTES:
        raise InvalidField("chat.tools", f"have more than {MAX_TOOLS_BYTES} bytes")
    tools: list[Tool] = []
    names: set[str] = set()
    for index, text in enumerate(chat.tools):
        tool = _tool(f"chat.tools[{index}]", text)
        if tool.name in names:
            raise InvalidField(f"chat.tools[{index}].function.name", "is the name of another tool, too")
        names.add(tool.name)
        tools.append(tool)
    return tools


def check_choice(chat: pb.ChatInput, tools: list[Tool]) -> None:
    """Raises InvalidField if the choice of tools does not fit the tools."""
    if chat.tool_choice not in pb.ToolChoice.values():
        raise InvalidField("chat.tool_choice", "is unknown")
    if chat.tool_choice == pb.TOOL_CHOICE_REQUIRED and not tools:
        raise InvalidField("chat.tool_choice", "needs tools")
    if chat.tool_name:
        if chat.tool_choice != pb.TOOL_CHOICE_REQUIRED:
            raise InvalidField("chat.tool_name", "is only for a required choice")
        if all(tool.name != chat.tool_name for tool in tools):
            raise InvalidField("chat.tool_name", "is the name of none of the tools")


def read_calls(field: str, message: pb.ChatMessage) -> dict[str, Any]:
    """Returns a message's calls and the id of the call that it answers, for templates. Raises InvalidField."""
    if message.tool_calls and message.role != "assistant":
        raise InvalidField(f"{field}.tool_calls", "are only for messages of the role assistant")
    if len(message.tool_calls) > MAX_CALLS:
        raise InvalidField(f"{field}.tool_calls", f"has more than {MAX_CALLS} entries")
    if message.tool_call_id and message.role != "tool":
        raise InvalidField(f"{field}.tool_call_id", "is only for messages of the role tool")
    if message.role == "tool":
        if not message.tool_call_id:
            raise InvalidField(f"{field}.tool_call_id", "is missing")
        _check_id(f"{field}.tool_call_id", message.tool_call_id)
        return {"tool_call_id": message.tool_call_id}
    calls = [_call(f"{field}.tool_calls[{index}]", call) for index, call in enumerate(message.tool_calls)]
    return {"tool_calls": calls} if calls else {}


def name_answers(messages: Iterable[dict[str, Any]]) -> None:
    """Gives messages that answer a call the name of its function, which some templates want and few callers send."""
    names: dict[str, str] = {}
    for message in messages:
        names |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls", ())}
        if (name := names.get(message.get("tool_call_id", ""))) is not None:
            message.setdefault("name", name)


def check_marks(chat: pb.ChatInput) -> None:
    """Raises InvalidField if the arguments of all calls have too many values to be read."""
    texts = (call.function.arguments for message in chat.messages for call in message.tool_calls)
    if sum(text.count(mark) for text in texts for mark in _MARKS) > MAX_MARKS:
        raise InvalidField(
            "chat.messages", f"have arguments with more than {MAX_MARKS} commas, colons and opening brackets"
        )


def _call(field: str, call: pb.ToolCall) -> dict[str, Any]:
    if not call.id:
        raise InvalidField(f"{field}.id", "is missing")
    _check_id(f"{field}.id", call.id)
    if not _NAME.fullmatch(call.function.name):
        raise InvalidField(f"{field}.function.name", _NAME_RULE)
    arguments = _object(f"{field}.function.arguments", call.function.arguments or "{}")
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def _check_id(field: str, call_id: str) -> None:
    if len(call_id.encode()) > MAX_CALL_ID_BYTES:
        raise InvalidField(field, f"has more than {MAX_CALL_ID_BYTES} bytes")


def _tool(field: str, text: str) -> Tool:
    tool = _object(field, text)
    if tool.get("type") != "function":
        raise InvalidField(f"{field}.type", 'must be "function"')
    function = _optional(tool, field, "function", dict, "an object") or {}
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidField(f"{field}.function.name", _NAME_RULE)
    description = _optional(function, f"{field}.function", "description", str, "a text")
    parameters = _optional(function, f"{field}.function", "parameters", dict, "an object")
    strict = _optional(function, f"{field}.function", "strict", bool, "true or false")
    for path, part, known in (
        (field, tool, ("type", "function")),
        (f"{field}.function", function, ("name", "description", "parameters", "strict", "return")),
    ):
        for key, value in part.items():
            if key not in known and value is not None:
                raise InvalidField(f"{path}.{key[:64]}", "is not a field")
    if parameters is not None and parameters.get("type", "object") != "object":
        raise InvalidField(f"{field}.function.parameters.type", 'must be "object"')
    described = {"name": name} | ({} if description is None else {"description": description})
    # Many templates take parameters for granted.
    described["parameters"] = {"type": "object", "properties": {}} if parameters is None else parameters
    if parameters is None:
        parameters = described["parameters"] | {"additionalProperties": False}
    if function.get("return") is not None:
        described["return"] = function["return"]
    return Tool(name, {"type": "function", "function": described}, parameters, strict=bool(strict))


def _optional(parent: dict[str, Any], path: str, name: str, kind: type, said: str) -> Any:
    """Returns a field's value; None if it is absent or null. Raises InvalidField for a wrong type."""
    value = parent.get(name)
    if value is not None and not isinstance(value, kind):
        raise InvalidField(f"{path}.{name}", f"must be {said}")
    return value


def _object(field: str, text: str) -> dict[str, Any]:
    """Returns the object of a JSON text. Raises InvalidField."""
    try:
        value = json.loads(text, parse_constant=_refuse)
        # Refuses numbers and texts that cannot be written in a prompt.
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise InvalidField(field, "must be JSON text of an object")
    if not _is_flat(value, MAX_LEVELS):
        raise InvalidField(field, f"is nested more than {MAX_LEVELS} levels deep")
    return value


def _is_flat(value: object, levels: int) -> bool:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels > 0 and all(_is_flat(item, levels - 1) for item in items if isinstance(item, dict | list))


def _refuse(_constant: str) -> NoReturn:
    raise ValueError
