"""Batch size, speed and quality with eviction in the prompt, after the prompt, and without eviction.

Run it with `make bench-batchmax`. BM evicts in the prompt and after it, ED only after it, FKV never. Batch-Max
(Metel, Chen, Rezagholizadeh, ES-FoMo III 2025) evicts by average attention while the prompt is computed, so that no
sequence ever has more than its budget. Evicting only after the prompt still needs blocks for a whole prompt. Prompts
are 700 to 1,000 tokens of prose. They arrive in two ways: all together, or continuously, each when the previous prompt
is computed.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from tokenizers import Tokenizer

from bench import plots
from bench.fairness import NO_TARGET
from bench.prose import NoTextError, pieces
from bench.research.quality import rouge_2
from bench.result import Result, add_json_argument
from bench.serving import INTERRUPTED, RED, keep, note
from bench.tables import table
from bench.totals import agreement
from executor.models.files import resolve
from protos.generation.v1 import generation_pb2 as pb
from protos.generation.v1 import generation_pb2_grpc as rpc
from protos.kvcommon.v1 import kvcommon_pb2 as common
from tests.stack import Stack
from tests.support.generation import Output, generate, greedy_request

BLOCK_SIZE = 16
PERIOD = 64
LEAST_KEPT = PERIOD + 1
LENGTHS = (700, 1_000)
LOOK_SECONDS = 0.05
# The loss of BM in ROUGE-2 that the paper calls small.
SMALL_LOSS = 0.03
# Published ratios of tokens per second, the better of two budgets: (task, BM to ED, BM to FKV).
PAPER = (
    ("Llama-2-13b-chat, CNN/DM", 80.3 / 42.0, 80.3 / 30.3),
    ("Llama-2-13b-chat, NarrativeQA", 46.2 / 40.0, 46.2 / 26.4),
    ("Llama-2-13b-chat, GSM8K", 43.7 / 30.3, 43.7 / 22.9),
    ("Phi-3.5-mini, CNN/DM", 36.3 / 29.0, 36.3 / 27.0),
    ("Phi-3.5-mini, NarrativeQA", 37.4 / 28.0, 37.4 / 26.5),
    ("Phi-3.5-mini, GSM8K", 43.8 / 28.4, 43.8 / 27.1),
)


@dataclass(frozen=True)
class Method:
    """How requests evict. budget: limit of kept tokens, None for no limit."""

    name: str
    policy: common.EvictionPolicy | None = None
    budget: int | None = None

    def peak_tokens(self, prompt: int, output: int) -> int:
        """The largest number of tokens that a sequence has at once, by the formula's count."""
        if self.policy is None:
            return prompt + output
        if self.policy.during_prefill:
            assert self.budget is not None
            return min(self.budget, prompt + output)
        return prompt + 1


def methods(budgets: Iterable[int]) -> list[Method]:
    """FKV, ED, and BM with each budget."""
    last = common.EvictionPolicy(kind=common.EVICTION_KIND_LAST, max_cache_tokens=LEAST_KEPT)
    made = [Method("FKV"), Method("ED", last, LEAST_KEPT)]
    for budget in budgets:
        policy = common.EvictionPolicy(
            kind=common.EVICTION_KIND_AVERAGE, max_cache_tokens=budget, period_tokens=PERIOD, during_prefill=True
        )
        made.append(Method(f"BM {budget}", policy, budget))
    return made


