"""Every world of a test is checked at the end of the test."""

from collections.abc import Iterator

import pytest

from tests.support.in_process_manager import World


@pytest.fixture(autouse=True)
def worlds(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[World]]:
    """The worlds to check; a test that has damaged one clears the list."""
    found: list[World] = []
    make = World.__init__

    def make_and_note(world: World, *arguments: object, **options: object) -> None:
        make(world, *arguments, **options)  # type: ignore[arg-type]
        found.append(world)

    monkeypatch.setattr(World, "__init__", make_and_note)
    yield found
    for world in found:
        world.check()
