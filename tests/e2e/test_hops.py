"""Requests take the two paths at the beginning of docs/architecture.md."""

import re
from pathlib import Path

import pytest

from bench.hops.__main__ import PATHS, traced
from tests.support.pages import DOCS

pytestmark = pytest.mark.model

# A file of the product, or a function of the file named last.
NAMES = re.compile(r"`((?:\w+/)+\w+\.py|[\w.]+)`")


def documented(title: str) -> list[tuple[str, str]]:
    """The file and the name of each function that a path's list has."""
    text = (DOCS / "architecture.md").read_text()
    items = text.partition(f"**{title}: ")[2].partition("\n\n")[2].partition("\n\n")[0]
    found, file = [], ""
    for name in NAMES.findall(items):
        if "/" in name:
            file = name
        else:
            found.append((file, name))
    return found


def test_the_pages_paths_are_those_of_real_requests(tmp_path: Path) -> None:
    called = {(call.file, call.function) for call in traced(tmp_path)}
    for route in PATHS:
        named = documented(route.name.capitalize())
        assert len(named) >= 15
        assert set(named) <= called, sorted(set(named) - called)
