"""Logs of every process: one line per event on stderr, for people on a terminal and as JSON elsewhere.

Message contents (prompts, token ids, secrets) are never logged; tracebacks carry no local variables.
"""

import hashlib
import logging
import logging.handlers
import queue
import sys
import time
from pathlib import Path
from typing import Any

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

# Events that come in floods have one summary line per this time.
SUMMARY_SECONDS = 10.0


def configure(process: str, level: str = "info") -> None:
    """Sets up structlog and the standard library's logging for this process."""
    threshold = logging.getLevelNamesMapping()[level.upper()]
    shared = _shared(process)
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
    # Libraries log warnings and errors only.
    logging.basicConfig(handlers=[handler], level=max(threshold, logging.WARNING), force=True)


class Summaries:
    """Says when a summary line is due: at the first event, and then at the first event SUMMARY_SECONDS later."""

    def __init__(self) -> None:
        self._due_at = 0.0

    def is_due(self) -> bool:
        """Returns whether to write the line at this event."""
        now = time.monotonic()
        if now < self._due_at:
            return False
        self._due_at = now + SUMMARY_SECONDS
        return True


class FileLog:
    """A separate log in a file, with a JSON line per event of `log`, written in a separate thread.

    If the file was moved away, it is opened again, as logrotate expects. Raises OSError if it cannot be opened.
    """

    def __init__(self, process: str, path: Path) -> None:
        self._file = logging.handlers.WatchedFileHandler(path, encoding="utf-8")
        lines: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._writer = logging.handlers.QueueListener(lines, self._file)
        self._writer.start()
        logger = logging.Logger(path.name)
        logger.addHandler(logging.handlers.QueueHandler(lines))
        self.log: Any = structlog.wrap_logger(
            logger,
            processors=[*_shared(process), structlog.processors.JSONRenderer()],
            wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        )

    def close(self) -> None:
        """Writes the remaining lines."""
        self._writer.stop()
        self._file.close()


def short_hash(secret: str) -> str:
    """A hash that stands for a confidential name; the same as `printf %s NAME | sha256sum | cut -c -16`."""
    return hashlib.sha256(secret.encode()).hexdigest()[:16]


def _shared(process: str) -> list[Processor]:
    def add_process(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        event["process"] = process
        return event

    return [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        add_process,
    ]


def _rendering(terminal: bool) -> list[Processor]:
    if terminal:
        # Not the default formatter, which prints local variables, which hold prompts.
        return [structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)]
    return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
