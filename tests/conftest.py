"""Fixtures of all tests."""

import contextlib
from collections.abc import Callable, Generator, Iterator

import hypothesis
import pytest

from tests.stack import Stack
from tests.support import skips

# How long an example takes says something about the machine only.
hypothesis.settings.register_profile("kvkeep", deadline=None)
hypothesis.settings.load_profile("kvkeep")


def pytest_configure(config: pytest.Config) -> None:
    """In CI a test that is skipped without an allowed reason fails."""
    if skips.in_ci():
        config.pluginmanager.register(skips.SkipGate())


@pytest.fixture(scope="session")
def stack() -> Iterator[Stack]:
    """The real stack with the default model in float32, shared: starting one takes seconds."""
    with Stack() as running:
        yield running


@pytest.fixture
def start_stack() -> Iterator[Callable[..., Stack]]:
    """Starts stacks with settings of the test's own, `start_stack(executor_max_tokens=2048)`; stops them after it."""
    with contextlib.ExitStack() as running:
        yield lambda **settings: running.enter_context(Stack(**settings))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Function) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Shows the logs of the shared stack below a test of it that failed."""
    report = yield
    shared = getattr(item, "funcargs", {}).get("stack")
    if report.failed and isinstance(shared, Stack):
        report.sections.append(("logs of the stack", shared.logs()))
    return report
