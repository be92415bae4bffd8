"""Tables of text: the first column to the left, numbers to the right."""

from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they need to be; the header's cells may have several lines."""
    heads = [cell.split("\n") for cell in header]
    height = max(map(len, heads))
    lines = [*zip(*([""] * (height - len(head)) + head for head in heads), strict=True), *map(tuple, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
