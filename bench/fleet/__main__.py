"""Results of each router policy at many rates, with a fleet of engines that compute nothing.

Everything but the devices is real: cache managers with Redis, schedulers, the router, and a client process that sends
requests when they are due. Arrivals are Poisson with a fixed seed; every policy gets the same requests. A device takes
a fixed time for a step and for a prompt token. All prefixes with five questions each take 73 % of the blocks of all
devices, as in llm-d's workload, the source of these numbers; but here each question is asked once. Times begin when a
request is due. Refused requests are shed: they are not sent again and count in no latency.

Each policy is also simulated without processes, and so is a placement that knows the future. The simulations alone
(`--simulated`) also run at sizes that no machine has room for: 256 engines take minutes.
An exclamation mark marks a stage in which the machine or a process had no processor time left: such a stage
measures Python and not a policy.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bench import plots
from bench.fleet.bounds import PLACED, PLACEMENTS, Device, Simulation, simulated
from bench.fleet.client import Answer, Ask
from bench.fleet.processes import DIRECT, Fleet, Measured
from bench.fleet.workload import BURST, BURST_SECONDS, Groups, Stage, Trace
from bench.result import Result, add_json_argument, percentile
from bench.tables import table
from scheduler.router.policies import POLICIES

# Share of all cores, or of one core for a process. Above this share a stage says nothing about its policy.
SATURATED = 0.85
SHED = "RESOURCE_EXHAUSTED"


def figures(answers: Sequence[Answer], seconds: float) -> dict[str, Any]:
    """Callers' results for the requests that were due in the measured time."""
    good = [one for one in answers if one.code == "OK" and one.first is not None]
    shed = sum(one.code == SHED for one in answers)
    found: dict[str, Any] = {
        "requests": len(answers),
        "shed": shed,
        "failed": len(answers) - len(good) - shed,
        "output_tokens_per_s": sum(one.counted for one in answers) / seconds,
    }
    if good:
        first = [one.first - one.due for one in good if one.first is not None]
        found["ttft_mean_s"] = statistics.mean(first)
        found |= {f"ttft_p{share}_s": percentile(first, share / 100) for share in (50, 90, 99)}
        between = [
            (one.last - one.first) / (one.output_tokens - 1)
            for one in good
            if one.first is not None and one.last is not None and one.output_tokens > 1
        ]
        if between:
            found["itl_mean_s"] = statistics.mean(between)
        found["hit_rate"] = sum(one.cached_tokens for one in good) / sum(one.prompt_tokens for one in good)
    return found


def record(stage: Stage, answers: Sequence[Answer], **values: Any) -> dict[str, Any]:
    """Everything about one stage, for JSON. Warm-up requests and requests of a burst have fewer figures."""
    due = [one for one in answers if one.due >= stage.measured_from]
    warming = [one for one in answers if one.due < stage.measured_from]
    kept = {"rate": stage.rate, **values, **figures(due, stage.seconds - stage.measured_from)}
    # All tokens that come in the measured time count, including tokens of earlier requests.
    kept["output_tokens_per_s"] = sum(one.counted for one in answers) / (stage.seconds - stage.measured_from)
    burst = [one for request, one in zip(stage.requests, answers, strict=True) if request.group.startswith(BURST)]
    if burst:
        kept["burst"] = figures(burst, BURST_SECONDS)
        del kept["burst"]["output_tokens_per_s"]
    if warming:
        seen = figures(warming, stage.measured_from)
        del seen["output_tokens_per_s"]
        kept["warming"] = seen
    return kept


def measured(found: Measured) -> dict[str, Any]:
    """The figures of a stage besides its answers."""
    counts, load, router = found.by_engine.values(), found.load, found.router
    if router:
        router = router | {"regret": router["regret_tokens"] / max(router["routed_tokens"], 1)}
    return {
        "saturated": max(load.machine, load.busiest) > SATURATED,
        "cpu": load.machine,
        "cpu_others": load.others,
        "cpu_busiest_process": load.busiest,
        "cpu_s_per_s": {name: seconds / load.seconds for name, seconds in load.cpu.items()},
        "idle_share": found.idle_share,
        "by_engine": found.by_engine,
        "most_by_mean": max(counts) / max(statistics.mean(counts), 1e-9),
        "late_p99_s": percentile([one.sent - one.due for one in found.answers], 0.99) if found.answers else 0.0,
        **router,
    }


def run(fleet: Fleet, policy: str, stages: Iterable[Stage]) -> Iterable[dict[str, Any]]:
    """Runs all stages under one policy."""
    for stage in stages:
        if stage.cold:
            fleet.purge()
            fleet.restart_routers(policy)
        found = fleet.measure(Ask(fleet.targets, stage.requests, stage.measured_from, stage.seconds))
        yield record(stage, found.answers, policy=policy, **measured(found))


