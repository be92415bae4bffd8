"""Renders conversations with a model's chat template, as transformers does."""

import json
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Nobody writes it: a character for private use.
_MARK = "\ue000"


class ChatTemplateError(ValueError):
    """The template cannot render these messages."""


class UnreadFieldError(ValueError):
    """The template leaves out a field of a message. message: its index."""

    def __init__(self, message: int, field: str) -> None:
        super().__init__(f"the template does not read {field} of message {message}")
        self.message = message
        self.field = field


class ChatTemplate:
    """A compiled template. Templates come with the model and are not trusted: they run in jinja's sandbox."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._template = environment.from_string(source)
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt of a conversation, up to where the model answers.

        A message has a role and a content, and may have a name and a reasoning; templates read the latter as
        reasoning_content, too. Raises ChatTemplateError, and UnreadFieldError for a field that would be lost.
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
                # A template may tell roles apart by their order.
                if text and field != "role" and not seen.has_read(field):
                    raise UnreadFieldError(index, field)
        return prompt

    def position(self, prompt: str, messages: Sequence[Mapping[str, str]], index: int, characters: int) -> int:
        """Characters of the messages' prompt in front of a place in one of them. Raises ChatTemplateError."""
        content = messages[index]["content"]
        marked = {**messages[index], "content": f"{content[:characters]}{_MARK}{content[characters:]}"}
        # The first difference is the place, whatever the template puts around it.
        other = self.render([*messages[:index], marked, *messages[index + 1 :]])
        return bisect_left(range(1, len(prompt) + 1), True, key=lambda length: prompt[:length] != other[:length])


class _Message(dict[str, str]):
    """A message that notes which of its fields a template reads."""

    # Behind an underscore, so that the sandbox lets no template see it.
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
    # jinja's own filter escapes HTML, which no model was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