def formula(pool_blocks: int, peaks: Sequence[int]) -> int:
    """The largest batch: how many sequences, in order, fit into a pool at their peaks. peaks: in tokens."""
    used = 0
    for count, peak in enumerate(peaks):
        used += -(-peak // BLOCK_SIZE)
        if used > pool_blocks:
            return count
    return len(peaks)


@dataclass(frozen=True)
class Run:
    """One method in one schedule. running: (time, requests that had blocks), in order of time."""

    outputs: Sequence[Output]
    running: Sequence[tuple[float, int]]

    @property
    def prompts_at_once(self) -> int:
        """The largest number of requests that had blocks before the first token came."""
        first = min(output.token_times[0] for output in self.outputs)
        return max((count for time, count in self.running if time < first), default=0)

    @property
    def batch(self) -> int:
        """Requests with blocks just before the first request ended, when sequences are longest after prefill."""
        end = self._first_end()
        return next((count for time, count in reversed(self.running) if time < end), 0)

    @property
    def rate(self) -> float:
        """Output tokens per second of the whole run."""
        begin = min(output.started for output in self.outputs)
        end = max(output.token_times[-1] for output in self.outputs)
        return sum(len(output.token_ids) for output in self.outputs) / (end - begin)

    @property
    def decode_rate(self) -> float:
        """Output tokens per second while the first batch decodes: from its last first token to its first end."""
        end = self._first_end()
        begin = max(output.token_times[0] for output in self.outputs if output.token_times[0] < end)
        count = sum(begin < time <= end for output in self.outputs for time in output.token_times)
        return count / (end - begin)

    @property
    def preemptions(self) -> int:
        """The preemptions of all requests."""
        return sum(output.usage.preemptions for output in self.outputs)

    def _first_end(self) -> float:
        return min(output.token_times[-1] for output in self.outputs)


async def run(
    stack: Stack, method: Method, prompts: Sequence[Sequence[int]], output_tokens: int, *, together: bool
) -> Run:
    """Runs all prompts in one schedule."""
    requests = [greedy_request(prompt, output_tokens, reuse=False, eviction_policy=method.policy) for prompt in prompts]
    async with grpc.aio.insecure_channel(stack.scheduler) as channel:
        stub: rpc.GenerationServiceAsyncStub = rpc.GenerationServiceStub(channel)
        running: list[tuple[float, int]] = []
        loop = asyncio.get_running_loop()

        async def watch() -> None:
            while True:
                loads = await stub.GetLoads(pb.GetLoadsRequest(), timeout=30)
                running.append((loop.time(), loads.running_requests))
                await asyncio.sleep(LOOK_SECONDS)

        watching = asyncio.create_task(watch())
        tasks = []
        for request in requests:
            begun = asyncio.Event()
            tasks.append(asyncio.create_task(generate(stub, request, begun=begun)))
            if not together:
                await begun.wait()
        outputs = await asyncio.gather(*tasks)
        watching.cancel()
    return Run(outputs, running)


def describe(method: Method, made: Run, prompts: Sequence[Sequence[int]], output: int, pool: int) -> dict[str, Any]:
    """Returns the figures of a run."""
    peaks = [method.peak_tokens(len(prompt), output) for prompt in prompts]
    return {
        "method": method.name,
        "budget": method.budget,
        "formula": formula(pool // BLOCK_SIZE, peaks),
        "prompts_at_once": made.prompts_at_once,
        "batch": made.batch,
        "preemptions": made.preemptions,
        "decode_tokens_per_s": made.decode_rate,
        "tokens_per_s": made.rate,
    }


def quality(method: Method, made: Run, whole: Run) -> dict[str, Any]:
    """Compares the output with the output of the full cache."""
    pairs = list(zip(whole.outputs, made.outputs, strict=True))
    return {
        "method": method.name,
        "budget": method.budget,
        "rouge_2": sum(rouge_2(one.text, other.text) for one, other in pairs) / len(pairs),
        "agreement": agreement([one.token_ids for one, _ in pairs], [other.token_ids for _, other in pairs]),
    }


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Measures every method in both schedules, on one stack."""
    tokenizer = Tokenizer.from_file(str(resolve("") / "tokenizer.json"))
    low, high = LENGTHS
    # Long and short prompts in turns, so that every batch has both.
    lengths = [low + (high - low) * (number * 7 % given.requests) // given.requests for number in range(given.requests)]
    prompts = pieces(lambda text: tokenizer.encode(text, add_special_tokens=False).ids, lengths, 2)
    kept: dict[str, Any] = {"together": [], "continuous": [], "quality": []}
    settings: dict[str, object] = {"executor_max_tokens": given.pool_tokens, "executor_dtype": given.dtype}
    # The formula ignores blocks that admissions leave free, so none are left. Prompts must not wait for streams here.
    settings |= {"cachemgr_free_watermark": 0, "scheduler_target_itl_seconds": NO_TARGET}
    with Stack(executor_block_size=BLOCK_SIZE, **settings) as stack:
        asyncio.run(run(stack, methods([])[0], prompts[:2], 4, together=True))
        whole: Run | None = None
        for method in methods(given.budgets):
            for schedule in ("together", "continuous"):
                made = asyncio.run(run(stack, method, prompts, given.output_tokens, together=schedule == "together"))
                row = describe(method, made, prompts, given.output_tokens, given.pool_tokens)
                kept[schedule].append(row)
                note(f"{schedule}, {method.name}: {made.rate:.1f} output tokens/s, batch {made.batch}")
                if schedule == "together":
                    whole = whole or made
                    kept["quality"].append(quality(method, made, whole))
    return kept


def smallest_budget(rows: Sequence[dict[str, Any]]) -> int | None:
    """The smallest budget of BM at which, and above which, output loses little."""
    found = None
    for row in sorted((row for row in rows if row["method"].startswith("BM")), key=lambda row: -row["budget"]):
        if row["rouge_2"] < 1 - SMALL_LOSS:
            break
        found = row["budget"]
    return found


def show(kept: dict[str, Any]) -> str:
    """Returns all tables as text."""
    parts = []
    for schedule, title in (("together", "all prompts together"), ("continuous", "one prompt after the other")):
        rows = kept[schedule]
        full, decode_only = rows[0], rows[1]
        lines = [
            [
                row["method"],
                *(str(row[key]) for key in ("formula", "prompts_at_once", "batch", "preemptions")),
                *(
                    cell
                    for key in ("decode_tokens_per_s", "tokens_per_s")
                    for cell in (
                        f"{row[key]:.1f}",
                        f"{row[key] / full[key]:.2f}",
                        f"{row[key] / decode_only[key]:.2f}",
                    )
                ),
            ]
            for row in rows
        ]
        head = (
            "",
            "batch by\nformula",
            "prompts\nat once",
            "\nbatch",
            "\npreemptions",
            "decode\ntokens/s",
            "\nto FKV",
            "\nto ED",
            "end to end\ntokens/s",
            "\nto FKV",
            "\nto ED",
        )
        parts.append(f"{title}\n{table(head, lines)}")
    near = [[row["method"], f"{row['rouge_2']:.3f}", f"{row['agreement']:.1%}"] for row in kept["quality"]]
    parts.append(f"output beside FKV's\n{table(('', 'ROUGE-2', 'same tokens'), near)}")
    found = smallest_budget(kept["quality"])
    parts.append(f"smallest budget whose ROUGE-2 loses at most {SMALL_LOSS:.0%}: {found or 'none of these'}")
    published = [[task, f"{to_ed:.2f}", f"{to_full:.2f}"] for task, to_ed, to_full in PAPER]
    parts.append(f"published, end to end on a GPU\n{table(('', 'BM to ED', 'BM to FKV'), published)}")
    return "\n\n".join(parts)


NOTE = """
Batch: requests that had blocks just before the first of them ended. Prompts at once: requests that had blocks before
the first token came. The formula divides the pool by what each sequence needs at its peak: FKV needs prompt and output,
ED the prompt and a token, BM its budget. It holds for requests that reach their peaks together. ED's requests do so
only before the first token: after it their blocks are free for more requests, so ED's batch is larger than its prompts
at once. Decode: from the last first token before the first end to the first end. Prompts that come one after the other
are computed one at a time, BM's in pieces of a period each: by the time that more have come, the first have ended."""


def main() -> int:
    """Measures and shows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budgets", type=int, nargs="+", default=[256, 512, 768, 1024])
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--pool-tokens", type=int, default=4_096)
    parser.add_argument("--dtype", default="float32")
    add_json_argument(parser)
    given = parser.parse_args()
    settings = {key: value for key, value in vars(given).items() if key != "json"}
    try:
        kept = measure(given)
    except NoTextError as error:
        print(error, file=sys.stderr)
        return RED
    except KeyboardInterrupt:
        note("interrupted")
        return INTERRUPTED
    print(show(kept))
    print(NOTE)
    keep(Result("batchmax", kept, settings), given.json, plots.batchmax)
    return 0


if __name__ == "__main__":
    sys.exit(main())
