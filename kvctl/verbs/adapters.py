"""`kvctl adapters`: the LoRA adapters that requests may name as their model."""

from collections.abc import Sequence
from typing import Annotated

import typer

from kvctl.display.output import Column, number
from kvctl.options import DryRun, Yes
from kvctl.session import Session, confirm, verb
from kvctl.shards import Answers
from kvctl.verbs.engines import engine_address
from protos.generation.v1 import generation_pb2 as pb

app = typer.Typer(help="List, load and unload LoRA adapters.")

Name = Annotated[str, typer.Argument(help="Name of the adapter in requests.")]
Engine = Annotated[
    str,
    typer.Option(
        help="Its address, name or executor, as `kvctl engines` lists it; needed with a router, else the scheduler."
    ),
]

ADAPTERS: Sequence[Column[pb.ServedAdapter]] = (
    Column("NAME", lambda one: one.adapter.name),
    Column("ID", lambda one: one.adapter.adapter_id),
    Column("RANK", lambda one: one.adapter.rank),
    Column("RUNNING", lambda one: one.running_requests),
    Column("STATE", lambda one: "leaving" if one.leaving else "loaded"),
    Column("FOLDER", lambda one: one.adapter.path),
)


@verb(app, "list", "kvctl adapters list", lists=True)
def list_adapters(session: Session, engine: Engine = "") -> None:
    """List adapters with their ids, which are part of the keys of blocks and which --adapter takes."""
    operation = session.operation(engine_address(session, engine))
    answer = operation.call(operation.stub.ListAdapters, pb.ListAdaptersRequest())
    session.show_list(Answers({operation.address: answer}), ADAPTERS, lambda answer: answer.adapters, "adapters")


@verb(app, "load", "kvctl adapters load sql sql-lora")
def load(
    session: Session,
    name: Name,
    path: Annotated[str, typer.Argument(help="Folder that PEFT has saved, as the executor sees it.")],
    engine: Engine = "",
) -> None:
    """Load an adapter from below the folder that KVKEEP_EXECUTOR_ADAPTER_DIR names."""
    operation = session.operation(engine_address(session, engine))
    answer = operation.call(operation.stub.LoadAdapter, pb.LoadAdapterRequest(name=name, path=path))
    session.show(answer, lambda _wide: f"loaded {name}, rank {answer.adapter.rank}")


@verb(app, "unload", "kvctl adapters unload sql --yes")
def unload(session: Session, name: Name, engine: Engine = "", dry_run: DryRun = False, yes: Yes = False) -> None:
    """Refuse new requests for an adapter; unload the adapter when its running requests have ended."""
    operation = session.operation(engine_address(session, engine))

    def ask(*, dry_run: bool) -> pb.UnloadAdapterResponse:
        request = pb.UnloadAdapterRequest(name=name, validate_only=dry_run)
        return operation.call(operation.stub.UnloadAdapter, request)

    answer = ask(dry_run=True)
    if not dry_run:
        confirm(f"Unload the adapter {name}, in use by {_requests(answer)}?", yes=yes)
        answer = ask(dry_run=False)
    left = f" at the end of {_requests(answer)}" if answer.running_requests else ""
    session.show(answer, lambda _wide: f"{'would unload' if dry_run else 'unloaded'} {name}{left}")


def _requests(answer: pb.UnloadAdapterResponse) -> str:
    return number(answer.running_requests, "request")
