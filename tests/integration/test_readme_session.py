"""What README tells operators to paste works, and answers what README says."""

import re
import shlex
import subprocess
import time
from typing import NamedTuple

import pytest

from tests.integration.test_grpcurl import ADMIN, EVENTS, GRPCURL, Grpcurl
from tests.stack import ROOT, Stack

# grpcurl adds 64 to the code of a status.
DEADLINE_EXCEEDED = 64 + 4


class Step(NamedTuple):
    """A command and a part of its answer, empty where README shows none."""

    command: str
    answer: str


def session() -> tuple[str, list[Step]]:
    """The variables that come first, and the commands."""
    section = (ROOT / "README.md").read_text().partition("\n## Steering the cache\n")[2].partition("\n## ")[0]
    lines = section.partition("```sh\n")[2].partition("```")[0].splitlines()
    variables = [line for line in lines if re.match(r"[A-Z]+=", line)]
    steps = []
    for line, after in zip(lines, [*lines[1:], ""], strict=True):
        if line.startswith(".venv/bin/grpcurl "):
            steps.append(Step(line, after.removeprefix("#> ") if after.startswith("#> ") else ""))
    return "; ".join(variables), steps


def squeezed(text: str) -> str:
    """Without the white space that depends on how JSON is printed."""
    return re.sub(r"\s", "", text)


def wait_until_released(stack: Stack) -> None:
    """A request's blocks are given back with a sync that comes after its last answer."""
    client, deadline = Grpcurl(stack.admin), time.monotonic() + 10
    while client.call(f"{ADMIN}/ListSequences", salt="acme")["sequences"]:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_session_tells_of_every_way_to_steer() -> None:
    _, steps = session()
    called = [step.command.rpartition("/")[2] for step in steps]
    assert set(called) >= {
        "CreateRetentionRule",
        "PinPrefix",
        "ExplainPrefix",
        "PurgeBlocks",
        "WatchEvents",
        "SetQuota",
        "ForgetBlocks",
    }
    assert all(step.answer for step in steps if "/Delete" not in step.command)


@pytest.mark.model
def test_every_command_of_the_session_answers_as_the_text_says(stack: Stack) -> None:
    variables, steps = session()
    places = {
        ".venv/bin/grpcurl": f"{shlex.quote(str(GRPCURL))} -unix",
        "127.0.0.1:50051": stack.scheduler.removeprefix("unix:"),
        "127.0.0.1:50062": stack.admin.removeprefix("unix:"),
    }
    for step in steps:
        command = step.command
        for there, here in places.items():
            command = command.replace(there, here)
        done = subprocess.run(
            ["bash", "-c", f"{variables}; {command}"], capture_output=True, text=True, timeout=60, check=False
        )
        expected = DEADLINE_EXCEEDED if EVENTS in command else 0
        assert done.returncode == expected, f"{step.command}\n{done.stdout}{done.stderr}"
        assert squeezed(step.answer) in squeezed(done.stdout), f"{step.command}\n{done.stdout}"
        if "StreamGenerate" in command:
            wait_until_released(stack)
