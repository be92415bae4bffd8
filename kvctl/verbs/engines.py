"""Verbs about engines: list a router's engines, drain an engine, and end requests of an engine."""

import time
from collections.abc import Sequence
from typing import Annotated

import typer

from kvctl.display.output import Column, number, share, span
from kvctl.options import DryRun, Yes, duration_of
from kvctl.session import Session, addresses_of, confirm, verb
from kvctl.shards import Answers
from kvctl.status import CommandError, Status
from protos.generation.v1 import generation_pb2 as pb
from protos.rpc.durations import seconds

app = typer.Typer()

LOOK_SECONDS = 0.1

OfTenant = Annotated[str | None, typer.Option(help="Of this tenant only.")]
AtEngine = Annotated[
    str,
    typer.Option(
        help="Its address, name or executor, as `kvctl engines` lists it; by default the scheduler or router."
    ),
]


def _time(field: str) -> Column[pb.RoutedEngine]:
    """A measured time of an engine."""
    header = field.removesuffix("_time").replace("_", "-").upper()
    return Column(
        header,
        lambda one: span(seconds(getattr(one.loads, field))) if one.loads.HasField(field) else None,
        wide=True,
    )


ENGINES: Sequence[Column[pb.RoutedEngine]] = (
    Column("ENGINE", lambda one: one.address),
    Column("EXECUTOR", lambda one: one.executor_id),
    Column("SHARD", lambda one: one.cachemgr_admin_address),
    Column("STATE", lambda one: "ready" if one.ready else "away"),
    Column("RUNNING", lambda one: f"{one.loads.running_requests}/{one.loads.max_running_requests}"),
    Column("WAITING", lambda one: one.loads.waiting_requests),
    Column("QUEUED-TOKENS", lambda one: one.loads.queued_prompt_tokens),
    Column("REQUESTS", lambda one: one.routed_requests),
    Column("CACHED", lambda one: share(one.expected_cached_tokens, one.routed_tokens)),
    Column("VIEW", lambda one: "complete" if one.view_complete else "incomplete"),
    Column("NAME", lambda one: one.engine_id, wide=True),
    Column("CACHEMGR", lambda one: one.cachemgr_address, wide=True),
    *map(_time, ("prompt_token_time", "step_time", "sequence_time", "host_block_time", "disk_block_time")),
    Column("REQUEST", lambda one: span(seconds(one.request_time)) if one.HasField("request_time") else None, wide=True),
    Column("OBSTACLE", lambda one: one.obstacle),
)


@verb(app, "engines", "kvctl engines --router 127.0.0.1:50054", lists=True)
def engines(session: Session) -> None:
    """List a router's engines: shard, load, and routed requests.

    CACHED is the share of prompt tokens that the router expected to be cached. VIEW says whether the router knows all
    blocks that the engine has cached.
    """
    found = Answers({session.router_address: session.engines})
    session.show_list(found, ENGINES, lambda answer: answer.engines, "engines")


@verb(app, "drain", "kvctl drain --for 30s --yes")
def drain(
    session: Session,
    engine: Annotated[
        str,
        typer.Argument(
            help="Its address, name or executor, as `kvctl engines` lists it; needed with a router, else the scheduler."
        ),
    ] = "",
    undo: Annotated[bool, typer.Option("--undo", help="Admit requests again.")] = False,
    lasts: Annotated[
        str, typer.Option("--for", help="How long to wait until no request is left: 90s, 1h; 0s for not at all.")
    ] = "5m",
    dry_run: DryRun = False,
    yes: Yes = False,
) -> None:
    """Have the scheduler admit no more requests. Waits until no request runs or waits; exits with 1 if some remain."""
    operation = session.operation(engine_address(session, engine))
    whom = f"the engine {operation.address}" if engine else "the scheduler"
    deadline = time.monotonic() + seconds(duration_of(lasts, "--for"))

    def ask(*, dry_run: bool) -> pb.SetDrainingResponse:
        request = pb.SetDrainingRequest(draining=not undo, validate_only=dry_run)
        return operation.call(operation.stub.SetDraining, request)

    answer = ask(dry_run=True)
    left = answer.running_requests + answer.waiting_requests
    if not dry_run:
        if not undo:
            confirm(f"Drain {whom}, which has {_requests(answer)}?", yes=yes)
        answer = ask(dry_run=False)
        left = answer.running_requests + answer.waiting_requests
        while left and not undo and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)
            answer = ask(dry_run=True)
            left = answer.running_requests + answer.waiting_requests
    would = "would admit" if dry_run else "admits"
    does = f"{would} requests again" if undo else f"{would} no more requests"
    session.show(answer, lambda _wide: f"{whom} {does}; it has {_requests(answer)}")
    if left and not undo and not dry_run:
        raise typer.Exit(Status.FOUND)


