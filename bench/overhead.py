"""Cost of a cache manager in its own process, compared with an allocator in the scheduler.

Run it with `make bench-overhead`. The executor is a stub whose steps take a fixed time, so that only the control
plane makes a difference. Both wirings run side by side and take turns. With `--model` the real executor runs.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import time
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from typing import Any

import grpc
import psutil

from bench.result import Result, add_json_argument, middle, percentile, spread
from bench.stub_executor import Record, read_records
from protos.generation.v1 import generation_pb2 as pb
from protos.generation.v1 import generation_pb2_grpc as rpc
from tests.stack import MODULES, Stack, metrics
from tests.support.ports import free_address

GENERATE = "/generation.v1.GenerationService/StreamGenerate"
PREFIX = "kvkeep_scheduler_"
# Histograms of the scheduler, and the words for them.
PARTS = {
    "step_planning": "planning",
    "step_sending": "serialising and sending",
    "step_cachemgr_wait": "waiting for cachemgr",
    "step_executor_wait": "waiting for executor",
    "step_executor_idle": "executor idle between steps",
    "sync": "one sync, beside the steps",
}
OWN, INSIDE = "own process", "in scheduler"
STUB = "bench.stub_executor"
WIRINGS = {
    OWN: {"cachemgr": "cachemgr", "executor": STUB, "scheduler": "scheduler"},
    INSIDE: {"executor": STUB, "scheduler": "bench.in_process"},
}
PROMPT_TOKENS = 64
# A step is at full load if it samples at least this share of the largest number of sequences in any step.
FULL = 0.9
PROCESSES = ("scheduler", "cachemgr", "redis", "executor", "client")

Histogram = dict[str, float]


@dataclass
class Wiring:
    """A running stack."""

    name: str
    stack: Stack
    address: str
    records: int = 0

    def histograms(self) -> dict[str, Histogram]:
        """Sum, count and cumulative buckets of the scheduler's histograms; the benchmark's counters as sums."""
        result: dict[str, Histogram] = {}
        for name, labels, value in metrics(self.address):
            part, _, kind = name.removeprefix(PREFIX).partition("_seconds")
            if name.startswith(PREFIX) and kind in ("_sum", "_count"):
                result.setdefault(part, {})[kind] = value
            elif name.startswith(PREFIX) and kind == "_bucket":
                result.setdefault(part, {})[labels.removeprefix('le="').rstrip('"')] = value
            elif name == "kvkeep_bench_sync_bytes_total":
                result[labels.partition('="')[2].rstrip('"')] = {"_sum": value}
        return result

    def processor(self) -> dict[str, float]:
        """Processor seconds of every process so far, of all its threads."""
        processes = {name: psutil.Process(self.stack.pid(name)) for name in self.stack.modules}
        processes["client"] = psutil.Process()
        if "cachemgr" in processes:
            processes["redis"] = psutil.Process(self.stack.pid("redis"))
        times = {name: process.cpu_times() for name, process in processes.items()}
        return {name: one.user + one.system for name, one in times.items()}

    def new_records(self) -> list[Record]:
        """Steps of the stub since the last call."""
        found = read_records(self.stack.folder, self.records)
        self.records += len(found)
        return found


def bucket(before: Histogram, after: Histogram, share: float) -> float:
    """Upper bound in milliseconds of the bucket that holds the percentile."""
    count = after["_count"] - before.get("_count", 0)
    bounds = sorted((float(bound), bound) for bound in after if not bound.startswith("_"))
    found = (value for value, bound in bounds if after[bound] - before.get(bound, 0) >= share * count)
    return next(found, float("inf")) * 1e3


def request(number: int, output_tokens: int, seed: int, vocabulary: int) -> bytes:
    """A prompt that does not share even its first token with prompts of other numbers."""
    first = number * PROMPT_TOKENS
    return pb.StreamGenerateRequest(
        token_ids=pb.TokenIds(token_ids=[token % vocabulary for token in range(first, first + PROMPT_TOKENS)]),
        max_tokens=output_tokens,
        ignore_eos=True,
        sampling=pb.SamplingParams(seed=seed),
    ).SerializeToString()


async def load(channel: grpc.aio.Channel, messages: Iterable[bytes], output_tokens: int) -> float:
    """Sends all requests at once; returns the seconds until the last request has ended. Parses answers afterwards."""
    # Sends and receives bytes: the client shares the machine with the measured processes.
    call = channel.unary_stream(GENERATE)

    async def one(message: bytes) -> list[bytes]:
        return [answer async for answer in call(message, timeout=600)]

    begin = time.perf_counter()
    answers = await asyncio.gather(*map(one, messages))
    seconds = time.perf_counter() - begin
    for parts in answers:
        assert sum(len(pb.StreamGenerateResponse.FromString(part).token_ids) for part in parts) == output_tokens
    return seconds


async def run(
    wiring: Wiring, channel: grpc.aio.Channel, messages: Sequence[bytes], output_tokens: int
) -> dict[str, Any]:
    """One run; times in milliseconds."""
    before, busy = wiring.histograms(), wiring.processor()
    seconds = await load(channel, messages, output_tokens)
    after, busy_after = wiring.histograms(), wiring.processor()
    steps = after["step_planning"]["_count"] - before["step_planning"]["_count"]
    result: dict[str, Any] = {
        "wiring": wiring.name,
        "sequences": len(messages),
        "seconds": seconds,
        "steps": steps,
        "tokens_per_second": len(messages) * output_tokens / seconds,
        "processor": {name: (busy_after[name] - busy[name]) / steps * 1e3 for name in busy},
        "parts": {
            part: [
                (after[part]["_sum"] - before[part]["_sum"]) / steps * 1e3,
                bucket(before[part], after[part], 0.5),
                bucket(before[part], after[part], 0.99),
            ]
            for part in PARTS
        },
        "sync_bytes": {
            name: (after[name]["_sum"] - before.get(name, {"_sum": 0})["_sum"]) / steps
            for name in ("request", "answer")
            if name in after
        },
    }
    if wiring.stack.modules["executor"] == STUB:
        records = wiring.new_records()
        result |= {"sampled": sum(record.sampled for record in records)} | describe(records)
    return result


def describe(records: Sequence[Record]) -> dict[str, Any]:
    """The stub's records of the steps in which almost all sequences decoded; times in milliseconds."""
    full = FULL * max(record.sampled for record in records)
    pairs = [pair for pair in itertools.pairwise(records) if min(one.sampled for one in pair) >= full]
    idle = [after.idle * 1e3 for _, after in pairs]
    period = [(after.begin - before.begin) * 1e3 for before, after in pairs]
    return {
        "running": statistics.mean(after.sampled for _, after in pairs),
        "period": [statistics.mean(period), percentile(period, 0.5), percentile(period, 0.99)],
        "idle": [statistics.mean(idle), percentile(idle, 0.5), percentile(idle, 0.99)],
        "idle_share": sum(idle) / sum(period),
        "step_bytes": statistics.mean(after.step_bytes for _, after in pairs),
        "result_bytes": statistics.mean(after.result_bytes for _, after in pairs),
    }