def simulate(name: str, device: Device, engines: int, stages: Sequence[Stage]) -> Iterable[dict[str, Any]]:
    """Simulates all stages with one placement."""
    everything = [request for stage in stages for request in stage.requests]

    def simulation() -> Simulation:
        return Simulation(device, engines, PLACEMENTS[name](everything, engines))

    running = simulation()
    for stage in stages:
        if stage.cold:
            running = simulation()
        answers = running.run(stage.requests, (stage.measured_from, stage.seconds))
        counts = Counter(answer.target for answer in answers)
        most_by_mean = max(counts.values(), default=0) * engines / max(len(answers), 1)
        yield record(stage, answers, policy=name, most_by_mean=most_by_mean)


def simulations(policies: Sequence[str]) -> Sequence[str]:
    """The simulated placements that belong to these policies. Without a router, engines get requests in turn."""
    return [PLACED, *dict.fromkeys(simulated("round-robin" if one == DIRECT else one) for one in policies)]


def cells(one: dict[str, Any]) -> list[str]:
    """A line of the table."""

    def value(name: str, form: str) -> str:
        return format(one[name], form) if one.get(name) is not None else ""

    return [
        one["policy"],
        value("output_tokens_per_s", ",.0f"),
        *(value(f"ttft_{name}_s", ".2f") for name in ("mean", "p90", "p99")),
        f"{1e3 * one['itl_mean_s']:.1f}" if "itl_mean_s" in one else "",
        value("hit_rate", ".1%"),
        f"{one['shed']} of {one['requests']}" + (f", {one['failed']} failed" if one["failed"] else ""),
        value("regret", ".1%"),
        value("most_by_mean", ".2f"),
        value("cpu", ".0%") + ("!" if one.get("saturated") else ""),
        value("cpu_others", ".0%"),
        value("idle_share", ".1%"),
    ]


HEAD = (
    "output\ntokens/s",
    "TTFT mean\ns",
    "p90\ns",
    "p99\ns",
    "ITL mean\nms",
    "hit\nrate",
    "shed",
    "regret of\nrouted tokens",
    "busiest\nby mean",
    "CPU",
    "of it\nothers",
    "devices\nidle",
)


def show(records: Sequence[dict[str, Any]], unit: str) -> str:
    """A table for each rate, and one table of all rates."""
    rates = list(dict.fromkeys(one["rate"] for one in records))
    parts = []
    for rate in rates:
        rows = []
        for one in records:
            if one["rate"] == rate:
                rows.append(cells(one))
                if "burst" in one:
                    rows.append(cells({"policy": "  its burst", **one["burst"]}))
        parts.append(table((f"\n{rate} {unit}", *HEAD), rows))
    policies = list(dict.fromkeys(one["policy"] for one in records))
    found = {(one["policy"], one["rate"]): one for one in records}
    rows = []
    for policy in policies:
        row = [policy]
        for rate in rates:
            cell = found.get((policy, rate), {})
            times = f"{cell['ttft_p90_s']:.2f}" if "ttft_p90_s" in cell else ""
            row.append(f"{cell['output_tokens_per_s']:,.0f} / {times}" if cell else "")
        rows.append(row)
    parts.append(table((f"output tokens/s / TTFT p90 in s\nat {unit}", *rates), rows))
    return "\n\n".join(parts)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    # The default comes last, as all others are compared with it.
    policies = [*reversed(POLICIES)]
    made.add_argument(
        "--policies", nargs="+", choices=[DIRECT, *policies], default=policies, help=f"{DIRECT}: without a router"
    )
    made.add_argument("--engines", type=int, default=8)
    made.add_argument("--shards", type=int, default=1, help="cache managers")
    made.add_argument("--routers", type=int, default=1, help="side by side; requests go to each in turn")
    made.add_argument("--rates", type=float, nargs="+", help="requests per second; of a trace, its speeds")
    made.add_argument("--seconds", type=float, default=60, help="of a stage; of a trace at its own speed")
    made.add_argument("--cold-rate", type=float, default=4, help="requests per second of the cold start")
    made.add_argument("--groups", type=int, default=Groups.groups)
    made.add_argument("--users", type=int, default=Groups.users)
    made.add_argument("--prefix-tokens", type=int, default=Groups.prefix_tokens)
    made.add_argument("--question-tokens", type=int, default=Groups.question_tokens)
    made.add_argument("--output-tokens", type=int, default=Groups.output_tokens)
    made.add_argument("--burst", type=int, default=0, help="requests of one new prefix within a second of each stage")
    made.add_argument("--seed", type=int, default=Groups.seed)
    made.add_argument("--trace", type=Path, help="a file in Mooncake's format that replaces groups")
    made.add_argument("--trace-begin", type=float, default=0, help="seconds at the start of the trace to leave out")
    made.add_argument("--trace-scale", type=int, default=4, help="lengths and times are divided by this number")
    made.add_argument("--step-ms", type=float, default=50)
    made.add_argument("--sequence-ms", type=float, default=0, help="what each sequence that decodes adds to a step")
    made.add_argument("--prefill-rate", type=float, default=4_000, help="prompt tokens per second")
    made.add_argument("--pool-tokens", type=int, default=308_224, help="of an engine")
    made.add_argument("--host-tier", default="0", help="of an engine, as KVKEEP_EXECUTOR_HOST_CACHE_SIZE")
    made.add_argument("--block-size", type=int, default=16)
    made.add_argument("--max-batched-tokens", type=int, default=512)
    made.add_argument("--max-running", type=int, default=64)
    made.add_argument("--max-waiting", type=int, default=16)
    made.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="settings: cachemgr_ghost_sample=0")
    made.add_argument("--simulated", action="store_true", help="only the simulations, which need no processes")
    made.add_argument("--smoke", action="store_true", help="two engines and a few requests, in seconds")
    add_json_argument(made)
    return made


