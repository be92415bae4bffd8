"""A peer as a process that is driven with lines of JSON and sleeps while others are measured."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import psutil

from bench.peers.set_up import ADAPTERS, Peer, peer_environment
from bench.runs import Others, Run, Times, Usage
from bench.workloads import Case

START_SECONDS = 900.0
JOB_SECONDS = 1800.0
END_SECONDS = 20.0


class PeerError(Exception):
    """A peer cannot be measured; the message says why."""


class PeerProcess:
    """One peer with the model loaded in one data type. Use it in a with statement."""

    def __init__(self, peer: Peer, python: Path, model: Path, dtype: str, cache: Path) -> None:
        self.name = peer.name
        self.version = ""
        cache.mkdir(parents=True, exist_ok=True)
        self._log = cache / f"{peer.name}-{dtype}.log"
        threads = len(os.sched_getaffinity(0))
        self._command = [str(python), str(ADAPTERS / peer.adapter), str(model), dtype, str(threads), str(cache)]
        self._unread = b""
        self._busy = True

    def __enter__(self) -> Self:
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                self._command,
                env=peer_environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                # The group is stopped and continued as a whole, and a Ctrl-C for this process does not end it.
                process_group=0,
            )
        try:
            self.version = self._answer(START_SECONDS)["ready"]
            self._sleep()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, case: Case, prompts: Sequence[Sequence[int]], output_tokens: int, *, ahead: bool = False) -> Run:
        """Sends all requests at once, or the first one ahead of the others; raises PeerError."""
        job = {"prompts": prompts, "output_tokens": output_tokens, "reuse": case.reuse, "ahead": ahead}
        with self._awake():
            assert self._process.stdin is not None
            try:
                ours = psutil.Process(self._process.pid)
                others = Others([ours, *ours.children(recursive=True), psutil.Process()])
                self._process.stdin.write(json.dumps(job).encode() + b"\n")
                self._process.stdin.flush()
                answer = self._answer(JOB_SECONDS)
                usage = Usage(others=others.share())
            except (BrokenPipeError, psutil.NoSuchProcess):
                raise PeerError(self._last_words()) from None
        times, outputs = answer["token_times"], answer["token_ids"]
        counts = {len(one) for one in (*times, *outputs)}
        if len(times) != len(prompts) or counts != {output_tokens}:
            raise PeerError(f"{case.name}: gave {sorted(counts)} tokens for {output_tokens}")
        return Run(Times(times, sum(map(len, prompts))), usage, outputs, 0)

    def close(self) -> None:
        """Ends the process and its children: busy processes at once, idle processes within END_SECONDS."""
        self._signal(signal.SIGKILL if self._busy else signal.SIGCONT)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._process.stdout.close()

    @contextlib.contextmanager
    def _awake(self) -> Iterator[None]:
        self._busy = True
        self._signal(signal.SIGCONT)
        try:
            yield
        except BaseException:
            # The engine would continue work without a reader, and disturb the engines that are measured next.
            self._signal(signal.SIGKILL)
            raise
        self._sleep()

    def _sleep(self) -> None:
        """Stops the process: some engines poll while they have nothing to do."""
        self._busy = False
        self._signal(signal.SIGSTOP)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _answer(self, seconds: float) -> dict[str, Any]:
        """The next line of the adapter. Raises PeerError if the adapter ends or takes longer than `seconds`."""
        assert self._process.stdout is not None
        descriptor, deadline = self._process.stdout.fileno(), time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise PeerError(f"no answer within {seconds:.0f} s, see {self._log}")
                piece = os.read(descriptor, 1 << 20)
                if not piece:
                    raise PeerError(self._last_words())
                self._unread += piece
        line, _, self._unread = self._unread.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _last_words(self) -> str:
        """The reason why the process ended, as far as its log says."""
        lines = [line.strip() for line in self._log.read_text(errors="replace").splitlines()]
        errors = [line for line in lines if "Error" in line] or [line for line in lines if line] or ["nothing said"]
        return f"it ended: {errors[-1][:200]} (see {self._log})"
