"""Text that arrives in pieces, for parsers that are generators: they yield when they need more text."""

import re
from collections.abc import Callable, Generator
from typing import TypeAlias, TypeVar

T = TypeVar("T")
Steps: TypeAlias = Generator[None, None, T]
Write: TypeAlias = Callable[[str], object]

_SPACE = re.compile(r"\s*")


class MismatchError(Exception):
    """The text does not have the form that a parser reads."""


class Source:
    """The text after a cursor. A parser gets the same text however it is split."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        # Where an attempt began: text from there on is kept.
        self._mark: int | None = None
        self._has_ended = False

    def push(self, text: str) -> None:
        start = self._at if self._mark is None else self._mark
        self._text = self._text[start:] + text
        self._at -= start
        if self._mark is not None:
            self._mark = 0

    def end(self) -> None:
        """Ends the text: parsers no longer yield."""
        self._has_ended = True

    def mark(self) -> None:
        """Makes `rewind` lead back to this place, until `release`."""
        self._mark = self._at

    def release(self) -> None:
        self._mark = None

    def rewind(self) -> None:
        if self._mark is not None:
            self._at = self._mark

    def peek(self) -> Steps[str]:
        """Returns the next character without consuming it; empty at the end."""
        while self._at == len(self._text) and not self._has_ended:
            yield
        return self._text[self._at : self._at + 1]

    def skip_space(self) -> Steps[str]:
        """Skips white space; returns the next character like `peek`."""
        while True:
            self.match(_SPACE)
            if self._at < len(self._text) or self._has_ended:
                return self._text[self._at : self._at + 1]
            yield

    def take(self, literal: str) -> Steps[bool]:
        """Consumes a text if it follows; returns whether it did."""
        while literal.startswith(self._text[self._at : self._at + len(literal)]):
            if self._text.startswith(literal, self._at):
                self._at += len(literal)
                return True
            if self._has_ended:
                break
            yield
        return False

    def expect(self, literal: str) -> Steps[None]:
        """Consumes a text. Raises MismatchError if different text follows."""
        if not (yield from self.take(literal)):
            raise MismatchError

    def match(self, pattern: re.Pattern[str]) -> str:
        """Consumes and returns what a pattern matches in the text so far; empty if nothing matches."""
        found = pattern.match(self._text, self._at)
        if found is None:
            return ""
        self._at = found.end()
        return found[0]

    def read(self, pattern: re.Pattern[str], most: int) -> Steps[str]:
        """Consumes and returns what a repeating pattern matches. Raises MismatchError for more than `most`."""
        text = self.match(pattern)
        while self._at == len(self._text) and not self._has_ended and len(text) <= most:
            yield
            text += self.match(pattern)
        if len(text) > most:
            raise MismatchError
        return text

    def following(self, count: int) -> Steps[str]:
        """Consumes and returns the next characters. Raises MismatchError if the text ends within them."""
        while len(self._text) - self._at < count:
            if self._has_ended:
                # The truncated characters belong to the text that was read before them.
                self._at = len(self._text)
                raise MismatchError
            yield
        self._at += count
        return self._text[self._at - count : self._at]

    def read_until(self, marker: str, write: Write) -> Steps[bool]:
        """Writes the text up to a marker, where the cursor stays; returns False if the text ends without a marker."""
        while True:
            found = self._text.find(marker, self._at)
            end = found if found >= 0 else len(self._text) - (0 if self._has_ended else self._open_suffix(marker))
            if end > self._at:
                write(self._text[self._at : end])
                self._at = end
            if found >= 0:
                return True
            if self._has_ended:
                return False
            yield

    def read_rest(self, write: Write) -> Steps[None]:
        """Writes all text up to the end."""
        while (yield from self.peek()):
            write(self._text[self._at :])
            self._at = len(self._text)

    def _open_suffix(self, marker: str) -> int:
        """Returns the length of the text's longest suffix that begins the marker."""
        left = len(self._text) - self._at
        lengths = range(min(len(marker) - 1, left), 0, -1)
        return next((length for length in lengths if self._text.endswith(marker[:length])), 0)
