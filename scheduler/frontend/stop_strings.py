"""Finds stop strings, and holds text back that may be the beginning of one."""

from collections.abc import Iterable


def first(stop: str, text: str, searched: int) -> int:
    """Returns where in a text a stop string begins that ends after `searched` characters; -1 if there is none."""
    return text.find(stop, max(0, searched - len(stop) + 1))


class StopStrings:
    """Takes text in chunks and returns it as soon as it cannot be part of a stop string."""

    def __init__(self, stops: Iterable[str], *, included: bool = False) -> None:
        """included: whether the text includes the stop string that ends it."""
        self._stops = tuple(stops)
        self._included = included
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""

    def push(self, text: str, *, may_end: bool = True) -> tuple[str, bool]:
        """Returns text that may be sent, and whether a stop string ends it.

        may_end: whether a stop string that ends in this text counts.
        """
        if not self._stops:
            return text, False
        searched, text = len(self._held), self._held + text
        found = [(at, at + len(stop)) for stop in self._stops if (at := first(stop, text, searched)) >= 0]
        if found and may_end:
            self._held = ""
            # Of several stop strings that begin at the same place, take the shortest.
            begin, end = min(found)
            return text[: end if self._included else begin], True
        keep = self._open_suffix(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> str:
        """Returns the text that was held back, at the end of the output."""
        text, self._held = self._held, ""
        return text

    def _open_suffix(self, text: str) -> int:
        """Returns the length of the longest suffix that begins a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            suffix = text[len(text) - length :]
            if any(stop.startswith(suffix) for stop in self._stops):
                return length
        return 0
