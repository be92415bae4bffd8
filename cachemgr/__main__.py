"""Starts the cache manager: `python -m cachemgr`; `python -m cachemgr replay FILE` runs an operation log again."""

import sys
from pathlib import Path

from protos.rpc.startup import process_parser


def main() -> None:
    """Runs until SIGTERM or Ctrl-C, or replays a log and ends."""
    parser = process_parser(
        "python -m cachemgr",
        "Runs the cache manager until SIGTERM. It owns the blocks of the KV cache and finds a prompt's cached blocks.\n"
        "It keeps a copy of the index in the Redis of KVKEEP_REDIS_URL; without Redis, a restart loses the cache.",
    )
    parser.usage = "%(prog)s [-h] [replay FILE]"
    replaying = parser.add_subparsers(dest="command", metavar="COMMAND", prog=parser.prog).add_parser(
        "replay", help="run an operation log again, and show the resulting state"
    )
    replaying.add_argument("file", metavar="FILE", type=Path, help="written because of KVKEEP_CACHEMGR_OPERATION_LOG")
    asked = parser.parse_args()
    # Imported late, so that --help is fast.
    if asked.command is None:
        from cachemgr.process import run

        run()
        return
    from cachemgr.oplog import replay
    from cachemgr.oplog.writer import OperationLogError

    try:
        sys.stdout.write(replay.report(asked.file) + "\n")
    except (OperationLogError, OSError) as error:
        sys.exit(f"cachemgr: {error}")


if __name__ == "__main__":
    main()