# What --smoke changes.
SMOKE = {
    "policies": (DIRECT, "cost"),
    "engines": 2,
    "rates": [10.0],
    "seconds": 3.0,
    "cold_rate": 10.0,
    "groups": 8,
    "prefix_tokens": 600,
    "question_tokens": 20,
    "output_tokens": 8,
    "pool_tokens": 4_000,
    "step_ms": 20.0,
}


def stages_of(given: argparse.Namespace) -> list[Stage]:
    """The workload of the fleet."""
    if given.trace is not None:
        trace = Trace(given.trace, given.trace_scale, given.trace_begin)
        return list(trace.stages(given.rates or [0.5, 0.75, 1.0, 1.25], given.seconds))
    names = ("groups", "users", "prefix_tokens", "question_tokens", "output_tokens", "seed", "burst")
    groups = Groups(**{name: getattr(given, name) for name in names})
    return list(groups.stages(given.rates or [6, 12, 16, 20], given.seconds, given.cold_rate))


def settings_of(given: argparse.Namespace) -> dict[str, Any]:
    """Settings of the processes."""
    return {
        "executor_max_tokens": given.pool_tokens,
        "executor_block_size": given.block_size,
        "executor_host_cache_size": given.host_tier,
        "executor_stub_step_seconds": given.step_ms / 1e3,
        "executor_stub_sequence_seconds": given.sequence_ms / 1e3,
        "executor_stub_prefill_rate": given.prefill_rate,
        "scheduler_max_batched_tokens": given.max_batched_tokens,
        "scheduler_max_running": given.max_running,
        "scheduler_max_waiting": given.max_waiting,
        **dict(pair.split("=", 1) for pair in given.set),
    }


def main() -> int:
    """Measures and reports."""
    made = parser()
    if "--smoke" in sys.argv:
        made.set_defaults(**SMOKE)
    given = made.parse_args()
    stages = stages_of(given)
    unit = "of the trace's speed" if given.trace else "requests/s"
    device = Device(
        given.step_ms / 1e3,
        given.prefill_rate,
        given.pool_tokens,
        given.max_batched_tokens,
        given.max_running,
        given.max_waiting,
        given.sequence_ms / 1e3,
    )
    records = [one for name in simulations(given.policies) for one in simulate(name, device, given.engines, stages)]
    asked = {name: value for name, value in vars(given).items() if name != "json"}
    if given.simulated:
        written = Result("fleet_simulated", {"unit": unit, "stages": records}, asked).write(given.json)
        print(show(records, unit))
        print(f"all stages are in {written}", file=sys.stderr)
        return 0
    with Fleet(given.engines, given.shards, settings_of(given), given.routers) as fleet:
        for policy in given.policies:
            for one in run(fleet, policy, stages):
                records.append(one)
                print(table(("", *HEAD), [[f"{one['policy']} {one['rate']}", *cells(one)[1:]]]), file=sys.stderr)
                # Kept during the run: a long run may be ended.
                written = Result("fleet", {"unit": unit, "stages": records}, asked).write(given.json)
    print(show(records, unit))
    if plots.fleet({"unit": unit, "stages": records, **asked}, written.with_suffix(".png")):
        print(f"drawn in {written.with_suffix('.png')}", file=sys.stderr)
    print(f"all stages are in {written}", file=sys.stderr)
    return 1 if any(one["failed"] for one in records) else 0


if __name__ == "__main__":
    sys.exit(main())
