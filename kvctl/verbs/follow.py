"""Verbs that follow: events as they happen, and the replay of an operation log."""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Annotated

import typer

from kvctl.display import tables
from kvctl.display.output import Format, as_yaml, plain
from kvctl.options import Pool, Salt, duration_of
from kvctl.session import Session, verb
from kvctl.shards import Shard, ShardsError
from kvctl.status import CommandError
from protos.kvcache.v1 import kvcache_pb2 as pb
from protos.rpc.durations import seconds

app = typer.Typer()


@verb(app, "watch", "kvctl watch --salt acme --for 10s")
def watch(
    session: Session,
    pool: Pool = "",
    salt: Salt = None,
    after: Annotated[int | None, typer.Option(min=0, help="Go on after this event, without a snapshot.")] = None,
    token_ids: Annotated[bool, typer.Option("--token-ids", help="Show the tokens of blocks (JSON, YAML).")] = False,
    lasts: Annotated[str, typer.Option("--for", help="End after this time: 90s, 1h; by default on Ctrl-C.")] = "",
    count: Annotated[int, typer.Option(min=0, help="End after this number of events; 0 for any number.")] = 0,
) -> None:
    """Show events as they happen, after a snapshot of the cache. Each event is one line, also as JSON.

    Each shard numbers its own events: --after works with a single shard only.
    """
    request = pb.WatchEventsRequest(pool_id=pool, salt=salt, after_event_number=after, include_token_ids=token_ids)
    limit = seconds(duration_of(lasts, "--for")) if lasts else None
    shards = [session.shard] if after is not None else session.shards
    if pool and len(shards) > 1:
        owner = session.ask(Shard.pools, pool=pool).by_shard
        shards = [shard for shard in shards if shard.address in owner]
    several = len(shards) > 1
    for error in session.unknown.values():
        typer.echo(f"warning: {error}", err=True)
    number = 0
    for address, batch in _together(shards, request, limit):
        for event in batch.events:
            number += 1
            typer.echo(_line(event, session.output, address if several else ""))
            if number == count:
                return


def _together(
    shards: Sequence[Shard], request: pb.WatchEventsRequest, seconds: float | None
) -> Iterator[tuple[str, pb.WatchEventsResponse]]:
    """Yields batches of all shards as they arrive, with the shard's address. Raises CommandError at the first error."""

    def batches(shard: Shard) -> Iterator[pb.WatchEventsResponse]:
        return shard.events.messages(shard.events.stub.WatchEvents, request, seconds, ends=True)

    if len(shards) == 1:
        yield from ((shards[0].address, batch) for batch in batches(shards[0]))
        return
    arrived: SimpleQueue[tuple[str, pb.WatchEventsResponse | CommandError | None]] = SimpleQueue()

    def follow(shard: Shard) -> None:
        try:
            for batch in batches(shard):
                arrived.put((shard.address, batch))
        except CommandError as error:
            arrived.put((shard.address, error))
        else:
            arrived.put((shard.address, None))

    for shard in shards:
        # The end of the session closes their channels.
        Thread(target=follow, args=(shard,), daemon=True).start()
    running = len(shards)
    while running:
        address, found = arrived.get()
        if isinstance(found, CommandError):
            raise ShardsError({address: found})
        if found is None:
            running -= 1
        else:
            yield address, found


def _line(event: pb.Event, output: Format, shard: str) -> str:
    data = ({"shard": shard} if shard else {}) | plain(event)
    match output:
        case Format.JSON:
            return json.dumps(data, ensure_ascii=False)
        case Format.YAML:
            return "---\n" + as_yaml(data).rstrip("\n")
        case _:
            return f"{shard}  {tables.event(event)}" if shard else tables.event(event)


@app.command("replay", epilog="Example: kvctl replay operations.log")
def replay(
    file: Annotated[
        Path, typer.Argument(exists=True, dir_okay=False, help="The file of KVKEEP_CACHEMGR_OPERATION_LOG.")
    ],
) -> None:
    """Run an operation log again, and show the resulting state. Needs the package cachemgr."""
    # Starts a separate process: kvctl does not import the cache manager.
    raise typer.Exit(subprocess.run([sys.executable, "-m", "cachemgr", "replay", str(file)], check=False).returncode)  # noqa: S603
