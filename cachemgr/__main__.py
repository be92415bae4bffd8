"""Starts the cache manager: `python -m cachemgr`; `python -m cachemgr replay FILE` runs an operation log again.

Its settings are KVKEEP_ variables.
"""

import os
import sys
from pathlib import Path

import uvloop

from cachemgr import replay
from cachemgr.embedded_redis import EmbeddedRedis, EmbeddedRedisError
from cachemgr.oplog import OperationLogError
from cachemgr.process import CacheManagerProcess
from cachemgr.settings import CachemgrSettings
from protos.rpc import logs, tracing
from protos.rpc.addresses import AddressError
from protos.rpc.garbage import collect_rarely
from protos.rpc.settings import load


def main() -> None:
    """Runs until SIGTERM or Ctrl-C, or replays a log and ends."""
    match sys.argv[1:]:
        case []:
            _serve()
        case ["replay", file]:
            try:
                sys.stdout.write(replay.report(Path(file)) + "\n")
            except (OperationLogError, OSError) as error:
                sys.exit(f"cachemgr: {error}")
        case _:
            sys.exit("usage: python -m cachemgr [replay FILE]")


def _serve() -> None:
    settings = load(CachemgrSettings, os.environ)
    logs.configure("cachemgr", settings.log_level)
    tracing.start("cachemgr", os.environ)
    embedded: EmbeddedRedis | None = None
    try:
        if not settings.redis_url:
            embedded = EmbeddedRedis.start(settings.state_dir)
        uvloop.run(_run(settings, embedded))
    except (AddressError, EmbeddedRedisError, OperationLogError) as error:
        sys.exit(f"cachemgr: {error}")
    finally:
        tracing.stop()
        if embedded is not None:
            embedded.stop()


async def _run(settings: CachemgrSettings, embedded: EmbeddedRedis | None) -> None:
    if embedded is None:
        process = CacheManagerProcess(settings, redis_url=settings.redis_url)
    else:
        process = CacheManagerProcess(settings, redis_url=embedded.url, revive_redis=embedded.revive)
    await process.start()
    collect_rarely()
    await process.run_until_stopped()


if __name__ == "__main__":
    main()
