"""Requests take the two paths at the beginning of docs/architecture.md."""

import collections
import itertools
import re
import statistics
from collections.abc import Iterable
from pathlib import Path

import pytest

from bench.hops.__main__ import PATHS, Call, traced, windows
from tests.support.pages import DOCS

pytestmark = pytest.mark.model

# A step is planned, and the previous result is sent, while the executor computes; a receiver waits before a result is
# there. So a token's way from one end of the path to the other takes several steps.
STEPS = 5
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


def met(calls: Iterable[Call], names: Iterable[tuple[str, str]]) -> int:
    """How many of the names, from the first on, are called one after the other."""
    functions = iter([(call.file, call.function) for call in calls])
    return sum(1 for _ in itertools.takewhile(lambda name: name in functions, names))


def test_the_pages_paths_are_those_of_real_requests(tmp_path: Path) -> None:
    calls = traced(tmp_path)
    called = {(call.file, call.function) for call in calls}
    for route, passes in zip(PATHS, (1, STEPS), strict=True):
        named = documented(route.name.capitalize())
        assert len(named) >= 15
        assert set(named) <= called, sorted(set(named) - called)
        taken = list(windows(calls, route))
        # Rarely, requests wait for blocks, or a step loop waits for a command, in the middle of a path.
        found = [met(itertools.chain(*taken[at : at + passes]), named) for at in range(len(taken) - passes + 1)]
        assert statistics.median(found) == len(named), (route.name, collections.Counter(found))
