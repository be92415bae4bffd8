"""Prefix hits of recorded requests in pools of several sizes, with retention requests and without.

Run it with `make bench-trace TRACE=file`, a JSONL file in Mooncake's format. No model runs, and the clock is virtual: a
request keeps its blocks for 0.2 s and 10 ms per generated token; no later prompt has its generated tokens.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from bench.replay import Outcome, PoolTooSmallError, Replay, demand, upper_bound, with_pauses
from bench.result import Result, add_json_argument
from bench.trace_file import BLOCK_TOKENS, Request, TraceError, read
from cachemgr.types import GhostPolicy, Retention, RetentionRange

SIZES = (0.5, 1.0, 2.0, 4.0)
PRESSURES = (1.2, 2.0)
WINDOW_SECONDS = 300.0
KEEP_SECONDS = 600.0
# A block counts as shared by all if this number of conversations have had it.
SHARED_BY = 4
LEASE_SECONDS = 10.0
SEED = 7

Policy = Callable[[Sequence[Request]], list[Retention | None]]


def no_retention(requests: Sequence[Request]) -> list[Retention | None]:
    """No retention: plain LRU."""
    return [None] * len(requests)


def retention_by_history(requests: Sequence[Request]) -> list[Retention | None]:
    """The retention that a router could request if it knows only earlier requests.

    The first request of a conversation asks to keep the leading blocks that many conversations have had, without an
    end; a request that follows asks to keep the rest of its conversation.
    """
    owners: dict[int, set[int]] = {}
    found: list[Retention | None] = []
    for request in requests:
        for number in request.hash_ids:
            known = owners.setdefault(number, set())
            if len(known) < SHARED_BY:
                known.add(request.conversation)
        leading = takewhile(lambda number: len(owners[number]) == SHARED_BY, request.hash_ids)
        common = min(sum(1 for _ in leading) * BLOCK_TOKENS, request.input_length)
        if request.follows and common < request.input_length:
            found.append(Retention((RetentionRange(common, None, 60, KEEP_SECONDS),)))
        elif common and not request.follows:
            found.append(Retention((RetentionRange(0, common, 80),)))
        else:
            found.append(None)
    return found


KEEP = Retention((RetentionRange(0, None, 60, LEASE_SECONDS),), 60, LEASE_SECONDS)


def every_request(requests: Sequence[Request]) -> list[Retention | None]:
    """Retention in which each request asks to keep its conversation."""
    return [KEEP] * len(requests)


def all_but_last_requests(requests: Sequence[Request]) -> list[Retention | None]:
    """An agent's retention, which knows whether it calls a tool: a conversation's last request asks for nothing."""
    last = {request.conversation: index for index, request in enumerate(requests)}
    return [None if last[request.conversation] == index else KEEP for index, request in enumerate(requests)]


def shown(requests: Sequence[Request], description: str) -> Iterable[Request]:
    """The requests, with progress on a terminal."""
    console = Console(stderr=True)
    return track(requests, description, console=console, transient=True, disable=not console.is_terminal)


def blocks_in(tokens: float, block_size: int) -> int:
    """Whole blocks, at least one."""
    return max(1, round(tokens / block_size))


def replays(
    requests: Sequence[Request], pools: dict[str, float], policies: dict[str, Policy], block_size: int
) -> Iterator[tuple[str, str, Outcome]]:
    """Replays every policy in every pool; pools: tokens by label. Leaves out a pool that is too small, with a note."""
    for label, tokens in pools.items():
        for name, policy in policies.items():
            replay = Replay(blocks_in(tokens, block_size), block_size)
            try:
                yield label, name, replay.run(shown(requests, f"{label}, {name}"), policy(requests))
            except PoolTooSmallError as error:
                print(f"{label:>10}  {error}")
                break


def row(pool: str, blocks: int, policy: str, outcome: Outcome) -> dict[str, Any]:
    """A replay in the results: tokens, requests that waited, and leases."""
    leases = outcome.leases
    return {
        "pool": pool,
        "blocks": blocks,
        "policy": policy,
        "queried_tokens": outcome.asked,
        "hit_tokens": outcome.found,
        "queried_tokens_of_follow_ups": outcome.asked_following,
        "hit_tokens_of_follow_ups": outcome.found_following,
        "waited": outcome.waited,
        "leases": {"granted": leases.granted, "honoured": leases.honoured, "broken": leases.broken},
    }


def sizes(requests: Sequence[Request], block_size: int) -> dict[str, Any]:
    """Prints the first table, of pool sizes; returns its figures."""
    base, _ = demand(requests, WINDOW_SECONDS)
    bound = upper_bound(requests) / sum(request.input_length for request in requests)
    print(
        f"\nHit rate in prompt tokens. 1x = {base:,.0f} tokens: what is in use or was in the last"
        f" {WINDOW_SECONDS:.0f} s, as the mean over time.\n"
        f"Retention requests: priority 80 without an end for leading blocks that {SHARED_BY} conversations"
        f" have had; 60 for {KEEP_SECONDS:.0f} s,\nby session, for the rest of a conversation with an earlier request;"
        f" else the default 35.\n{'pool':>10}{'blocks':>10}  {'policy':<20}{'hit rate':>10}{'of follow-ups':>15}"
        f"{'of the bound':>14}{'waited':>8}"
    )
    rows: list[dict[str, Any]] = []
    pools = {f"{size:g}x": size * base for size in SIZES}
    policies = {"least recently used": no_retention, "retention requests": retention_by_history}
    for label, name, outcome in replays(requests, pools, policies, block_size):
        rows.append(row(label, blocks_in(pools[label], block_size), name, outcome))
        print(
            f"{label:>10}{blocks_in(pools[label], block_size):>10,}  {name:<20}{outcome.hit_rate:>10.2%}"
            f"{outcome.following_hit_rate:>15.2%}{outcome.hit_rate / max(bound, 1e-9):>14.1%}{outcome.waited:>8,}",
            flush=True,
        )
    print(f"{'endless':>10}{'':>10}  {'upper bound':<20}{bound:>10.2%}")
    return {"demand_tokens": base, "upper_bound": bound, "replays": rows}


def agents(requests: Sequence[Request], block_size: int) -> dict[str, Any]:
    """Prints the second table, of pressures; returns its figures."""
    moved = with_pauses(requests, SEED)
    bound = upper_bound(moved) / sum(request.input_length for request in moved)
    mean, most = demand(moved, LEASE_SECONDS)
    print(
        f"\nAgents: {sum(request.follows for request in moved):,} requests follow another one of their conversation, a"
        f" pause after its end: 86 % within 1 s,\n95 % within 10 s, the rest 70 s on average."
        f" Retention request: priority 60 for {LEASE_SECONDS:.0f} s by session, prompt and output.\n"
        f"Demand is what is in use or was in the last {LEASE_SECONDS:.0f} s: {mean:,.0f} tokens as the mean over time,"
        f" {most:,.0f} at its peak.\nPressure = demand / pool. Honoured: the block was there until its lease ended or"
        " was replaced.\n"
        f"{'pressure':>10}{'blocks':>10}  {'policy':<20}{'hit rate':>10}{'of follow-ups':>15}{'granted':>10}"
        f"{'honoured':>10}{'broken':>9}{'share':>9}{'waited':>8}"
    )
    rows: list[dict[str, Any]] = []
    pools = {
        f"{pressure:g}x {name}": tokens / pressure
        for name, tokens in (("peak", most), ("mean", mean))
        for pressure in PRESSURES
    }
    policies = {
        "least recently used": no_retention,
        "of every request": every_request,
        "of all but the last": all_but_last_requests,
    }
    for label, name, outcome in replays(moved, pools, policies, block_size):
        rows.append(row(label, blocks_in(pools[label], block_size), name, outcome))
        leases = outcome.leases
        share = f"{leases.honoured / leases.granted:.2%}" if leases.granted else "-"
        print(
            f"{label:>10}{blocks_in(pools[label], block_size):>10,}  {name:<20}{outcome.hit_rate:>10.2%}"
            f"{outcome.following_hit_rate:>15.2%}{leases.granted:>10,}{leases.honoured:>10,}{leases.broken:>9,}{share:>9}"
            f"{outcome.waited:>8,}",
            flush=True,
        )
    print(f"{'endless':>10}{'':>10}  {'upper bound':<20}{bound:>10.2%}")
    return {"mean_demand_tokens": mean, "most_demand_tokens": most, "upper_bound": bound, "replays": rows}


def ghosts(requests: Sequence[Request], block_size: int, sample: int) -> list[dict[str, Any]]:
    """Prints hit rates of a pool's ghost caches and of pools of the same sizes; returns the figures."""
    rows: list[dict[str, Any]] = []
    base, _ = demand(requests, WINDOW_SECONDS)
    blocks = blocks_in(base, block_size)
    policies = {"least recently used": no_retention, "retention requests": retention_by_history}
    print(
        f"\nGhost caches of a pool of {blocks:,} blocks that follow {min(sample, blocks):,}, beside pools of these"
        f" sizes.\n{'policy':<20}{'blocks':>10}{'pool':>10}{'ghost':>10}{'error':>10}"
    )
    for name, policy in policies.items():
        replay = Replay(blocks, block_size, sample)
        seconds = replay.time_ghosts()
        replay.run(shown(requests, f"ghosts, {name}"), policy(requests))
        report = replay.ghosts()
        of = {one.total_blocks: one for one in report.caches if one.policy is GhostPolicy.RETENTION}
        pools = {f"{size:g}x": blocks_in(size * blocks * block_size, block_size) * float(block_size) for size in SIZES}
        for label, _, outcome in replays(requests, pools, {name: policy}, block_size):
            total = blocks_in(pools[label], block_size)
            found = of[total].hit_tokens / report.queried_tokens
            rates = {"hit_rate": outcome.hit_rate, "ghost_hit_rate": found}
            rows.append({"policy": name, "blocks": total, "cpu_s": sum(seconds), **rates})
            print(
                f"{name:<20}{total:>10,}{outcome.hit_rate:>10.2%}{found:>10.2%}{found - outcome.hit_rate:>10.2%}",
                flush=True,
            )
        taken = sum(seconds)
        print(
            f"  all caches together took {taken / len(requests) * 1e6:,.0f} us of the CPU per request, "
            f"{taken / report.queried_blocks * 1e6:.2f} us per block: 1 % of a core for"
            f" {0.01 / taken * report.queried_tokens:,.0f} prompt tokens per second"
        )
    return rows


