"""Starts the cache manager: `python -m cachemgr`; `python -m cachemgr replay FILE` runs an operation log again."""

import os
import sys
from pathlib import Path

import uvloop

from cachemgr.oplog import replay
from cachemgr.oplog.writer import OperationLogError
from cachemgr.process import CacheManagerProcess
from cachemgr.settings import CachemgrSettings
from protos.rpc import logs, tracing
from protos.rpc.addresses import AddressError
from protos.rpc.settings import SettingsError, load, variable
from protos.rpc.startup import collect_rarely, process_parser


def main() -> None:
    """Runs until SIGTERM or Ctrl-C, or replays a log and ends."""
    parser = process_parser(
        "python -m cachemgr",
        "Runs the cache manager until SIGTERM: it owns the blocks of the KV cache and says which prompt finds what.\n"
        "It keeps a copy of the index in the Redis of KVKEEP_REDIS_URL; without one a restart loses the cache.",
    )
    parser.usage = "%(prog)s [-h] [replay FILE]"
    replaying = parser.add_subparsers(dest="command", metavar="COMMAND", prog=parser.prog).add_parser(
        "replay", help="run an operation log again and say what it leads to"
    )
    replaying.add_argument("file", metavar="FILE", type=Path, help="written because of KVKEEP_CACHEMGR_OPERATION_LOG")
    asked = parser.parse_args()
    if asked.command is None:
        _serve()
        return
    try:
        sys.stdout.write(replay.report(asked.file) + "\n")
    except (OperationLogError, OSError) as error:
        sys.exit(f"cachemgr: {error}")


def _serve() -> None:
    settings = load(CachemgrSettings, os.environ)
    if settings.key_index and not settings.redis_url:
        raise SettingsError(f"{variable(CachemgrSettings, 'key_index')} needs KVKEEP_REDIS_URL")
    logs.configure("cachemgr", settings.log_level)
    tracing.start("cachemgr", os.environ)
    try:
        uvloop.run(_run(settings))
    except (AddressError, OperationLogError) as error:
        sys.exit(f"cachemgr: {error}")
    finally:
        tracing.stop()


async def _run(settings: CachemgrSettings) -> None:
    process = CacheManagerProcess(settings)
    await process.start()
    collect_rarely()
    await process.run_until_stopped()


if __name__ == "__main__":
    main()
