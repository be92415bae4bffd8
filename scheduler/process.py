"""The scheduler's process from settings to its end."""

import asyncio
import os
import signal
import sys
from collections.abc import Mapping

import structlog
import uvloop
from prometheus_client import REGISTRY

from protos.rpc import logs, tracing
from protos.rpc.addresses import AddressError
from protos.rpc.server import Server, StopSignals
from protos.rpc.settings import load, variable
from protos.rpc.startup import collect_rarely
from scheduler.app import Scheduler
from scheduler.errors import UnusableModelError
from scheduler.frontends import FrontEndMetrics, FrontEnds, available_cores, front_ends
from scheduler.settings import SchedulerSettings

# How long a thread may keep the GIL, in seconds: a tenth of Python's default. The step loop has little to do per step,
# but must not wait while another thread writes to callers.
SWITCH_SECONDS = 0.0005

log = structlog.get_logger()


async def serve(settings: SchedulerSettings, environ: Mapping[str, str]) -> int:
    """Serves until a signal; returns the exit status. environ: the environment of its front ends."""
    sys.setswitchinterval(SWITCH_SECONDS)
    count = front_ends(settings, available_cores())
    counted = FrontEndMetrics(REGISTRY) if count else None
    server = Server(
        "scheduler",
        metrics_address=settings.metrics_address,
        metrics=counted.registry if counted else REGISTRY,
        security=settings.security,
    )
    try:
        scheduler = Scheduler(settings, server, summed=counted.summed if counted else iter)
    except OSError as error:
        log.error("cannot write the access log", setting=variable(SchedulerSettings, "access_log"), cause=str(error))
        return 1
    server.listen(settings.scheduler_address, scheduler.services, setting="KVKEEP_SCHEDULER_ADDRESS")
    http = (
        FrontEnds(count, settings, scheduler, scheduler.opened, counted, environ)
        if counted
        else scheduler.http_server(server.guard)
    )
    signals = StopSignals()
    try:
        if http is not None:
            await http.start()
        await server.start()
    except AddressError as error:
        log.error("cannot listen", cause=str(error))
        return 1

    async def become_ready() -> None:
        try:
            await scheduler.start()
        except UnusableModelError as error:
            log.error("the scheduler cannot start", cause=str(error))
            scheduler.failed.set()
        except Exception:
            log.exception("the scheduler cannot start")
            scheduler.failed.set()
        if not scheduler.failed.is_set():
            collect_rarely()
        await scheduler.failed.wait()
        # This process cannot recover: it ends as on SIGTERM, with another status.
        os.kill(os.getpid(), signal.SIGTERM)

    ready = asyncio.create_task(become_ready())
    drained = await server.run_until_stopped(signals, scheduler.drain)
    ready.cancel()
    await asyncio.wait({ready})
    if http is not None:
        await http.stop(hurried=not drained)
    await (scheduler.stop() if drained else scheduler.stop(0))
    if not ready.cancelled():
        ready.result()
    return 1 if scheduler.failed.is_set() else 0


def run() -> int:
    """Runs until SIGTERM; returns the exit status."""
    settings = load(SchedulerSettings, os.environ)
    logs.configure("scheduler", settings.log_level)
    tracing.start("scheduler", os.environ)
    try:
        return uvloop.run(serve(settings, os.environ))
    finally:
        tracing.stop()
