"""What values look like, and how they are read."""

import pytest
import typer
from rich.console import Console

from kvctl.display.output import Column, printable, share, size, span, table
from kvctl.display.screen import Bar
from kvctl.options import duration_of


def test_columns_are_as_wide_as_their_widest_cell_on_a_screen() -> None:
    columns = (Column[str]("NAME", lambda one: one), Column[str]("N", len), Column[str]("W", len, wide=True))
    assert table(columns, ["a", "日本語"], wide=False).splitlines() == ["NAME     N", "a        1", "日本語   3"]
    assert table(columns, [], wide=True) == "NAME   N   W"


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), ("", "-"), (0, "0"), ("a b", "a b"), ("a\x1b[1m\n\x85", "a\\u001b[1m\\u000a\\u0085")],
)
def test_nothing_that_steers_a_terminal_is_printed(value: object, text: str) -> None:
    assert printable(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.25, "0.25s"), (59, "59s"), (60, "1m"), (90, "1m30s"), (3599, "59m59s"), (3661, "1h1m"), (90_000, "1d1h")],
)
def test_times_have_two_units(seconds: float, text: str) -> None:
    assert span(seconds) == text


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("1h30m", 5400), ("2d", 172_800), ("250ms", 0.25), ("1.5m", 90)]
)
def test_times_are_read_as_they_are_written(text: str, seconds: float) -> None:
    assert duration_of(text, "--for").ToNanoseconds() == seconds * 1e9


@pytest.mark.parametrize("text", ["", "5", "s", "-1s", "1 s", "1w", "1s!"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="is no time"):
        duration_of(text, "--for")


@pytest.mark.parametrize("text", ["99999999999999d", f"{'9' * 400}s"])
def test_times_that_no_message_can_hold_are_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="longer than 10,000 years"):
        duration_of(text, "--for")


def test_shares_and_sizes() -> None:
    assert (share(1, 3), share(0, 0)) == ("33.3%", "-")
    assert [size(count) for count in (0, 1023, 1024, 720 * 1024, 3 << 40)] == [
        "0 B", "1023 B", "1 KiB", "720 KiB", "3 TiB",
    ]  # fmt: skip


@pytest.mark.parametrize("counts", [(0, 0, 0), (1, 0, 9999), (1, 1, 100_000), (5, 5, 5), (0, 3, 0)])
@pytest.mark.parametrize("width", [8, 30])
def test_a_bar_is_full_and_shows_whatever_is_there(counts: tuple[int, int, int], width: int) -> None:
    bar = Bar([(count, "red") for count in counts])
    cells = bar.cells(width)
    assert sum(cells) == (width if any(counts) else 0)
    assert all(bool(cell) == bool(count) for cell, count in zip(cells, counts, strict=True))
    console = Console(width=width)
    with console.capture() as shown:
        console.print(bar)
    assert len(shown.get().strip()) == sum(cells)
