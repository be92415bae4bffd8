"""Renders conversations with a model's chat template, as transformers does."""

import json
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

# A private-use character, which no prompt contains.
_MARK = "\ue000"
# Fields that a template may leave out: order may imply roles, and the order of answers may imply their calls.
_DISPENSABLE = frozenset({"role", "tool_call_id"})
# Variables that templates get from the server besides special tokens, and parameters of transformers' renderer.
_OWN_VARIABLES = frozenset(
    ["messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize"]
)


class ChatTemplateError(ValueError):
    """The template cannot render these messages."""


class UnreadFieldError(ValueError):
    """The template does not read a field of a message. message: its index."""

    def __init__(self, message: int, field: str) -> None:
        super().__init__(f"the template does not read {field} of message {message}")
        self.message = message
        self.field = field


class Rendering(NamedTuple):
    """How to render a conversation.

    add_generation_prompt: whether the beginning of an answer follows. continue_final_message: whether the prompt ends
    with the content of the last message. arguments: variables that the template may read. tools: tools that the answer
    may call.
    """

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    arguments: Mapping[str, object] = MappingProxyType({})
    tools: Sequence[Mapping[str, Any]] = ()


# With the beginning of an answer.
ASKING = Rendering()


class ChatTemplate:
    """A compiled template, run in Jinja's sandbox: templates come with the model and are not trusted."""

    def __init__(self, source: str, special_tokens: Mapping[str, Any], *, drops_reasoning: bool = False) -> None:
        """drops_reasoning: whether the template may leave out messages' reasoning. Raises jinja2.TemplateError."""
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._template = environment.from_string(source)
        read = environment.parse(source).find_all(nodes.Name)
        self.reads_tools = any(name.name == "tools" and name.ctx == "load" for name in read)
        self._special_tokens = dict(special_tokens)
        self._dispensable = _DISPENSABLE | {"reasoning"} if drops_reasoning else _DISPENSABLE

    def reserves(self, name: str) -> bool:
        """Returns whether callers may not set a variable."""
        return name in _OWN_VARIABLES or name in self._special_tokens

    def render(self, messages: Sequence[Mapping[str, Any]], how: Rendering = ASKING) -> str:
        """Renders the prompt of a conversation.

        A message has role and content, and may have name, reasoning, tool_calls and tool_call_id; templates also read
        reasoning as reasoning_content. Raises ChatTemplateError, or UnreadFieldError for a field that the prompt would
        lack.
        """
        prompt = self._render(messages, how)
        if not how.continue_final_message:
            return prompt
        last = len(messages) - 1
        other = self._render(_marked(messages, last, len(messages[last]["content"])), how)
        if other == prompt:
            raise ChatTemplateError("it leaves out the final message, which cannot be continued")
        return prompt[: _first_difference(prompt, other)]

    def _render(self, messages: Sequence[Mapping[str, Any]], how: Rendering) -> str:
        said = [_Message(message) for message in messages]
        try:
            prompt = self._template.render(
                how.arguments,
                messages=said,
                add_generation_prompt=how.add_generation_prompt,
                tools=list(how.tools) or None,
                documents=None,
                **self._special_tokens,
            )
        except Exception as error:  # Templates compute with what callers give, and also raise Python errors.
            raise ChatTemplateError(str(error)) from error
        for index, (message, seen) in enumerate(zip(messages, said, strict=True)):
            for field, value in message.items():
                # The name of an answering tool is known from its call.
                is_dispensable = field in self._dispensable or (field == "name" and message["role"] == "tool")
                if value and not is_dispensable and not seen.has_read(field):
                    raise UnreadFieldError(index, field)
        return prompt

    def position(
        self, prompt: str, messages: Sequence[Mapping[str, Any]], index: int, characters: int, how: Rendering = ASKING
    ) -> int:
        """Returns the number of prompt characters before a position in a message. Raises ChatTemplateError.

        index: of the message. characters: number of characters of the message's content before the position.
        """
        return _first_difference(prompt, self.render(_marked(messages, index, characters), how))


def _marked(messages: Sequence[Mapping[str, Any]], index: int, characters: int) -> Sequence[Mapping[str, Any]]:
    """Returns the messages with a mark after `characters` characters of one of them."""
    content = messages[index]["content"]
    marked = {**messages[index], "content": f"{content[:characters]}{_MARK}{content[characters:]}"}
    return [*messages[:index], marked, *messages[index + 1 :]]


def _first_difference(prompt: str, other: str) -> int:
    return bisect_left(range(1, len(prompt) + 1), True, key=lambda length: prompt[:length] != other[:length])


class _Message(dict[str, Any]):
    """A message that records which of its fields a template reads."""

    # The sandbox hides names with an underscore from templates.
    __slots__ = ("_read",)

    def __init__(self, message: Mapping[str, Any]) -> None:
        super().__init__(message)
        if "reasoning" in message:
            super().__setitem__("reasoning_content", message["reasoning"])
        self._read: set[object] = set()

    def has_read(self, field: str) -> bool:
        return field in self._read or (field == "reasoning" and "reasoning_content" in self._read)

    def __getitem__(self, field: str) -> Any:
        self._read.add(field)
        return super().__getitem__(field)

    def __contains__(self, field: object) -> bool:
        self._read.add(field)
        return super().__contains__(field)

    def get(self, field: str, default: Any = None) -> Any:
        self._read.add(field)
        return super().get(field, default)

    def __iter__(self) -> Iterator[str]:
        self._read.update(super().keys())
        return super().__iter__()

    def keys(self) -> Any:
        self._read.update(super().keys())
        return super().keys()

    def values(self) -> Any:
        self._read.update(super().keys())
        return super().values()

    def items(self) -> Any:
        self._read.update(super().keys())
        return super().items()


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    # Jinja's own filter escapes HTML, and no model was trained on escaped HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
