"""Runs kvctl against a stack."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from kvctl.app import main, verbs
from tests.stack import ROOT, Stack
from tests.support.patience import patience

VERBS = verbs()


@contextlib.contextmanager
def ctrl_c_is_heard() -> Iterator[None]:
    """Processes that start within it get SIGINT, which children of a process in the background ignore.

    A preexec_fn could enable the signal in the child, but forks: gRPC's threads start in the child and write output.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@dataclass(frozen=True)
class Done:
    """The result of a command line."""

    status: int
    out: str
    err: str


class Kvctl:
    """The command line, in this process: a process for each line would take longer than the line's work."""

    def __init__(self, stack: Stack, captured: pytest.CaptureFixture[str], patch: pytest.MonkeyPatch) -> None:
        self._captured = captured
        for name, value in variables(stack).items():
            patch.setenv(name, value)

    def run(self, *arguments: object) -> Done:
        """One command line."""
        self._captured.readouterr()
        status = main([str(one) for one in arguments])
        out, err = self._captured.readouterr()
        return Done(status, out, err)

    def text(self, *arguments: object, status: int = 0) -> str:
        """The command's output for people."""
        done = self.run(*arguments)
        assert done.status == status, done
        return done.out

    def data(self, *arguments: object, status: int = 0) -> Any:
        """The command's output as JSON."""
        return json.loads(self.text(*arguments, "-o", "json", status=status))


def variables(stack: Stack) -> dict[str, str]:
    """The environment that names a stack's addresses."""
    return {
        "KVCTL_SERVER": stack.admin,
        "KVKEEP_SCHEDULER_ADDRESS": stack.scheduler,
        "KVKEEP_CACHEMGR_ADDRESS": stack.cachemgr,
        "KVKEEP_EXECUTOR_ADDRESS": stack.executor,
        "KVKEEP_SCHEDULER_METRICS_ADDRESS": "",
        "KVKEEP_EXECUTOR_METRICS_ADDRESS": stack.executor_metrics,
    }


def command(*arguments: object) -> list[str]:
    """The command of a kvctl process."""
    return [sys.executable, "-m", "kvctl", *map(str, arguments)]


def environment(stack: Stack) -> dict[str, str]:
    """The environment of a kvctl process."""
    return os.environ | variables(stack) | {"PYTHONPATH": str(ROOT), "TERM": "xterm-256color"}


def ask(variables: Mapping[str, str], answer: str, *line: str) -> Done:
    """Runs a command line at a terminal, where a person answers. variables: its environment."""
    controller, terminal = pty.openpty()
    with subprocess.Popen(
        command(*line), stdin=terminal, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=variables
    ) as process:
        os.close(terminal)
        os.write(controller, f"{answer}\n".encode())
        out, err = process.communicate(timeout=patience(60))
    os.close(controller)
    return Done(process.returncode, out.decode(), err.decode())