def main() -> int:
    """Reads the trace and prints both tables, or only the ghost caches' table; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, help="only the first N requests")
    parser.add_argument("--block-size", type=int, choices=(16, 512), default=512, help="tokens per block (512)")
    parser.add_argument("--ghosts", type=int, metavar="N", help="only the quality of ghost caches that follow N blocks")
    add_json_argument(parser)
    arguments = parser.parse_args()
    trace = os.environ.get("TRACE", "")
    if not trace:
        print(
            "say which trace: make bench-trace TRACE=file, a JSONL file in Mooncake's format with timestamp (ms),\n"
            "input_length, output_length and hash_ids (one per 512 tokens) in each line",
            file=sys.stderr,
        )
        return 2
    try:
        requests = read(Path(trace), arguments.requests)
    except TraceError as error:
        print(f"bench-trace: {error}", file=sys.stderr)
        return 2
    conversations = len({request.conversation for request in requests})
    seconds = requests[-1].time - requests[0].time
    print(f"{len(requests):,} requests of {conversations:,} conversations in {seconds:,.0f} s, blocks of", end=" ")
    print(f"{arguments.block_size} tokens")
    figures: dict[str, Any]
    if arguments.ghosts:
        figures = {"ghosts": ghosts(requests, arguments.block_size, arguments.ghosts)}
    else:
        figures = {part.__name__: part(requests, arguments.block_size) for part in (sizes, agents)}
    asked = {name: value for name, value in vars(arguments).items() if name != "json"} | {"trace": Path(trace).name}
    Result("trace", figures, asked).write(arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
