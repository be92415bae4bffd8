"""The screen of `kvctl top`."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.panel import Panel
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text

from kvctl.display.output import printable, share
from kvctl.display.tables import account
from kvctl.measure.readings import WINDOW_SECONDS, Reading, ShardReading, rates, sees_all
from protos.generation.v1 import generation_pb2
from protos.kvcache.v1 import kvcache_pb2 as pb
from protos.rpc.durations import seconds

# The largest number of salts and of quotas that are shown.
MOST = 12
USED, CACHED, EMPTY = "green", "blue", "bright_black"
LEAST_BAR, MOST_BAR = 8, 60


def render(before: Reading, now: Reading) -> RenderableType:
    """Draws the screen. before: an earlier reading, for rates."""
    parts: list[RenderableType] = [_title(now), _load(before, now)]
    if now.engines is not None:
        parts.append(_engines(now.engines))
    for address, shard in now.shards.by_shard.items():
        earlier = before.shards.by_shard.get(address, shard)
        parts.append(_pools(earlier, shard, now.at - before.at, address if now.shards.several else ""))
    parts.append(_salts(now))
    for address, shard in now.shards.by_shard.items():
        if shard.quotas:
            parts.append(_quotas(shard, address if now.shards.several else ""))
    parts += [Text(line, style="red") for line in now.trouble]
    return Group(*parts)


class Bar:
    """A line of cells for counts, each in its colour; every count above 0 has at least one cell."""

    def __init__(self, parts: Sequence[tuple[int, str]]) -> None:
        self._parts = parts

    def cells(self, width: int) -> list[int]:
        """How many of `width` cells each count has."""
        total = sum(count for count, _ in self._parts)
        if not total:
            return [0] * len(self._parts)
        cells = [max(1, round(count / total * width)) if count else 0 for count, _ in self._parts]
        cells[cells.index(max(cells))] += width - sum(cells)
        return cells

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for width, (_, colour) in zip(self.cells(min(options.max_width, MOST_BAR)), self._parts, strict=True):
            yield Segment("━" * width, Style.parse(colour))

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(LEAST_BAR, min(MOST_BAR, options.max_width))


def _title(now: Reading) -> RenderableType:
    title = Text("kvkeep", style="bold")
    if now.model is not None:
        title.append(f"  {printable(now.model.model)}  {_dtypes(now.model)}", style="cyan")
    return title


def _dtypes(model: generation_pb2.GetModelResponse) -> str:
    """The data type of the weights, and of the cache if it differs."""
    if model.kv_cache_dtype in ("", model.dtype):
        return model.dtype
    return f"{model.dtype}, cache {model.kv_cache_dtype}"


def _load(before: Reading, now: Reading) -> RenderableType:
    found = rates(before, now)
    running = waiting = preempted = "-"
    if now.loads is not None:
        running, preempted = str(now.loads.running_requests), str(now.loads.preemptions)
        waiting = f"{now.loads.waiting_requests}/{now.loads.max_waiting_requests}"
    columns = [
        (("running", running), ("waiting", waiting), ("preempted", preempted)),
        (
            ("step", _milliseconds(found["step_seconds"])),
            ("planning", _milliseconds(found["planning_seconds"])),
            ("cache wait", _milliseconds(found["cachemgr_wait_seconds"])),
        ),
        (
            ("TTFT", _milliseconds(found["time_to_first_token_seconds"])),
            ("ITL", _milliseconds(found["inter_token_latency_seconds"])),
            ("steps/s", _number(found["steps_per_second"])),
        ),
        (
            ("prompt/s", _number(found["prompt_tokens_per_second"])),
            ("cached/s", _number(found["cached_tokens_per_second"])),
            ("output/s", _number(found["output_tokens_per_second"])),
        ),
    ]
    if now.routed:
        # The table of engines shows the steps of each engine.
        del columns[1]
    grid = Table.grid(padding=(0, 1), expand=True)
    for _ in columns:
        grid.add_column(style="bright_black", no_wrap=True)
        grid.add_column(justify="right", no_wrap=True)
        grid.add_column(ratio=1)
    for row in zip(*columns, strict=True):
        grid.add_row(*(cell for name, value in row for cell in (name, value, "")))
    return _panel("load", grid)


def _engines(found: generation_pb2.ListEnginesResponse) -> RenderableType:
    made = _table(("engine", "state"), ("running", "waiting", "queued", "step", "sent", "cached"))
    made.expand = True
    made.columns[0].ratio, made.columns[0].overflow = 1, "ellipsis"
    for one in found.engines:
        made.add_row(
            printable(one.address),
            Text("ready", style="green") if one.ready else Text("away", style="red"),
            f"{one.loads.running_requests}/{one.loads.max_running_requests}",
            str(one.loads.waiting_requests),
            str(one.loads.queued_prompt_tokens),
            _milliseconds(seconds(one.loads.step_time) if one.loads.HasField("step_time") else None),
            str(one.routed_requests),
            share(one.expected_cached_tokens, one.routed_tokens),
        )
    return _panel(f"engines, policy {printable(found.policy)}", made)


def _pools(before: ShardReading, now: ShardReading, elapsed: float, address: str) -> RenderableType:
    """The pools. elapsed: seconds between the readings. address: the shard's if there are several, else empty."""
    hit = f"hit {WINDOW_SECONDS}s" if sees_all(now.pools) else "hit"
    made = _table(("pool", "tier"), (hit, "used", "cached", "blocks", "evicted/s", "up", "down"))
    made.expand = True
    made.add_column(
        Text.assemble(("used", USED), " ", ("cached", CACHED), " ", ("empty", EMPTY)), ratio=1, no_wrap=True
    )
    for pool in now.pools:
        stats = now.stats[pool.pool_id]
        earlier = {tier.tier: _lost(tier) for tier in before.stats.get(pool.pool_id, stats).tiers}
        head = (printable(pool.pool_id), share(stats.tokens.hit_tokens, stats.tokens.queried_tokens))
        if not stats.tiers:
            # A tenant's operator sees the pool without tiers.
            made.add_row(head[0], "", head[1])
        for tier in stats.tiers:
            empty = tier.total_blocks - tier.used_blocks - tier.cached_blocks
            made.add_row(
                head[0],
                pb.Tier.Name(tier.tier).removeprefix("TIER_").lower(),
                head[1],
                *map(str, (tier.used_blocks, tier.cached_blocks, tier.total_blocks)),
                _number(max(0, _lost(tier) - earlier.get(tier.tier, 0)) / elapsed),
                str(tier.onloaded_blocks),
                str(tier.offloaded_blocks),
                Bar(((tier.used_blocks, USED), (tier.cached_blocks, CACHED), (empty, EMPTY))),
            )
            # Shown once for all tiers of a pool.
            head = ("", "")
    return _panel(f"pools of {address}" if address else "pools", made)


