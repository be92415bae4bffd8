"""Third-party routers in front of two engines: dynamo, if `make peers` has installed it, and smg over HTTP."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from bench import peer_routers
from bench.peer_routers import ENGINES, OF_EACH_ENGINE, Engine
from bench.peers.set_up import DYNAMO, SMG, default_folder

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def engines() -> Iterator[list[Engine]]:
    """Two stacks that publish their events with token ids."""
    with ExitStack() as exits:
        made = [Engine(number) for number in range(ENGINES)]
        for engine in made:
            exits.enter_context(engine.stack)
        yield made


@pytest.mark.skipif(bool(DYNAMO.missing(default_folder())), reason="not installed: make peers ARGS=dynamo")
def test_dynamo_selects_the_engine_that_has_the_prompt(engines: list[Engine]) -> None:
    found, selections = peer_routers.dynamo(default_folder(), engines, engines[0].model())
    assert selections["right"] == selections["prompts"] == ENGINES * OF_EACH_ENGINE
    assert selections["tokens_found_by_the_indexer"] > 0
    [requests] = found.values()
    assert requests.is_right(), requests
    assert requests.engines == [OF_EACH_ENGINE] * ENGINES


def test_answers_through_smg_over_http_are_the_engines_own(engines: list[Engine], tmp_path: Path) -> None:
    # The tests' own environment has smg, too.
    program = tmp_path / SMG.name / "bin/smg"
    program.parent.mkdir(parents=True)
    program.symlink_to(Path(sys.executable).parent / "smg")
    found = peer_routers.smg(tmp_path, engines, engines[0].model())
    assert all(one.is_right() for one in found.values()), found
