"""The common part of all adapters: reads jobs as lines of JSON, runs them, answers with lines of JSON.

    job     {"prompts": [[token id, ...], ...], "output_tokens": 64, "reuse": true, "ahead": false}
    answer  {"token_times": [[seconds since all requests arrived, ...], ...], "token_ids": [[...], ...]}

The first line that an adapter writes is {"ready": "name and version"}. This module needs only the standard library.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Job:
    """Requests that arrive at once.

    reuse: whether prefixes are reused. ahead: all but the first request wait until the first request has its first
    token.
    """

    prompts: Sequence[Sequence[int]]
    output_tokens: int
    reuse: bool
    ahead: bool = False


# Times and tokens of every request.
Outcome = tuple[list[list[float]], list[list[int]]]


def arguments() -> tuple[str, str, int, str]:
    """Model folder, element type, threads, and a folder for files that are converted once."""
    # A stopped process whose parent has ended gets SIGHUP, which ends the engine even if nohup ignored the signal.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    model, dtype, threads, cache = sys.argv[1:]
    return model, dtype, int(threads), cache


def serve(ready: str, run: Callable[[Job], Outcome], answers: Any) -> None:
    """Runs jobs until there are no more."""
    answers(ready=ready)
    for line in sys.stdin:
        times, tokens = run(Job(**json.loads(line)))
        answers(token_times=times, token_ids=tokens)


def answers() -> Callable[..., None]:
    """Writes answers to the standard output, and redirects the engine's output to the log."""
    stream = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def write(**answer: Any) -> None:
        stream.write(json.dumps(answer) + "\n")
        stream.flush()

    return write