def summary(results: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The medians of each wiring; the first also has what it costs beside the second in the same repeat."""
    pairs = list(zip(*results.values(), strict=True))
    medians: list[dict[str, Any]] = [middle(repeats) for repeats in results.values()]
    medians[0]["cost"] = spread([own["seconds"] / inside["seconds"] - 1 for own, inside in pairs])
    medians[0]["cost_us_per_step"] = statistics.median(
        (own["seconds"] - inside["seconds"]) / own["steps"] * 1e6 for own, inside in pairs
    )
    return medians


def report(title: str, medians: Sequence[dict[str, Any]]) -> str:
    """Prints one case, both wirings side by side; returns a summary in one line."""
    print(f"\n{title}: {medians[0]['steps']:.0f} steps")

    def row(words: str, values: Iterable[str]) -> None:
        print(f"  {words:<44}" + "".join(f"{value:>22}" for value in values), flush=True)

    def times(values: Sequence[float]) -> str:
        return f"{values[0]:.3f} {values[1]:7.3f} {values[2]:7.3f}"

    row("", WIRINGS)
    row("end to end, s", [f"{one['seconds']:.3f}" for one in medians])
    row("output tokens/s", [f"{one['tokens_per_second']:.0f}" for one in medians])
    if "period" in medians[0]:
        row("sequences in a step of full load", [f"{one['running']:.0f}" for one in medians])
        row("step to step, ms: mean p50 p99", [times(one["period"]) for one in medians])
        row("executor idle, ms: mean p50 p99", [times(one["idle"]) for one in medians])
        row("executor idle, share of the step", [f"{one['idle_share']:.2%}" for one in medians])
        row("bytes of a step, of its result", [f"{one['step_bytes']:.0f} {one['result_bytes']:.0f}" for one in medians])
    for part, words in PARTS.items():
        row(f"{words}, ms: mean p50<= p99<=", [times(one["parts"][part]) for one in medians])
    inside = medians[1]["sync_bytes"]
    row("bytes of syncs per step, of their answers", ["", f"{inside['request']:.0f} {inside['answer']:.0f}"])
    for name in PROCESSES:
        row(f"processor ms per step: {name}", [f"{one['processor'].get(name, 0):.2f}" for one in medians])
    cost = medians[0]["cost"]
    print(f"  the separate process costs {medians[0]['cost_us_per_step']:+.0f} us per step")
    idle = " ".join(f"{one['idle_share']:8.2%}" for one in medians if "idle_share" in one)
    waited = medians[0]["parts"]["step_cachemgr_wait"][0]
    bounds = f"{cost['lowest']:+.1%} to {cost['highest']:+.1%}"
    return f"{title:<36}{cost['median']:>+9.2%}  {bounds:<18} {idle:<19}{waited:>10.3f}"


async def measure(wirings: Sequence[Wiring], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measures every case, with both wirings in turn."""
    names, lines = itertools.count(1), []
    everything: list[dict[str, Any]] = []
    async with AsyncExitStack() as stack:
        channels = {
            wiring.name: await stack.enter_async_context(grpc.aio.insecure_channel(wiring.stack.scheduler))
            for wiring in wirings
        }
        model: rpc.GenerationServiceAsyncStub = rpc.GenerationServiceStub(channels[OWN])
        vocabulary = (await model.GetModel(pb.GetModelRequest(), timeout=10)).vocab_size

        def messages(sequences: int, step: float, output_tokens: int) -> list[bytes]:
            return [request(next(names), output_tokens, int(step * 1e3), vocabulary) for _ in range(sequences)]

        for wiring in wirings:
            await load(channels[wiring.name], messages(max(arguments.sequences), 2, 8), 8)
        for sequences, step in itertools.product(arguments.sequences, arguments.step_ms):
            results: dict[str, list[dict[str, Any]]] = {name: [] for name in WIRINGS}
            for repeat in range(arguments.repeats):
                # The order changes, so that a drift affects both wirings equally.
                for wiring in wirings[:: -1 if repeat % 2 else 1]:
                    if not arguments.model:
                        wiring.new_records()
                    # Long enough that all sequences run together most of the time, however long they take to arrive.
                    tokens = arguments.output_tokens or max(256, 2 * sequences)
                    work = messages(sequences, step, tokens)
                    result = await run(wiring, channels[wiring.name], work, tokens)
                    results[wiring.name].append(result | {"step_ms": step})
            title = f"{sequences} sequences, " + (f"steps of {step:g} ms" if step else "the real model")
            medians = summary(results)
            lines.append(report(title, medians))
            everything += medians
    print(f"\n{'':<36}{'cost end to end':<30}{'executor idle, own':<20}ms per step waited")
    print(f"{'':<36}{'  median   least to most':<30}{'and in scheduler':<20}for cachemgr")
    print("\n".join(lines))
    return everything


def start(exits: ExitStack, name: str, arguments: argparse.Namespace) -> Wiring:
    """Starts the processes of a wiring."""
    address = free_address()
    modules = WIRINGS[name] | ({"executor": MODULES["executor"]} if arguments.model else {})
    most = max(arguments.sequences)
    tokens = most * (PROMPT_TOKENS + (arguments.output_tokens or max(256, 2 * most)))
    stack = Stack(
        modules=modules,
        scheduler_metrics_address=address,
        scheduler_max_running=most,
        scheduler_max_waiting=most,
        executor_max_tokens=max(65_536, 2 * tokens),
    )
    return Wiring(name, exits.enter_context(stack), address)


def main() -> None:
    """Starts both wirings and measures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, nargs="+")
    parser.add_argument("--step-ms", type=float, nargs="+", default=[2, 5, 20])
    parser.add_argument("--output-tokens", type=int, help="by default the larger of 256 and twice the sequences")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--model", action="store_true", help="the real executor instead of the stub")
    add_json_argument(parser)
    arguments = parser.parse_args()
    arguments.sequences = arguments.sequences or ([1, 32] if arguments.model else [1, 32, 128, 512])
    if arguments.model:
        arguments.step_ms = [0]
    with ExitStack() as exits:
        wirings = [start(exits, name, arguments) for name in WIRINGS]
        results = asyncio.run(measure(wirings, arguments))
    asked = {name: value for name, value in vars(arguments).items() if name != "json"}
    Result("overhead", {"runs": results}, asked).write(arguments.json)


if __name__ == "__main__":
    main()
