"""What every adapter does: reads jobs as lines of JSON, runs them, answers with lines of JSON.

    job     {"prompts": [[token id, ...], ...], "output_tokens": 64, "reuse": true}
    answer  {"token_times": [[seconds since all requests arrived, ...], ...], "token_ids": [[...], ...]}

The first line an adapter writes is {"ready": "name and version"}. It needs nothing but the standard library.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

Prompts = Sequence[Sequence[int]]
# Times and tokens of every request, for prompts, a number of output tokens, and whether to reuse prefixes.
Run = Callable[[Prompts, int, bool], tuple[list[list[float]], list[list[int]]]]


def arguments() -> tuple[str, str, int, str]:
    """Model folder, element type, threads, and a folder for what is converted once."""
    # A stopped process whose parent has ended gets this signal: it ends the engine unless nohup made it nothing.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    model, dtype, threads, cache = sys.argv[1:]
    return model, dtype, int(threads), cache


def serve(
    ready: str, run: Callable[[Prompts, int, bool], tuple[list[list[float]], list[list[int]]]], answers: Any
) -> None:
    """Runs jobs until there are no more."""
    answers(ready=ready)
    for line in sys.stdin:
        job = json.loads(line)
        times, tokens = run(job["prompts"], job["output_tokens"], job["reuse"])
        answers(token_times=times, token_ids=tokens)


def answers() -> Callable[..., None]:
    """Writes answers to standard output, which the engine behind this process loses: what it prints is in the log."""
    stream = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def write(**answer: Any) -> None:
        stream.write(json.dumps(answer) + "\n")
        stream.flush()

    return write
