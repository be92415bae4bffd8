"""The parts of an assistant's output: its reasoning, its content and its tool calls."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field

from scheduler.frontend.tool_calls.forms import FORMS, MARKERS, form_of, named, required
from scheduler.frontend.tool_calls.parser import CallPiece, FormParser
from scheduler.frontend.tool_calls.source import Source, Steps
from scheduler.request import ToolUse

THINK_BEGIN, THINK_END = "<think>", "</think>"


@dataclass
class OutputPiece:
    """What a piece of text adds to an output."""

    reasoning: str = ""
    content: str = ""
    calls: list[CallPiece] = field(default_factory=list)

    def add(self, found: Iterable[str | CallPiece]) -> None:
        """Adds content and calls."""
        for one in found:
            if isinstance(one, str):
                self.content += one
            elif self.calls and self.calls[-1].index == one.index:
                self.calls[-1].arguments += one.arguments
            else:
                self.calls.append(one)


@dataclass(frozen=True, slots=True)
class OutputForms:
    """The forms of a model's output. calls: the form's name; empty if not known; "none" leaves calls in the content."""

    calls: str
    thinks: bool

    @classmethod
    def of(cls, template: str, *, calls: str = "auto", reasoning: str = "auto") -> OutputForms:
        """Returns the forms that a chat template shows, unless settings name them."""
        return cls(
            calls=form_of(template) if calls == "auto" else calls,
            thinks=THINK_END in template if reasoning == "auto" else reasoning == "think_tags",
        )

    def new_call_id(self) -> str:
        """Returns an id for a call; Mistral's templates require nine characters."""
        return secrets.token_hex(5)[:9] if self.calls == "mistral" else f"call_{secrets.token_hex(12)}"

    @property
    def has_calls(self) -> bool:
        """Whether calls are found in free text."""
        return self.calls in FORMS

    def marks_calls(self, special_tokens: Iterable[str]) -> bool:
        """Returns whether one of a model's special tokens marks calls."""
        return self.has_calls and not MARKERS.isdisjoint(special_tokens)

    def marks_reasoning(self, special_tokens: Iterable[str]) -> bool:
        """Returns whether one of a model's special tokens begins or ends the reasoning."""
        return self.thinks and not {THINK_BEGIN, THINK_END}.isdisjoint(special_tokens)


class OutputParser:
    """Parses an output's text, which comes in pieces. However the text is split, the output is the same."""

    def __init__(self, forms: OutputForms, use: ToolUse, *, is_thinking: bool, is_forced: bool = False) -> None:
        """is_thinking: whether the prompt begins the reasoning. is_forced: whether all output has a given form."""
        is_forced = is_forced or use.is_required
        self._tools = _tool_parser(forms, use, is_forced=is_forced)
        thinks = forms.thinks and not is_forced
        self._reasoning = _Reasoning(is_thinking=is_thinking) if thinks else None

    @property
    def num_complete(self) -> int:
        """Calls that have ended."""
        return 0 if self._tools is None else self._tools.num_complete

    def push(self, text: str, *, last: bool = False) -> OutputPiece:
        """Returns what a piece of the text adds; the last piece also releases what was held back."""
        piece = OutputPiece()
        if self._reasoning is not None:
            piece.reasoning, text = self._reasoning.push(text, last=last)
        if self._tools is None:
            piece.content = text
        else:
            piece.add(self._tools.push(text))
            piece.add(self._tools.flush() if last else ())
        return piece


def _tool_parser(forms: OutputForms, use: ToolUse, *, is_forced: bool) -> FormParser | None:
    if use.is_required:
        return FormParser(named, [use.name]) if use.name else FormParser(required, use.names, single=use.single)
    has_calls = use.names and forms.has_calls and not is_forced
    return FormParser(FORMS[forms.calls], use.names, single=use.single) if has_calls else None


class _Reasoning:
    """Separates the text in <think> tags at the beginning from the rest. White space around the tags is dropped."""

    def __init__(self, *, is_thinking: bool) -> None:
        self._source = Source()
        self._is_thinking = is_thinking
        self._steps = self._read()
        self._reasoning: list[str] = []
        self._content: list[str] = []
        # White space that may be next to the end of the reasoning.
        self._space = ""

    def push(self, text: str, *, last: bool) -> tuple[str, str]:
        """Returns reasoning, and the text after it."""
        self._source.push(text)
        if last:
            self._source.end()
        next(self._steps, None)
        reasoning, content = "".join(self._reasoning), "".join(self._content)
        self._reasoning.clear()
        self._content.clear()
        return reasoning, content

    def _read(self) -> Steps[None]:
        source = self._source
        source.mark()
        yield from source.skip_space()
        if not (yield from source.take(THINK_BEGIN)) and not self._is_thinking:
            source.rewind()
            source.release()
        else:
            source.release()
            yield from source.skip_space()
            if (yield from source.read_until(THINK_END, self._think)):
                yield from source.take(THINK_END)
                yield from source.skip_space()
        yield from source.read_rest(self._content.append)

    def _think(self, text: str) -> None:
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        if kept:
            self._reasoning.append(kept)
