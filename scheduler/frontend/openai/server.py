"""The server of the HTTP API, in the scheduler, in a front end or in a router."""

from collections.abc import Awaitable, Callable

from protos.rpc import addresses
from protos.rpc.guard import Guard
from protos.rpc.http_server import HttpServer
from protos.rpc.settings import variable
from scheduler.frontend.grpc_service import GenerationService
from scheduler.frontend.openai.app import create_app
from scheduler.frontend.openai.origins import Origins
from scheduler.settings import HttpSettings, SchedulerSettings

SETTING = variable(SchedulerSettings, "http_address")


def http_server(
    service: GenerationService,
    settings: HttpSettings,
    guard: Guard,
    *,
    metrics: Callable[[], Awaitable[bytes]] | None = None,
) -> HttpServer:
    """metrics: as for create_app."""
    is_local = addresses.is_loopback(settings.http_address)
    app = create_app(
        service,
        max_prompt_bytes=settings.max_prompt_bytes,
        metrics=metrics,
        guard=guard,
        origins=Origins(settings.http_allowed_origins, local=is_local),
    )
    return HttpServer(
        app,
        settings.http_address,
        security=settings.security,
        setting=variable(type(settings), "http_address"),
        # A server that is reached from elsewhere has different names there.
        own_names=is_local and settings.serves_anybody,
    )
