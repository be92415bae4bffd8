"""Verbs that follow: events as they happen, and the replay of an operation log."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from kvctl.display import tables
from kvctl.display.output import Format, as_yaml, plain
from kvctl.options import Pool, Salt, duration_of
from kvctl.session import Session, verb
from protos.kvcache.v1 import kvcache_pb2 as pb
from protos.rpc.durations import seconds

app = typer.Typer()


@verb(app, "watch", "kvctl watch --salt acme --for 10s")
def watch(
    session: Session,
    pool: Pool = "",
    salt: Salt = None,
    after: Annotated[int | None, typer.Option(min=0, help="Go on behind this event, without a snapshot.")] = None,
    token_ids: Annotated[bool, typer.Option("--token-ids", help="With the tokens of blocks (JSON, YAML).")] = False,
    lasts: Annotated[str, typer.Option("--for", help="End after this time: 90s, 1h; on Ctrl-C without it.")] = "",
    count: Annotated[int, typer.Option(min=0, help="End after this number of events; 0 for any number.")] = 0,
) -> None:
    """Show events as they happen. A snapshot of the cache is first; each event is a line, as JSON too."""
    request = pb.WatchEventsRequest(pool_id=pool, salt=salt, after_event_number=after, include_token_ids=token_ids)
    limit = seconds(duration_of(lasts, "--for")) if lasts else None
    service = session.events
    batches = service.messages(service.stub.WatchEvents, request, limit, ends=True)
    for number, event in enumerate((event for batch in batches for event in batch.events), start=1):
        typer.echo(_line(event, session.output))
        if number == count:
            return


def _line(event: pb.Event, output: Format) -> str:
    match output:
        case Format.JSON:
            return json.dumps(plain(event), ensure_ascii=False)
        case Format.YAML:
            return "---\n" + as_yaml(event).rstrip("\n")
        case _:
            return tables.event(event)


@app.command("replay", epilog="Example: kvctl replay operations.log")
def replay(
    file: Annotated[
        Path, typer.Argument(exists=True, dir_okay=False, help="The file of KVKEEP_CACHEMGR_OPERATION_LOG.")
    ],
) -> None:
    """Run an operation log again. Shows the state that it leads to; needs the package cachemgr."""
    # A process of its own: kvctl does not import the cache manager.
    raise typer.Exit(subprocess.run([sys.executable, "-m", "cachemgr", "replay", str(file)], check=False).returncode)  # noqa: S603
