"""The executor's process: checks its settings, and runs until it is stopped."""

import os
import sys
import time

import structlog
import uvloop

from executor import preflight
from executor.errors import CacheFileError, ModelError
from executor.settings import ExecutorSettings
from protos.rpc import addresses, logs, tracing
from protos.rpc.addresses import AddressError

log = structlog.get_logger()


def main(settings: ExecutorSettings) -> int:
    """Runs until SIGTERM or SIGINT; returns the exit status."""
    logs.configure("executor", settings.log_level)
    tracing.start("executor", os.environ)
    try:
        return uvloop.run(_run(settings))
    except (ModelError, CacheFileError, AddressError) as error:
        print(f"executor: {error}", file=sys.stderr)  # noqa: T201
        return 1
    finally:
        tracing.stop()


async def _run(settings: ExecutorSettings) -> int:
    started = time.monotonic()
    log.info("starting", model=settings.model or "default")
    # An address that no server could listen on is reported before the model is loaded.
    for name, address in settings.listening.items():
        if address:
            addresses.prepare(address, insecure=settings.security.may_be_reached, setting=name)
    preflight.check(settings, os.environ)
    # Imported late, so that a wrong setting is reported at once rather than after seconds.
    from executor.parts import serve

    return await serve(settings, started)
