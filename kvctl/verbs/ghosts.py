"""`kvctl ghosts`: hit rates of caches of other sizes and other eviction orders."""

from collections.abc import Mapping
from typing import Annotated

import typer

from kvctl.display.output import Column, printable, share, table
from kvctl.options import Executor, duration_of
from kvctl.session import Session, verb
from kvctl.shards import Shard
from protos.kvcache.v1 import kvcache_pb2 as pb

app = typer.Typer()

POLICIES = {
    "RETENTION": pb.GHOST_POLICY_RETENTION,
    "LRU": pb.GHOST_POLICY_LRU,
    "SEGMENTED-LRU": pb.GHOST_POLICY_SEGMENTED_LRU,
}

# A size, and the hits of the caches of this size by policy.
_Row = tuple[int, Mapping[pb.GhostPolicy, int]]
# Ghost caches by executor.
_Ghosts = Mapping[str, pb.GetGhostCachesResponse]


@verb(app, "ghosts", "kvctl ghosts --window 10m")
def ghosts(
    session: Session,
    executor: Executor = "",
    window: Annotated[
        str,
        typer.Option(help="Time to look back, at most an hour: 90s, 10m; by default since the executor registered."),
    ] = "",
) -> None:
    """Estimate the hit rates of other cache sizes and eviction orders from live prompts. Ghost caches hold no bytes."""
    lasts = duration_of(window, "--window") if window else None

    def asked(shard: Shard) -> _Ghosts:
        names = [executor] if executor else sorted({pool.pool_id.rpartition("/")[0] for pool in shard.pools()})
        stub = shard.admin.stub
        return {
            name: shard.admin.call(stub.GetGhostCaches, pb.GetGhostCachesRequest(executor_id=name, window=lasts))
            for name in names
        }

    found = session.ask(asked, executor=executor)
    session.show_all(
        found,
        lambda wide: "\n\n".join(
            _shown(one, wide=wide, shard=f"{address}: " if found.several else "")
            for address, one in found.by_shard.items()
        ),
        lambda one: {"ghosts": one},
    )


def _shown(found: _Ghosts, *, wide: bool, shard: str) -> str:
    parts = []
    for name, answer in found.items():
        asked, hit = answer.tokens.queried_tokens, answer.tokens.hit_tokens
        lines = [
            f"{shard}{printable(name)}: {share(hit, asked)} of {asked} prompt tokens were cached;"
            f" the cache has {answer.device_blocks} blocks on the device and {answer.tier_blocks} in all tiers"
        ]
        if answer.caches:
            lines.append(table(_columns(answer), _rows(answer), wide=wide))
            lines.append(f"{share(answer.sample_rate, 1)} of the blocks are sampled")
        else:
            reasons = "KVKEEP_CACHEMGR_GHOST_SAMPLE is 0, or all pools of the executor have an attention window"
            lines.append(f"ghost caches are off: {reasons}")
        parts.append("\n".join(lines))
    return "\n\n".join(parts) or f"{shard}no executor is registered"


def _rows(answer: pb.GetGhostCachesResponse) -> list[_Row]:
    rows: dict[int, dict[pb.GhostPolicy, int]] = {}
    for cache in answer.caches:
        rows.setdefault(cache.total_blocks, {})[cache.policy] = cache.hit_tokens
    return sorted(rows.items(), key=lambda row: row[0])


def _columns(answer: pb.GetGhostCachesResponse) -> list[Column[_Row]]:
    asked = answer.tokens.queried_tokens

    def found_by(name: str, policy: pb.GhostPolicy) -> Column[_Row]:
        return Column(name, lambda row: share(row[1][policy], asked))

    return [
        Column("SIZE", lambda row: f"{row[0] / answer.device_blocks:.2g}x"),
        Column("BLOCKS", lambda row: row[0]),
        *(found_by(name, policy) for name, policy in POLICIES.items()),
    ]
