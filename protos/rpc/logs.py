"""Logs of every process: one line per event on stderr, for people on a terminal and as JSON elsewhere.

Message contents (prompts, token ids, secrets) are never logged; tracebacks carry no local variables.
"""

import logging
import sys

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger


def configure(process: str, level: str = "info") -> None:
    """Sets up structlog and the standard library's logging for this process."""
    threshold = logging.getLevelNamesMapping()[level.upper()]

    def add_process(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        event["process"] = process
        return event

    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        add_process,
    ]
    rendering = _rendering(sys.stderr.isatty())
    structlog.configure(
        processors=[*shared, *rendering],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.PrintLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *rendering],
        )
    )
    # Libraries say what is wrong, not what they do.
    logging.basicConfig(handlers=[handler], level=max(threshold, logging.WARNING), force=True)


def _rendering(terminal: bool) -> list[Processor]:
    if terminal:
        # Not the default formatter: it prints local variables, which hold prompts.
        return [structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)]
    return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
