"""Functions for writing the generated pages."""

import textwrap
from collections.abc import Iterable, Sequence

GENERATED = "<!-- Written by make reference. -->\n\n"


def escaped(text: str) -> str:
    """A text in one line that no renderer takes for HTML, for a column's end or for emphasis."""
    text = " ".join(text.split())
    for sign, shown in (("<", "&lt;"), ("|", "&#124;"), ("*", r"\*")):
        text = text.replace(sign, shown)
    return text


def code(text: str) -> str:
    """A text as code, also in a table, where renderers differ about a | in code."""
    return f"`{text.replace('|', ', ')}`"


def first_sentence(text: str) -> str:
    """The beginning of a text up to its first full stop."""
    return text.partition(". ")[0].removesuffix(".") + "."


def paragraph(text: str) -> str:
    """Markdown in lines of ordinary length."""
    return textwrap.fill(" ".join(text.split()), 120, break_long_words=False, break_on_hyphens=False) + "\n"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| {} |\n".format(" | ".join(line)) for line in lines)


def anchor(heading: str) -> str:
    """The anchor of a heading of letters, digits, spaces and /."""
    return "".join(sign for sign in heading.lower().replace(" ", "-") if sign.isalnum() or sign in "-_")