@verb(app, "abort", "kvctl abort chatcmpl-1 --yes")
def abort(
    session: Session,
    request_id: Annotated[
        str, typer.Argument(help="The request's request_id, or the id of its answer; or give --all.")
    ] = "",
    everything: Annotated[bool, typer.Option("--all", help="All live requests.")] = False,
    tenant: OfTenant = None,
    engine: AtEngine = "",
    dry_run: DryRun = False,
    yes: Yes = False,
) -> None:
    """End requests: their answers end with the tokens so far, and with the finish reason "abort"."""
    if bool(request_id) == everything:
        raise typer.BadParameter("give a request's id, or --all for all of them", param_hint="ID")
    operation = session.operation(engine_address(session, engine) if engine else "")

    def ask(*, dry_run: bool) -> pb.AbortRequestsResponse:
        request = pb.AbortRequestsRequest(
            request_id=request_id, all=everything, tenant_id=tenant, validate_only=dry_run
        )
        return operation.call(operation.stub.AbortRequests, request)

    answer = ask(dry_run=True)
    if not dry_run:
        confirm(f"Abort {_live(answer)}?", yes=yes)
        answer = ask(dry_run=False)
    session.show(answer, lambda _wide: f"{'would abort' if dry_run else 'aborted'} {_live(answer)}")


@verb(app, "cancel", "kvctl cancel chatcmpl-1 --yes")
def cancel(
    session: Session,
    request_id: Annotated[str, typer.Argument(help="Its request_id or X-Request-Id, or the id of its answer.")],
    tenant: OfTenant = None,
    engine: AtEngine = "",
    dry_run: DryRun = False,
    yes: Yes = False,
) -> None:
    """End one request, as `kvctl abort ID` does; `kvctl abort --all` ends all of them."""
    abort(session, request_id, tenant=tenant, engine=engine, dry_run=dry_run, yes=yes)


def engine_address(session: Session, engine: str) -> str:
    """Where an engine serves; without a router and an engine, empty for the session's scheduler.

    Raises typer.BadParameter, CommandError.
    """
    if not session.router_address:
        found = addresses_of(engine, "ENGINE")
        if len(found) > 1 or (engine and not found):
            raise typer.BadParameter(f"{engine!r} is not one address", param_hint="ENGINE")
        return found[0] if found else ""
    if not engine:
        raise typer.BadParameter("name the engine, as `kvctl engines` lists it", param_hint="ENGINE")
    found = [one.address for one in session.engines.engines if engine in (one.address, one.engine_id, one.executor_id)]
    if not found:
        raise CommandError(f"the router has no engine {engine!r}", Status.REFUSED)
    if len(found) > 1:
        raise typer.BadParameter(f"{engine!r} is {' and '.join(found)}: give its address", param_hint="ENGINE")
    return found[0]


def _requests(answer: pb.SetDrainingResponse) -> str:
    return f"{answer.running_requests} running and {answer.waiting_requests} waiting"


def _live(answer: pb.AbortRequestsResponse) -> str:
    return number(answer.aborted_requests, "request")
