"""Allowed reasons for a skipped test in CI. Any other skip fails there: a test that never runs proves nothing."""

import os
import re
from collections.abc import Generator
from typing import Any

import pytest

PASSED_BEFORE = "it passed before, and nothing that it depends on has changed"
# Regular expressions for whole reasons: missing things that `.ci/run` cannot install by packages, and dynamo, which
# has a separate environment.
ALLOWED = (
    PASSED_BEFORE,
    "no CUDA device on this machine",
    "there is a CUDA device on this machine",
    "this user may not mount",
    "the processor does not multiply bfloat16",
    "the processor has no vectors of 16 lanes",
    "the processor is no x86",
    "the native decoder has 8 lanes, too",
    # Shapes that the widest vectors of a processor do not fit.
    r"the head size \d+ is no multiple of \d+",
    r"its widths are no multiples of \d+",
    "not installed: make peers ARGS=dynamo",
)


def in_ci() -> bool:
    """Whether CI runs the tests; `.ci/run` says so as other services do."""
    return os.environ.get("CI", "").lower() in ("1", "true")


class SkipGate:
    """Turns a skipped test or module into a failed one, unless its reason is allowed."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Looks at each phase of each test."""
        report = yield
        if not hasattr(report, "wasxfail"):
            _judge(report)
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        """Looks at each module: a module that is skipped as a whole has no test that could be reported."""
        report = yield
        _judge(report)
        return report


def _judge(report: Any) -> None:
    if not report.skipped:
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    reason = reason.removeprefix("Skipped: ")
    if not any(re.fullmatch(allowed, reason) for allowed in ALLOWED):
        report.outcome = "failed"
        report.longrepr = (
            f"skipped in CI: {reason}\n"
            "Install what is missing in .ci/run, or add the reason to ALLOWED in tests/support/skips.py."
        )
