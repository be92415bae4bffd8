"""Renders conversations with a model's chat template, as transformers does."""

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Nobody writes it: a character for private use.
_MARK = "\ue000"


class ChatTemplateError(ValueError):
    """The template cannot render these messages."""


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
        """The prompt of a conversation, up to where the model answers. Raises ChatTemplateError."""
        try:
            return self._template.render(
                messages=list(messages), add_generation_prompt=True, tools=None, documents=None, **self._special_tokens
            )
        except jinja2.TemplateError as error:
            raise ChatTemplateError(str(error)) from error

    def position(self, prompt: str, messages: Sequence[Mapping[str, str]], index: int, characters: int) -> int:
        """Characters of the messages' prompt in front of a place in one of them. Raises ChatTemplateError."""
        content = messages[index]["content"]
        marked = {**messages[index], "content": f"{content[:characters]}{_MARK}{content[characters:]}"}
        # The first difference is the place, whatever the template puts around it.
        other = self.render([*messages[:index], marked, *messages[index + 1 :]])
        return bisect_left(range(1, len(prompt) + 1), True, key=lambda length: prompt[:length] != other[:length])


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    # jinja's own filter escapes HTML, which no model was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
