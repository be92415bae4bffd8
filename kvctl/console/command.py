"""`kvctl console`: serves the page until it is stopped."""

import asyncio
import os
from typing import Annotated

import typer

from kvctl.console.settings import ConsoleSettings
from kvctl.options import CachemgrMetrics, ExecutorMetrics, RouterMetrics, SchedulerMetrics
from kvctl.session import Router, Server, addresses_of
from kvctl.status import CommandError, Status
from protos.rpc import logs
from protos.rpc.addresses import AddressError
from protos.rpc.settings import STACK_METRICS, SettingsError, load, variable

app = typer.Typer()


@app.command("console", epilog="Example: kvctl console --address 127.0.0.1:9112")
def console(
    server: Server = "",
    router: Router = "",
    address: Annotated[
        str, typer.Option(help="host:port for browsers; by default KVKEEP_CONSOLE_ADDRESS or 127.0.0.1:9112.")
    ] = "",
    scheduler_metrics: SchedulerMetrics = STACK_METRICS["scheduler"],
    executor_metrics: ExecutorMetrics = STACK_METRICS["executor"],
    router_metrics: RouterMetrics = STACK_METRICS["router"],
    cachemgr_metrics: CachemgrMetrics = STACK_METRICS["cachemgr"],
) -> None:
    """Serve a page that shows the cache, until Ctrl-C. It shows what the viewer's token may read.

    It shows all cache managers and, with a router, the router's engines. The console reads load, rates and the last ten
    minutes with its own token, KVKEEP_TOKEN_FILE, where services ask for tokens.
    """
    # This import loads a web server, which no other verb needs.
    from kvctl.console.app import serve

    given = {variable(ConsoleSettings, "address"): address} if address else {}
    try:
        settings = load(ConsoleSettings, os.environ | given)
        shards = addresses_of(server, "--server")
        if not shards and not router:
            shards = [settings.cachemgr_admin_address]
        logs.configure("console", settings.log_level)
        if router:
            metrics = {"router": router_metrics, "cachemgr": cachemgr_metrics}
        else:
            metrics = {"scheduler": scheduler_metrics, "executor": executor_metrics, "cachemgr": cachemgr_metrics}
        asyncio.run(serve(settings, shards, router, metrics))
    except (AddressError, SettingsError) as error:
        raise CommandError(str(error), Status.USAGE) from None
