"""The output of run_stack: on a terminal a line per process, which changes; elsewhere a line per event."""

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from supervisor import Service


class Display:
    """Progress until the stack is ready, events afterwards."""

    def __init__(self) -> None:
        self._console = Console(highlight=False, soft_wrap=True)
        self._tasks: dict[str, TaskID] = {}
        self._progress: Progress | None = None
        if self._console.is_terminal:
            self._progress = Progress(
                SpinnerColumn(finished_text="+"),
                TextColumn("{task.description:<11}"),
                TimeElapsedColumn(),
                TextColumn("{task.fields[state]}"),
                console=self._console,
            )
            self._progress.start()

    def expect(self, service: Service) -> None:
        """Shows that a service is about to be started."""
        if self._progress:
            self._tasks[service.name] = self._progress.add_task(service.name, total=1, state="starting")
        else:
            self._print(f"{service.name}: starting")

    def report(self, service: Service, state: str) -> None:
        """Shows a new state of a service."""
        if self._progress:
            self._progress.update(self._tasks[service.name], state=state, completed=int(service.ready))
        else:
            self._print(f"{service.name}: {state}")

    def ready(self, seconds: float, directions: str) -> None:
        """Shows that everything is healthy."""
        self._end_progress()
        self._print(f"\nkvkeep is ready after {seconds:.1f} s\n\n{directions}\n")

    def failed(self, what: str, tail: Sequence[str]) -> None:
        """Shows that a service failed for good."""
        self._end_progress()
        self._print(f"\n{what}; the last lines of its log:")
        for line in tail:
            self._print(f"  {line}")

    def stopping(self, drain_seconds: float) -> None:
        """Shows that the stack is about to stop. drain_seconds: time for running requests, 0 if there cannot be any."""
        self._end_progress()
        drain = f"; running requests may go on for up to {drain_seconds:.0f} s, Ctrl-C again ends them at once"
        self._print("\nstopping" + (drain if drain_seconds else ""))

    def warn(self, what: str) -> None:
        """Shows a note for people while the stack runs."""
        self._print(f"warning: {what}\n")

    def _end_progress(self) -> None:
        if self._progress:
            self._progress.stop()
            self._progress = None

    def _print(self, text: str) -> None:
        self._console.print(escape(text))
