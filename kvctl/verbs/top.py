"""`kvctl top`: the whole stack on one screen, again and again."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

from kvctl.display import screen
from kvctl.display.output import Format
from kvctl.measure.readings import Reading, read
from kvctl.options import ExecutorMetrics, RouterMetrics, SchedulerMetrics
from kvctl.session import Session, verb
from kvctl.status import CommandError
from protos.rpc.settings import STACK_METRICS

app = typer.Typer()

# The width without a terminal.
PIPE_COLUMNS = 120


@verb(app, "top", "kvctl top --once")
def top(
    session: Session,
    once: Annotated[bool, typer.Option("--once", help="Show the screen once, as always without a terminal.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between readings; rates are over this time.")] = 1.0,
    scheduler_metrics: SchedulerMetrics = STACK_METRICS["scheduler"],
    executor_metrics: ExecutorMetrics = STACK_METRICS["executor"],
    router_metrics: RouterMetrics = STACK_METRICS["router"],
) -> None:
    """Show the stack live. Pools and tiers, tenants and salts, hit rate, queue, step time; Ctrl-C ends it.

    With a router it also shows the engines, each with its step time; then load, queue, rates and latencies are those of
    the router.
    """
    if session.router_address:
        metrics = {"router": router_metrics}
    else:
        metrics = {"scheduler": scheduler_metrics, "executor": executor_metrics}
    before = read(session, metrics)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, PIPE_COLUMNS)
    if once or not sys.stdout.isatty() or session.output in (Format.JSON, Format.YAML):
        time.sleep(interval)
        now = read(session, metrics)
        if session.output in (Format.JSON, Format.YAML):
            session.show(now.data(before), lambda _wide: "")
        else:
            console.print(screen.render(before, now))
        return
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(interval)
            now = _again(session, metrics, before)
            live.update(screen.render(before, now), refresh=True)
            before = now


def _again(session: Session, metrics: Mapping[str, str], before: Reading) -> Reading:
    """The next reading. If no cache manager answers, only the shards of `before` remain, with the error as trouble."""
    try:
        return read(session, metrics)
    except CommandError as error:
        return Reading(time.monotonic(), before.shards, before.routed, trouble=(f"cachemgr: {error}",))
