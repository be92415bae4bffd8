"""Gain of drafts: milliseconds per token with and without drafts, and the share of accepted drafts.

Two stacks run the same greedy requests in turns; they differ only in KVKEEP_EXECUTOR_MAX_DRAFTS. The prompts contain
text of this project:

| workload | requests, one after the other | output tokens each |
| --- | --- | --- |
| chat | short questions | 192 |
| edits | a file is given, and returned with one name changed | 256 |
| quotes | a page is given, and quoted | 256 |
| agent | turns with a tool's output: it mostly repeats an earlier output, and the answer repeats it | 256 |
| again | the same edits as before | 256 |
| 32 streams | questions, all at once: no draft is worth its computation, so drafts must cost nothing | 96 |

Each repeat has a separate salt, so that only "again" finds cached blocks. Outputs are compared: in float32 they must be
equal. In bfloat16 they may differ if two tokens are about equally likely, because sums are rounded in different orders.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from tokenizers import Tokenizer

from bench.result import ROOT, Result, add_json_argument
from bench.tables import table
from executor.core.drafts import Method
from executor.models.files import resolve
from tests.stack import Stack, metrics
from tests.support.generation import Output, generate_all, greedy_request
from tests.support.ports import free_address
from tests.support.prompts import QUESTIONS, chat

_EDITS = (
    ("executor/core/timing.py", "Clock", "Timer"),
    ("executor/core/state.py", "SequenceTable", "Table"),
    ("cachemgr/retention/priority.py", "PRIORITY", "RANK"),
    ("scheduler/core/onloading.py", "CopyTracker", "Tracker"),
)
_PAGES = ("architecture", "eviction", "keys", "fleet")
_FILE_BYTES, _PAGE_BYTES = 1800, 2000
WORKLOADS = ("chat", "edits", "quotes", "agent", "again", "32 streams")
TOKENS = {"chat": 192, "32 streams": 96}
_STREAMS = 32


def _edit(path: str, name: str, new: str) -> str:
    code = (ROOT / path).read_text()[:_FILE_BYTES]
    asked = f"Here is a file:\n```python\n{code}\n```\nReturn the whole file with {name} renamed to {new}."
    return chat(asked) + "```python\n" + code.splitlines()[0]


def _quote(page: str) -> str:
    text = (ROOT / f"docs/{page}.md").read_text().partition("\n\n")[2][:_PAGE_BYTES]
    return chat(f"Here is a page:\n\n{text}\n\nQuote it word by word.") + text[:60]


def _listing(turn: int) -> str:
    sizes = ((number, (number * 7919 + (number % 5 == turn) * turn) % 10007) for number in range(16))
    return "\n".join(f"-rw-r--r-- 1 build build {size:>6} module_{number:02}.py" for number, size in sizes)


def _agent(turn: int) -> str:
    first, again = (chat(f"$ ls -l\n{_listing(number)}\nRepeat the listing.") for number in (0, turn))
    return f"{first}{_listing(0)}<|im_end|>\n{again}{_listing(turn)[:30]}"


def prompts(workload: str) -> list[str]:
    """The prompts of a workload, as text."""
    match workload:
        case "edits" | "again":
            return [_edit(*edit) for edit in _EDITS]
        case "quotes":
            return [_quote(page) for page in _PAGES]
        case "agent":
            return [_agent(turn) for turn in (1, 2, 3)]
        case "chat":
            return [chat(question) for question in QUESTIONS[:6]]
    return [chat(f"{QUESTIONS[index % len(QUESTIONS)]} (number {index})") for index in range(_STREAMS)]


@dataclass
class Run:
    """One run of a workload on one stack: milliseconds per token, and steps.

    processor_ms: processor time of the executor per token, prompts included. drafted, accepted: tokens by method.
    """

    token_ms: float
    processor_ms: float
    drafted: list[int]
    accepted: list[int]
    steps: int
    outputs: list[list[int]] = field(repr=False)


class Side:
    """A stack with drafts or without."""

    def __init__(self, max_drafts: int, dtype: str, draft_model: str = "") -> None:
        self._metrics = free_address()
        self.stack = Stack(
            executor_max_drafts=max_drafts,
            executor_draft_model=draft_model,
            executor_dtype=dtype,
            executor_metrics_address=self._metrics,
        )

    def _counters(self) -> tuple[list[int], list[int], int]:
        """Drafted tokens and accepted drafts, by method, and steps."""
        values = {(name, labels): int(value) for name, labels, value in metrics(self._metrics)}
        drafted, accepted = (
            [values[f"kvkeep_executor_{name}_total", f'method="{method}"'] for method in Method]
            for name in ("drafted_tokens", "accepted_drafts")
        )
        return drafted, accepted, values["kvkeep_executor_step_seconds_count", ""]

    def run(self, workload: str, inputs: Sequence[Sequence[int]], salt: str) -> Run:
        """Runs all requests: at once for the 32 streams, else one after the other."""
        requests = []
        for ids in inputs:
            requests.append(greedy_request(ids, TOKENS.get(workload, 256)))
            requests[-1].cache.salt = salt
        executor = psutil.Process(self.stack.pid("executor"))
        before, began, at_once = self._counters(), executor.cpu_times(), workload == "32 streams"
        outputs = asyncio.run(generate_all(self.stack.scheduler, requests, concurrency=_STREAMS if at_once else 1))
        after, ended, ids = self._counters(), executor.cpu_times(), [output.token_ids for output in outputs]
        drafted, accepted = (
            [b - a for a, b in zip(*pair, strict=True)] for pair in zip(before[:2], after[:2], strict=True)
        )
        taken = ended.user - began.user + ended.system - began.system
        return Run(
            token_ms=_token_ms(outputs, at_once=at_once),
            processor_ms=1e3 * taken / sum(map(len, ids)),
            drafted=drafted,
            accepted=accepted,
            steps=after[2] - before[2],
            outputs=ids,
        )


def _token_ms(outputs: Sequence[Output], *, at_once: bool) -> float:
    """Milliseconds per token after the first; for concurrent streams, the total time divided by all tokens."""
    if at_once:
        seconds = max(output.token_times[-1] for output in outputs) - min(output.started for output in outputs)
        return 1e3 * seconds / sum(len(output.token_ids) for output in outputs)
    seconds = sum(output.token_times[-1] - output.token_times[0] for output in outputs)
    return 1e3 * seconds / sum(len(output.token_ids) - 1 for output in outputs)


def measure(sides: Sequence[Side], workload: str, inputs: Sequence[Sequence[int]], repeat: int) -> list[Run]:
    """Runs the workload without drafts and with drafts; the order alternates between repeats."""
    salt = f"{workload}-{repeat}"
    found: dict[int, Run] = {}
    for index in (0, 1) if repeat % 2 else (1, 0):
        if workload == "again":
            sides[index].run(workload, inputs, salt)
        found[index] = sides[index].run(workload, inputs, salt)
    return [found[0], found[1]]


def main(arguments: list[str]) -> int:
    """Measures and prints a table; returns 1 if outputs differ more than rounding explains."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument("--repeats", type=int, default=3, help="runs of each workload (%(default)s)")
    parser.add_argument("--max-drafts", type=int, default=12, help="most drafts of a step (%(default)s)")
    parser.add_argument("--draft-model", default="", help="KVKEEP_EXECUTOR_DRAFT_MODEL of the stack with drafts")
    add_json_argument(parser)
    given = parser.parse_args(arguments)
    encode = Tokenizer.from_file(str(Path(resolve("")) / "tokenizer.json")).encode
    rows, figures = [], []
    for dtype in given.dtypes:
        sides = [Side(0, dtype), Side(given.max_drafts, dtype, given.draft_model)]
        with ExitStack() as exits:
            for side in sides:
                exits.enter_context(side.stack)
            for side in sides:
                side.run("chat", [encode(chat("Hello."), add_special_tokens=False).ids], "warm up")
            for workload in given.workloads:
                inputs = [encode(text, add_special_tokens=False).ids for text in prompts(workload)]
                runs = [measure(sides, workload, inputs, repeat) for repeat in range(given.repeats)]
                figures.append(_figures(dtype, workload, runs))
                rows.append(_row(figures[-1]))
                print(" ".join(rows[-1]), file=sys.stderr, flush=True)
    header = [
        "dtype",
        "workload",
        "ms per token\nwithout",
        "\nwith",
        "gain",
        "gain in\nCPU time",
        "gain in\nsteps",
        *(f"{method}:\naccepted" for method in Method),
        "different\noutputs",
    ]
    print(table(header, rows))
    asked = {name: getattr(given, name) for name in ("repeats", "max_drafts", "draft_model")}
    Result("drafts", {"workloads": figures}, asked).write(given.json)
    return int(any(map(is_wrong, figures)))


