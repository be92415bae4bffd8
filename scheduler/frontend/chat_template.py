"""Renders conversations with a model's chat template, as transformers does."""

import json
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

# A character for private use, which no prompt has.
_MARK = "\ue000"


class ChatTemplateError(ValueError):
    """The template cannot render these messages."""


class UnreadFieldError(ValueError):
    """The template does not read a field of a message. message: its index."""

    def __init__(self, message: int, field: str) -> None:
        super().__init__(f"the template does not read {field} of message {message}")
        self.message = message
        self.field = field


class ChatTemplate:
    """A compiled template, run in jinja's sandbox: templates come with the model and are not trusted."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._template = environment.from_string(source)
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt of a conversation, up to the model's answer.

        A message has role and content, and may have name and reasoning; templates read the latter also as
        reasoning_content. Raises ChatTemplateError, and UnreadFieldError for a field that the prompt would lack.
        """
        said = [_Message(message) for message in messages]
        try:
            prompt = self._template.render(
                messages=said, add_generation_prompt=True, tools=None, documents=None, **self._special_tokens
            )
        except jinja2.TemplateError as error:
            raise ChatTemplateError(str(error)) from error
        for index, (message, seen) in enumerate(zip(messages, said, strict=True)):
            for field, text in message.items():
                # A template may know roles by their order.
                if text and field != "role" and not seen.has_read(field):
                    raise UnreadFieldError(index, field)
        return prompt

    def position(self, prompt: str, messages: Sequence[Mapping[str, str]], index: int, characters: int) -> int:
        """Characters of the prompt in front of a position in a message. Raises ChatTemplateError."""
        content = messages[index]["content"]
        marked = {**messages[index], "content": f"{content[:characters]}{_MARK}{content[characters:]}"}
        # The prompts first differ there.
        other = self.render([*messages[:index], marked, *messages[index + 1 :]])
        return bisect_left(range(1, len(prompt) + 1), True, key=lambda length: prompt[:length] != other[:length])


class _Message(dict[str, str]):
    """A message that records which of its fields a template reads."""

    # The sandbox hides names with an underscore from templates.
    __slots__ = ("_read",)

    def __init__(self, message: Mapping[str, str]) -> None:
        super().__init__(message)
        if "reasoning" in message:
            super().__setitem__("reasoning_content", message["reasoning"])
        self._read: set[object] = set()

    def has_read(self, field: str) -> bool:
        return field in self._read or (field == "reasoning" and "reasoning_content" in self._read)

    def __getitem__(self, field: str) -> str:
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
    # jinja's own filter escapes HTML, and no model was trained on that.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
