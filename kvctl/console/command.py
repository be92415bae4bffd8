"""`kvctl console`: serves the page until it is stopped."""

import asyncio
import os
from typing import Annotated

import typer

from kvctl.console.settings import ConsoleSettings
from kvctl.session import SERVER, Server
from kvctl.status import CommandError, Status
from protos.rpc import logs
from protos.rpc.addresses import AddressError
from protos.rpc.settings import SettingsError, load, variable

app = typer.Typer()


@app.command("console", epilog="Example: kvctl console --address 127.0.0.1:9112")
def console(
    server: Server = SERVER,
    address: Annotated[
        str, typer.Option(help="host:port for browsers; KVKEEP_CONSOLE_ADDRESS or 127.0.0.1:9112 without it.")
    ] = "",
) -> None:
    """Serve a page that shows the cache, until Ctrl-C. It shows what the viewer's token may read."""
    # A web server, which no other verb needs.
    from kvctl.console.app import serve

    given = {"cachemgr_admin_address": server} | ({"address": address} if address else {})
    try:
        settings = load(
            ConsoleSettings, os.environ | {variable(ConsoleSettings, field): value for field, value in given.items()}
        )
        logs.configure("console", settings.log_level)
        asyncio.run(serve(settings))
    except (AddressError, SettingsError) as error:
        raise CommandError(str(error), Status.USAGE) from None
