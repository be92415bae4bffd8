"""Calls of strict tools in free text, as structural tags: a call that begins is valid to its end."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from protos.kvcommon.v1 import kvcommon_pb2 as common
from scheduler.frontend.tool_calls.definitions import Tool
from scheduler.frontend.tool_calls.forms import HERMES_BEGIN, HERMES_END, MISTRAL_ARGUMENTS, MISTRAL_BEGIN
from scheduler.frontend.tool_calls.schema import arguments_schema, listed_calls_schema

# In a template's source, a line break may be written as an escape.
_BREAK = re.compile(rf"{HERMES_BEGIN}(\\n|\n)")


def strict_calls(tools: Sequence[Tool], form: str, template: str, *, single: bool) -> common.StructuralTags | None:
    """Returns the tags of calls in a form of FORMS, as a chat template shows it.

    Tools that are not strict may have any arguments. single: only one call is wanted. None without a strict tool, and
    for forms other than hermes and mistral.
    """
    if not any(tool.strict for tool in tools):
        return None
    loosened = [tool if tool.strict else replace(tool, parameters={}) for tool in tools]
    match form:
        case "hermes":
            return common.StructuralTags(tags=_hermes(loosened, template), triggers=[HERMES_BEGIN])
        case "mistral":
            return common.StructuralTags(tags=_mistral(loosened, template, single=single), triggers=[MISTRAL_BEGIN])
    return None


def _hermes(tools: Sequence[Tool], template: str) -> Iterator[common.StructuralTag]:
    space = "\n" if _BREAK.search(template) else ""
    for tool in tools:
        begin = f'{HERMES_BEGIN}{space}{{"name": "{tool.name}", "arguments": '
        yield common.StructuralTag(begin=begin, json_schema=arguments_schema(tool), end=f"}}{space}{HERMES_END}")


def _mistral(tools: Sequence[Tool], template: str, *, single: bool) -> Iterator[common.StructuralTag]:
    if MISTRAL_ARGUMENTS in template:
        for tool in tools:
            begin = f"{MISTRAL_BEGIN}{tool.name}{MISTRAL_ARGUMENTS}"
            yield common.StructuralTag(begin=begin, json_schema=arguments_schema(tool))
    else:
        begin = MISTRAL_BEGIN + (" " if f"{MISTRAL_BEGIN} " in template else "")
        yield common.StructuralTag(begin=begin, json_schema=listed_calls_schema(tools, "arguments", single=single))
