"""Fixtures of all tests."""

import contextlib
import os
import signal
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from operator import itemgetter

import hypothesis
import pytest
import structlog

from tests import stack as stack_module
from tests.stack import Stack, model_cache
from tests.support import pairwise, passed, skips, slow
from tests.support.leftovers import remove_leftovers
from tests.support.patience import speed_factor

# As the processes log: a traceback with local variables takes seconds to write.
_renderer = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
structlog.configure(processors=[*structlog.get_config()["processors"][:-1], _renderer])

# Folders whose tests start processes or a browser: such a test may fail once, where the machine is busy.
PROCESSES = ("tests/console/", "tests/e2e/", "tests/integration/", "tests/security/")

# A file whose tests take longer has a separate line at the end.
LONG_SECONDS = 20.0

# How long an example takes says something about the machine only.
hypothesis.settings.register_profile("kvkeep", deadline=None)
hypothesis.settings.load_profile("kvkeep")


def pytest_configure(config: pytest.Config) -> None:
    """In CI a test that is skipped without an allowed reason fails, and some tests that prove nothing new are left out.

    Workers inherit how slow the machine is.
    """
    # A shell that starts the tests in the background has them ignore Ctrl-C, and every process that they start, too.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    speed_factor()
    stack_module.preloads = True
    if not hasattr(config, "workerinput"):
        remove_leftovers()
    if skips.in_ci():
        config.pluginmanager.register(skips.SkipGate())
        config.pluginmanager.register(pairwise.Pairwise())
        config.pluginmanager.register(passed.Passed(model_cache() / "passed"))


def pytest_report_header() -> str:
    """What the deadlines of this run grow with."""
    return f"speed factor: {speed_factor():.2f}, deadlines grow with it"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests that `make test` leaves out, and those that start processes."""
    for item in items:
        if slow.is_slow(item.nodeid):
            item.add_marker("slow")
        if item.nodeid.startswith(PROCESSES):
            item.add_marker("processes")


def pytest_xdist_auto_num_workers() -> int:
    """Three processes for two cores: tests wait for processes and servers as long as they compute."""
    return max(2, (os.cpu_count() or 1) * 3 // 2)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the seconds and the number of tests of each folder, and of the files that take long."""
    reports = [
        report
        for reports in terminalreporter.stats.values()
        for report in reports
        if isinstance(report, pytest.TestReport)
    ]
    _print_seconds(terminalreporter, "folder", reports, lambda file: file.rpartition("/")[0])
    _print_seconds(terminalreporter, "file", reports, lambda file: file, at_least=LONG_SECONDS)


def _print_seconds(
    terminal: pytest.TerminalReporter,
    kind: str,
    reports: Sequence[pytest.TestReport],
    group: Callable[[str], str],
    at_least: float = 0.0,
) -> None:
    """Seconds, of them those before and after the tests, which mostly are starts of processes, and tests."""
    seconds: dict[str, float] = defaultdict(float)
    around: dict[str, float] = defaultdict(float)
    tests: Counter[str] = Counter()
    for report in reports:
        name = group(report.nodeid.partition("::")[0])
        seconds[name] += report.duration
        around[name] += report.duration * (report.when != "call")
        tests[name] += report.when == "call"
    terminal.section(f"seconds, around tests, tests by {kind}")
    for name, spent in sorted(seconds.items(), key=itemgetter(1), reverse=True):
        if spent >= at_least:
            terminal.write_line(f"{spent:7.1f} {around[name]:7.1f} {tests[name]:5}  {name}")


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