def is_wrong(figures: Mapping[str, Any]) -> bool:
    """Whether outputs differ more than rounding explains: any output in float32, or all of a workload in bfloat16."""
    different: int = figures["different_outputs"]
    return different > 0 if figures["dtype"] == "float32" else different == figures["outputs"]


def _figures(dtype: str, workload: str, runs: Sequence[Sequence[Run]]) -> dict[str, Any]:
    pairs = [(a, b) for without, with_drafts in runs for a, b in zip(without.outputs, with_drafts.outputs, strict=True)]
    return {
        "dtype": dtype,
        "workload": workload,
        "without_ms": statistics.median(without.token_ms for without, _ in runs),
        "with_ms": statistics.median(with_drafts.token_ms for _, with_drafts in runs),
        "gain": statistics.median(without.token_ms / with_drafts.token_ms for without, with_drafts in runs),
        "processor_gain": statistics.median(a.processor_ms / b.processor_ms for a, b in runs),
        "without_processor_ms": statistics.median(without.processor_ms for without, _ in runs),
        "with_processor_ms": statistics.median(with_drafts.processor_ms for _, with_drafts in runs),
        **{
            f"{method}_{name}": sum(getattr(with_drafts, name)[index] for _, with_drafts in runs)
            for index, method in enumerate(Method)
            for name in ("drafted", "accepted")
        },
        "without_steps": sum(without.steps for without, _ in runs),
        "with_steps": sum(with_drafts.steps for _, with_drafts in runs),
        "outputs": len(pairs),
        "different_outputs": sum(a != b for a, b in pairs),
    }


def _share(accepted: int, drafted: int) -> str:
    return f"{accepted / drafted:.0%} of {drafted}" if drafted else ""


def _row(figures: dict[str, Any]) -> list[str]:
    return [
        figures["dtype"],
        figures["workload"],
        f"{figures['without_ms']:.2f}",
        f"{figures['with_ms']:.2f}",
        f"{figures['gain']:.2f}",
        f"{figures['processor_gain']:.2f}",
        f"{figures['without_steps'] / figures['with_steps']:.2f}",
        *(_share(figures[f"{method}_accepted"], figures[f"{method}_drafted"]) for method in Method),
        f"{figures['different_outputs']} of {figures['outputs']}",
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
