"""`python -m scheduler.router`: runs the router until SIGTERM."""

import asyncio
import os
import signal
import sys

import structlog
import uvloop

from protos.rpc import logs, tracing
from protos.rpc.addresses import AddressError
from protos.rpc.server import Server
from protos.rpc.settings import SettingsError, load, variable
from protos.rpc.startup import collect_rarely, process_parser
from scheduler.errors import UnusableModelError
from scheduler.router.process import Router
from scheduler.router.settings import RouterSettings

log = structlog.get_logger()


async def serve(settings: RouterSettings) -> int:
    """Serves until a signal; returns the exit status."""
    server = Server("router", metrics_address=settings.metrics_address, security=settings.security)
    try:
        router = Router(settings, server)
    except OSError as error:
        log.error("cannot write the access log", setting=variable(RouterSettings, "access_log"), cause=str(error))
        return 1
    server.listen(settings.address, router.services, setting=variable(RouterSettings, "address"))
    http = router.http_server(server.guard)
    try:
        if http is not None:
            await http.start()
        await server.start()
    except AddressError as error:
        log.error("cannot listen", cause=str(error))
        return 1

    async def become_ready() -> None:
        try:
            await router.start()
        except (AddressError, UnusableModelError) as error:
            log.error("the router cannot start", cause=str(error))
            router.failed.set()
        except Exception:
            log.exception("the router cannot start")
            router.failed.set()
        else:
            collect_rarely()
        await router.failed.wait()
        # This process cannot recover: it ends as on SIGTERM, with another status.
        os.kill(os.getpid(), signal.SIGTERM)

    ready = asyncio.create_task(become_ready())
    drained = await server.run_until_stopped(router.drain)
    ready.cancel()
    await asyncio.wait({ready})
    if http is not None:
        await http.stop(hurried=not drained)
    await router.stop()
    return 1 if router.failed.is_set() else 0


def main() -> int:
    process_parser(
        "python -m scheduler.router",
        "Runs the router until SIGTERM: it serves generation over gRPC (KVKEEP_ROUTER_ADDRESS) and OpenAI's API over\n"
        "HTTP (KVKEEP_ROUTER_HTTP_ADDRESS), and sends each request to one of several engines (KVKEEP_ROUTER_ENGINES).",
    ).parse_args()
    settings = load(RouterSettings, os.environ)
    if not settings.engines:
        raise SettingsError(f"{variable(RouterSettings, 'engines')} names no engine: give it host:port of schedulers")
    logs.configure("router", settings.log_level)
    tracing.start("router", os.environ)
    try:
        return uvloop.run(serve(settings))
    finally:
        tracing.stop()


if __name__ == "__main__":
    sys.exit(main())
