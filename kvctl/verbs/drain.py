"""`kvctl drain`: keeps requests away from a scheduler without ending it."""

import time
from typing import Annotated

import typer

from kvctl.options import DryRun, Yes, duration_of
from kvctl.session import Session, confirm, verb
from kvctl.status import Status
from protos.generation.v1 import generation_pb2 as pb
from protos.rpc.durations import seconds

app = typer.Typer()

LOOK_SECONDS = 0.1


@verb(app, "drain", "kvctl drain --for 30s --yes")
def drain(
    session: Session,
    undo: Annotated[bool, typer.Option("--undo", help="Admit requests again.")] = False,
    lasts: Annotated[
        str, typer.Option("--for", help="Wait so long for running requests: 90s, 1h; 0s not at all.")
    ] = "5m",
    dry_run: DryRun = False,
    yes: Yes = False,
) -> None:
    """Have the scheduler admit no more requests. Waits for running ones; exits with 1 when some are left."""
    operation, deadline = session.operation, time.monotonic() + seconds(duration_of(lasts, "--for"))

    def ask(*, dry_run: bool) -> pb.SetDrainingResponse:
        request = pb.SetDrainingRequest(draining=not undo, validate_only=dry_run)
        return operation.call(operation.stub.SetDraining, request)

    answer = ask(dry_run=True)
    left = answer.running_requests + answer.waiting_requests
    if not dry_run:
        if not undo:
            confirm(f"Drain the scheduler, which has {_requests(answer)}?", yes=yes)
        answer = ask(dry_run=False)
        left = answer.running_requests + answer.waiting_requests
        while left and not undo and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)
            answer = ask(dry_run=True)
            left = answer.running_requests + answer.waiting_requests
    would = "would admit" if dry_run else "admits"
    does = f"{would} requests again" if undo else f"{would} no more requests"
    session.show(answer, lambda _wide: f"the scheduler {does}; it has {_requests(answer)}")
    if left and not undo and not dry_run:
        raise typer.Exit(Status.FOUND)


def _requests(answer: pb.SetDrainingResponse) -> str:
    return f"{answer.running_requests} running and {answer.waiting_requests} waiting"
