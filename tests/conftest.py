"""Fixtures of all tests."""

from collections.abc import Iterator

import pytest

from tests.stack import Stack


@pytest.fixture(scope="session")
def stack() -> Iterator[Stack]:
    """The real stack with the default model in float32, shared: starting one takes seconds."""
    with Stack() as running:
        yield running
