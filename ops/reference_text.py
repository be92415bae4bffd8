"""Functions for writing the generated pages."""

import textwrap
from collections.abc import Iterable, Sequence

GENERATED = "<!-- Written by make reference. -->\n\n"


def escaped(text: str) -> str:
    """Returns the text in one line, with the signs escaped that Markdown takes for HTML, columns or emphasis."""
    text = " ".join(text.split())
    for sign, shown in (("<", "&lt;"), ("|", "&#124;"), ("*", r"\*")):
        text = text.replace(sign, shown)
    return text


def code(text: str) -> str:
    """Returns the text as code, with commas in place of |, which ends a table's cell in some renderers."""
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
    """Returns the anchor of a heading: in lower case, with hyphens for spaces and without other signs."""
    return "".join(sign for sign in heading.lower().replace(" ", "-") if sign.isalnum() or sign in "-_")
