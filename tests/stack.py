"""Starts the real processes on unix sockets in a folder of their own, for tests and benchmarks."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

ROOT = Path(__file__).resolve().parent.parent
START_SECONDS = 120.0
STOP_SECONDS = 15.0
PROCESSES = ("cachemgr", "executor", "scheduler")


def model_cache() -> Path:
    """Where references computed once are kept: beside the converted models."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvkeep"


class Stack:
    """cachemgr (with an embedded Redis), executor and scheduler as processes. Use it in a with statement.

    `settings` are environment variables without their KVKEEP_ prefix, in lower case: executor_max_tokens=2048.
    """

    def __init__(self, **settings: object) -> None:
        # Unix socket paths are short: the usual temporary folders of tests are not.
        self.folder = Path(tempfile.mkdtemp(prefix="kvk-", dir="/tmp"))
        self.scheduler = f"unix:{self.folder}/scheduler.sock"
        self.cachemgr = f"unix:{self.folder}/cachemgr.sock"
        self.admin = f"unix:{self.folder}/admin.sock"
        self.executor = f"unix:{self.folder}/executor.sock"
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._environment = {name: value for name, value in os.environ.items() if not name.startswith("KVKEEP_")}
        defaults: dict[str, object] = {
            "scheduler_address": self.scheduler,
            "cachemgr_address": self.cachemgr,
            "cachemgr_admin_address": self.admin,
            "executor_address": self.executor,
            "state_dir": self.folder / "state",
            "scheduler_metrics_address": "",
            "cachemgr_metrics_address": "",
            "executor_metrics_address": "",
            "executor_dtype": "float32",
            "executor_max_tokens": 65_536,
        }
        for name, value in (defaults | settings).items():
            self._environment[f"KVKEEP_{name.upper()}"] = str(value)
        self._environment["PYTHONPATH"] = str(ROOT)

    def __enter__(self) -> Self:
        try:
            for name in PROCESSES:
                self.start(name)
            for name in PROCESSES:
                self.wait_until_serving(name)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.show_logs()
        self.stop()

    def start(self, name: str) -> None:
        """Starts one process."""
        with self.log_path(name).open("ab") as log:
            self._children[name] = subprocess.Popen(
                [sys.executable, "-m", name], cwd=ROOT, env=self._environment, stdout=log, stderr=log
            )

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        """Sends a process a signal and waits for its end."""
        child = self._children[name]
        child.send_signal(number)
        child.wait(STOP_SECONDS)

    def wait_until_serving(self, name: str) -> None:
        """Waits for grpc.health.v1; an ended process or a long wait is an error that shows its log."""
        address = {"cachemgr": self.cachemgr, "executor": self.executor, "scheduler": self.scheduler}[name]
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self._children[name].poll() is None:
            with grpc.insecure_channel(address) as channel, contextlib.suppress(grpc.RpcError):
                answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=2)
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
            time.sleep(0.05)
        self.show_logs()
        raise RuntimeError(f"{name} did not begin to serve")

    def log_path(self, name: str) -> Path:
        """Log of a process."""
        return self.folder / f"{name}.log"

    def show_logs(self) -> None:
        """Prints the end of every log."""
        for name in PROCESSES:
            if self.log_path(name).exists():
                lines = self.log_path(name).read_text(errors="replace").splitlines()[-40:]
                print(f"--- {name}", *lines, sep="\n", file=sys.stderr)

    def stop(self) -> None:
        """Ends all processes, the last started first, and removes the folder."""
        for child in reversed(self._children.values()):
            child.terminate()
            try:
                child.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def metrics(address: str) -> Iterator[tuple[str, str, float]]:
    """Samples of a Prometheus endpoint: (sample name, labels as text, value)."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        for line in answer.read().decode().splitlines():
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                family, _, labels = name.partition("{")
                yield family, labels.rstrip("}"), float(value)
