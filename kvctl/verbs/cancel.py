"""The verb that ends one request."""

from typing import Annotated

import typer

from kvctl.options import DryRun, Yes
from kvctl.session import Session, verb
from kvctl.verbs.engines import abort

app = typer.Typer()


@verb(app, "cancel", "kvctl cancel chatcmpl-1 --yes")
def cancel(
    session: Session,
    request_id: Annotated[str, typer.Argument(help="Its request_id or X-Request-Id, or the id of its answer.")],
    tenant: Annotated[str | None, typer.Option(help="Of this tenant only.")] = None,
    engine: Annotated[
        str,
        typer.Option(help="Its address, name or executor, as `kvctl engines` lists it; scheduler or router without."),
    ] = "",
    dry_run: DryRun = False,
    yes: Yes = False,
) -> None:
    """End one request, as `kvctl abort ID` does; `kvctl abort --all` ends all of them."""
    abort(session, request_id, tenant=tenant, engine=engine, dry_run=dry_run, yes=yes)
