"""The forms in which models write calls, as recognized from their chat templates."""

import re
from collections.abc import Mapping

from scheduler.frontend.tool_calls.parser import Calls, Form, attempt, read_arguments, read_call, read_listed
from scheduler.frontend.tool_calls.python_call import read_python_call
from scheduler.frontend.tool_calls.source import MismatchError, Source, Steps

HERMES_BEGIN, HERMES_END = "<tool_call>", "</tool_call>"
_LLAMA_TAG = "<|python_tag|>"
_PYTHON_BEGIN, _PYTHON_END = "<|python_start|>", "<|python_end|>"
MISTRAL_BEGIN, _MISTRAL_ID, MISTRAL_ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
# Texts that mark calls and for which a tokenizer may have special tokens.
MARKERS = frozenset(
    {
        HERMES_BEGIN,
        HERMES_END,
        _LLAMA_TAG,
        _PYTHON_BEGIN,
        _PYTHON_END,
        MISTRAL_BEGIN,
        _MISTRAL_ID,
        MISTRAL_ARGUMENTS,
    }
)
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_MAX_NAME = 64


def hermes(source: Source, calls: Calls) -> Steps[None]:
    """Reads calls in tags, anywhere: <tool_call>{"name": "f", "arguments": {}}</tool_call>."""

    def tagged() -> Steps[None]:
        yield from source.expect(HERMES_BEGIN)
        yield from source.skip_space()
        yield from read_call(source, calls)

    def further() -> Steps[None]:
        yield from source.skip_space()
        if (yield from source.take(",")):
            yield from source.skip_space()
        yield from read_call(source, calls)

    while (yield from source.read_until(HERMES_BEGIN, calls.write)):
        if (yield from attempt(source, calls, tagged())):
            # Some models write several calls inside the tags of the first.
            while (yield from attempt(source, calls, further())):
                pass
            yield from source.skip_space()
            yield from source.take(HERMES_END)
        else:
            yield from source.expect(HERMES_BEGIN)
            calls.write(HERMES_BEGIN)


def llama3_json(source: Source, calls: Calls) -> Steps[None]:
    """Reads calls at the beginning, separated by semicolons: {"name": "f", "parameters": {}}."""

    def untagged() -> Steps[None]:
        yield from source.skip_space()
        if calls.num_begun:
            yield from source.take(";")
            yield from source.skip_space()
        yield from source.take(_LLAMA_TAG)
        yield from source.skip_space()
        yield from read_call(source, calls)

    while (yield from attempt(source, calls, untagged())):
        pass
    yield from source.read_rest(calls.write)


def pythonic(source: Source, calls: Calls) -> Steps[None]:
    """Reads a list of Python calls at the beginning: [f(a=1), g()]."""

    def first() -> Steps[None]:
        yield from source.skip_space()
        yield from source.take(_PYTHON_BEGIN)
        yield from source.skip_space()
        yield from source.expect("[")
        yield from source.skip_space()
        yield from read_python_call(source, calls)

    if (yield from attempt(source, calls, first())):
        yield from read_listed(source, calls, read_python_call)
        yield from source.skip_space()
        yield from source.take(_PYTHON_END)
    yield from source.read_rest(calls.write)


def mistral(source: Source, calls: Calls) -> Steps[None]:
    """Reads calls after a marker, anywhere: [TOOL_CALLS] [{"name": "f", "arguments": {}}] or [TOOL_CALLS]f[ARGS]{}."""

    def first() -> Steps[None]:
        yield from source.expect(MISTRAL_BEGIN)
        match (yield from source.skip_space()):
            case "[":
                yield from source.expect("[")
                yield from source.skip_space()
                yield from read_call(source, calls)
            case "{":
                yield from read_call(source, calls)
            case _:
                yield from by_name()

    def by_name() -> Steps[None]:
        name = yield from source.read(_NAME, _MAX_NAME)
        if name not in calls.names:
            raise MismatchError
        if (yield from source.take(_MISTRAL_ID)):
            yield from source.read(_NAME, _MAX_NAME)
        yield from source.take(MISTRAL_ARGUMENTS)
        yield from read_arguments(source, calls, name)

    while (yield from source.read_until(MISTRAL_BEGIN, calls.write)):
        if (yield from attempt(source, calls, first())):
            yield from read_listed(source, calls, read_call)
        else:
            yield from source.expect(MISTRAL_BEGIN)
            calls.write(MISTRAL_BEGIN)


def required(source: Source, calls: Calls) -> Steps[None]:
    """Reads the form that a required choice of any tool forces: [{"name": "f", "parameters": {}}]."""

    def first() -> Steps[None]:
        yield from source.skip_space()
        yield from source.expect("[")
        yield from source.skip_space()
        yield from read_call(source, calls)

    if (yield from attempt(source, calls, first())):
        yield from read_listed(source, calls, read_call)
    yield from source.read_rest(calls.write)


def named(source: Source, calls: Calls) -> Steps[None]:
    """Reads the form that the choice of one tool forces: its parameters."""
    [name] = calls.names
    yield from attempt(source, calls, read_arguments(source, calls, name))
    yield from source.read_rest(calls.write)


# The forms by their names in settings.
FORMS: Mapping[str, Form] = {
    "hermes": hermes,
    "llama3_json": llama3_json,
    "pythonic": pythonic,
    "mistral": mistral,
}
# Marks of templates with other forms. Such a template may also contain one of _MARKS.
_OTHERS = re.compile(r"<function=|<arg_key>|<function_calls>")
_MARKS: tuple[tuple[str, str], ...] = (
    ("mistral", r"\[TOOL_CALLS\]"),
    ("hermes", r"<tool_call>"),
    ("pythonic", r"\[func_name1\(|<\|python_start\|>"),
    ("llama3_json", r"<\|python_tag\|>|\{\"name\": function name, \"parameters\":"),
)


def form_of(template: str) -> str:
    """Returns the name of the form that a chat template shows; empty if it shows none of these."""
    if _OTHERS.search(template):
        return ""
    return next((name for name, mark in _MARKS if re.search(mark, template)), "")