def _lost(tier: pb.TierStats) -> int:
    """Blocks that the tier has dropped: by eviction without an offload, or because the pool became smaller."""
    causes = (pb.REMOVAL_CAUSE_EVICTED, pb.REMOVAL_CAUSE_POOL_SHRUNK)
    return sum(one.num_blocks for one in tier.removed if one.cause in causes)


def _salts(now: Reading) -> RenderableType:
    """Prompt tokens per salt over all pools, the salts with the most tokens first."""
    found: dict[str, list[int]] = {}
    for stats in (stats for shard in now.shards.by_shard.values() for stats in shard.stats.values()):
        for one in stats.salts:
            name = "(others)" if one.others else printable(one.salt) if one.HasField("salt") else "(no salt)"
            sums = found.setdefault(name, [0, 0])
            sums[0] += one.tokens.queried_tokens
            sums[1] += one.tokens.hit_tokens
    made = _table(("salt",), ("queried", "hit", "hit rate"))
    for name, (asked, hit) in sorted(found.items(), key=lambda item: -item[1][0])[:MOST]:
        made.add_row(name, str(asked), str(hit), share(hit, asked))
    return _panel("prompt tokens by salt, since the start", made)


def _quotas(now: ShardReading, address: str) -> RenderableType:
    made = _table(("account", "pool"), ("device", "floor", "ceiling", "host", "floor", "ceiling"))
    for one in now.quotas[:MOST]:
        quota = one.quota
        made.add_row(
            account(quota),
            printable(one.pool_id),
            str(one.device_blocks),
            str(quota.device_floor_blocks),
            str(quota.device_ceiling_blocks) if quota.HasField("device_ceiling_blocks") else "-",
            str(one.host_blocks),
            str(quota.host_floor_blocks),
            str(quota.host_ceiling_blocks) if quota.HasField("host_ceiling_blocks") else "-",
        )
    title = "tenants and salts with a quota, in blocks"
    return _panel(f"{title}, of {address}" if address else title, made)


def _panel(title: str, inside: RenderableType) -> Panel:
    return Panel(inside, title=title, title_align="left", border_style="bright_black")


def _table(names: Sequence[str], numbers: Sequence[str]) -> Table:
    made = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for header in names:
        made.add_column(header, no_wrap=True)
    for header in numbers:
        made.add_column(header, justify="right", no_wrap=True)
    return made


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value * 1000:.2f} ms"
