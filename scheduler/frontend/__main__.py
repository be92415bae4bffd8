"""`python -m scheduler.frontend`: a front end of `python -m scheduler`, which starts it with two open sockets."""

import os
import signal
import socket
import sys

import structlog
import uvloop

from protos.rpc import logs, tracing
from protos.rpc.guard import Guard
from protos.rpc.settings import load
from protos.rpc.startup import process_parser
from scheduler.frontend.openai.server import http_server
from scheduler.frontend.pipe import Pipe
from scheduler.frontend.process import FrontEnd
from scheduler.settings import SchedulerSettings

log = structlog.get_logger()


async def serve(settings: SchedulerSettings, listener: socket.socket, connected: socket.socket) -> int:
    """Serves until the scheduler says to stop, or has ended; returns the exit status."""
    pipe = await Pipe.over(connected)
    front_end = FrontEnd(settings, pipe)
    guard = Guard(settings.tokens_file, settings.audit_file)
    http = http_server(front_end.service, settings, guard, metrics=front_end.metrics)
    await http.start(listener)
    is_orderly = await front_end.run()
    await http.stop(hurried=not is_orderly)
    guard.audit.flush()
    await front_end.close()
    pipe.close()
    return 0 if is_orderly else 1


def main() -> int:
    parser = process_parser(
        "python -m scheduler.frontend",
        "Serves OpenAI's API for a scheduler with KVKEEP_SCHEDULER_FRONTENDS. The scheduler starts this program "
        "with the settings of the scheduler.",
    )
    parser.add_argument("listener", type=int, help="descriptor of a socket that listens")
    parser.add_argument("pipe", type=int, help="descriptor of a socket to the scheduler")
    parser.add_argument("number", type=int, help="number of this front end in its log lines")
    given = parser.parse_args()
    # The scheduler says when to stop, once all requests have ended.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    settings = load(SchedulerSettings, os.environ)
    logs.configure(f"frontend-{given.number}", settings.log_level)
    tracing.start("scheduler", os.environ)
    try:
        return uvloop.run(serve(settings, socket.socket(fileno=given.listener), socket.socket(fileno=given.pipe)))
    finally:
        tracing.stop()


if __name__ == "__main__":
    sys.exit(main())
