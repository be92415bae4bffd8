"""Progress of long steps without any package: one line that changes on a terminal, a few plain lines elsewhere."""

import contextlib
import shutil
import sys
import threading
import time
from collections.abc import Iterator

SPINNER = "|/-\\"
TERMINAL_SECONDS = 0.2
PLAIN_SECONDS = 15.0


class Progress:
    """Steps one after another, each with its elapsed time and a note about its current work."""

    def __init__(self) -> None:
        self.steps = 0
        self._terminal = sys.stdout.isatty()
        self._note = ""

    def note(self, text: str) -> None:
        """Shows the current work of the step; an empty text changes nothing."""
        self._note = text or self._note

    @contextlib.contextmanager
    def step(self, title: str) -> Iterator[None]:
        """Shows a step while its body runs."""
        self.steps += 1
        self._note, started, ended = "", time.monotonic(), threading.Event()
        if not self._terminal:
            print(f"{title} ...", flush=True)
        painter = threading.Thread(target=self._paint, args=(title, started, ended), daemon=True)
        painter.start()
        state = "failed"
        try:
            yield
            state = "done"
        finally:
            ended.set()
            painter.join()
            self._write(f"{title}: {state} after {time.monotonic() - started:.0f} s", last=True)

    def _paint(self, title: str, started: float, ended: threading.Event) -> None:
        turn = 0
        while not ended.wait(TERMINAL_SECONDS if self._terminal else PLAIN_SECONDS):
            turn += 1
            spinner = f"{SPINNER[turn % len(SPINNER)]} " if self._terminal else "  "
            note = f": {self._note}" if self._note else ""
            self._write(f"{spinner}{title}, {time.monotonic() - started:.0f} s{note}")

    def _write(self, line: str, *, last: bool = False) -> None:
        if not self._terminal:
            print(line, flush=True)
            return
        width = shutil.get_terminal_size().columns - 1
        print(f"\r\033[K{line[:width]}", end="\n" if last else "", flush=True)
