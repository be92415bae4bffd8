"""`python -m scheduler`: runs the scheduler until SIGTERM."""

import asyncio
import os
import signal
import sys

import structlog
import uvloop

from protos.rpc import logs
from protos.rpc.addresses import AddressError
from protos.rpc.garbage import collect_rarely
from protos.rpc.server import Server
from protos.rpc.settings import load
from scheduler.app import Scheduler
from scheduler.service import SERVICE
from scheduler.settings import SchedulerSettings

# Longest time that one thread keeps others from running, in seconds: a tenth of what Python sets. The step loop has
# little to do in each step, and must not wait for a whole turn of what writes to the callers.
SWITCH_SECONDS = 0.0005

log = structlog.get_logger()


async def serve(settings: SchedulerSettings) -> int:
    """Serves until a signal; returns the exit status."""
    sys.setswitchinterval(SWITCH_SECONDS)
    scheduler = Scheduler(settings)
    server = Server("scheduler", metrics_address=settings.metrics_address, insecure=settings.insecure)
    server.listen(settings.scheduler_address, {SERVICE: scheduler.service.add_to}, setting="KVKEEP_SCHEDULER_ADDRESS")
    try:
        await server.start()
    except AddressError as error:
        log.error("cannot listen", cause=str(error))
        return 1

    async def become_ready() -> None:
        await scheduler.start()
        collect_rarely()
        server.set_serving(True)
        await scheduler.failed.wait()
        # Nothing can be repaired from here: end as on SIGTERM, with another status.
        os.kill(os.getpid(), signal.SIGTERM)

    ready = asyncio.create_task(become_ready())
    await server.run_until_stopped(scheduler.drain)
    ready.cancel()
    await asyncio.wait({ready})
    await scheduler.stop()
    if not ready.cancelled():
        ready.result()
    return 1 if scheduler.failed.is_set() else 0


def main() -> int:
    """Reads the settings and serves."""
    settings = load(SchedulerSettings, os.environ)
    logs.configure("scheduler", settings.log_level)
    return uvloop.run(serve(settings))


if __name__ == "__main__":
    sys.exit(main())
