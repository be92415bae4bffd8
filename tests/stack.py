"""Starts the real processes on unix sockets in a separate folder, for tests and benchmarks."""

import os
import shutil
import signal
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import layout
from children import Child
from redis_server import redis_child, redis_url, wait_until_answering
from supervisor import is_serving

from protos.rpc.settings import ProcessSettings, load
from tests.support.patience import patience
from tests.support.preloaded import PreloadedChild, can_preload

ROOT = Path(__file__).resolve().parent.parent
START_SECONDS = 60.0
STOP_SECONDS = 15.0
# Whether stacks start from processes that have imported everything. Measuring programs start them as operators do.
preloads = False
# What runs as each process, in the order in which they start.
MODULES = {"cachemgr": "cachemgr", "executor": "executor", "scheduler": "scheduler"}
CONSOLE = {"console": "kvctl.console"}


def model_cache() -> Path:
    """Where references computed once are kept: beside the converted models."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvkeep"


class Stack:
    """cachemgr with a Redis, executor and scheduler as processes. Use it in a with statement.

    `settings` are environment variables without their KVKEEP_ prefix, in lower case: executor_max_tokens=2048. None
    leaves a setting, which must not be an address, to the service's own default. Benchmarks replace processes by
    `modules` of their own, or leave some out. Processes of one kind are told apart by what follows a hyphen in their
    names: executor-0, executor-1. Settings of a single process go into `own`, under the name of the process, before the
    process starts. root: the checkout from which the processes run.
    """

    def __init__(self, *, modules: Mapping[str, str] = MODULES, root: Path = ROOT, **settings: object) -> None:
        self._root = root
        # Unix socket paths are short: the usual temporary folders of tests are not.
        self.folder = Path(tempfile.mkdtemp(prefix="kvk-", dir="/tmp"))
        assert not any(name.endswith("_address") and value is None for name, value in settings.items())
        self.scheduler = str(settings.get("scheduler_address", f"unix:{self.folder}/scheduler.sock"))
        self.cachemgr = str(settings.get("cachemgr_address", f"unix:{self.folder}/cachemgr.sock"))
        self.admin = str(settings.get("cachemgr_admin_address", f"unix:{self.folder}/admin.sock"))
        self.executor = str(settings.get("executor_address", f"unix:{self.folder}/executor.sock"))
        self.modules = modules
        self.own: dict[str, dict[str, object]] = {}
        # Environment variables that are no settings.
        self.variables: dict[str, str] = {}
        self.http = str(settings.get("scheduler_http_address", ""))
        self.executor_metrics = str(settings.get("executor_metrics_address", ""))
        self._children: dict[str, Child] = {}
        self._environment = {name: value for name, value in os.environ.items() if not name.startswith("KVKEEP_")}
        defaults: dict[str, object] = {
            "scheduler_address": self.scheduler,
            "cachemgr_address": self.cachemgr,
            "cachemgr_admin_address": self.admin,
            "executor_address": self.executor,
            "state_dir": self.folder / "state",
            "scheduler_http_address": "",
            # What they change is tested where it matters, and not on machines with many cores only.
            "scheduler_frontends": 0,
            "scheduler_metrics_address": "",
            "cachemgr_metrics_address": "",
            "executor_metrics_address": "",
            "executor_dtype": "float32",
            "executor_max_tokens": 65_536,
            # Not where another stack on this machine has its own.
            "executor_host_cache_dir": self.folder / "host",
        }
        self._environment |= _variables(defaults | settings)
        self._environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))

    def __enter__(self) -> Self:
        try:
            self.start_redis()
            for name in self.modules:
                self.start(name)
            for name in self.modules:
                self.wait_until_serving(name)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, KeyboardInterrupt):
            print(self.logs(), file=sys.stderr)
        self.stop()

    def start_redis(self) -> None:
        """Starts the Redis of the cache manager, if there is one and no other was chosen."""
        owns = [self.own.setdefault(name, {}) for name in self.modules if name.partition("-")[0] == "cachemgr"]
        if owns and "KVKEEP_REDIS_URL" not in self._environment and "redis_url" not in owns[0]:
            state_dir = Path(self._environment["KVKEEP_STATE_DIR"])
            for own in owns:
                own["redis_url"] = redis_url(state_dir)
            redis = self._children["redis"] = redis_child(state_dir, self.log_path("redis"))
            redis.start()
            wait_until_answering(redis, redis_url(state_dir))

    def start(self, name: str) -> None:
        """Starts one process; it never outlives this one."""
        environment = self._environment | _variables(self.own.get(name, {})) | self.variables
        module = self.modules[name]
        preloaded = preloads and self._root == ROOT and can_preload(module, environment)
        kind = PreloadedChild if preloaded else Child
        child = kind(
            [sys.executable, "-m", module],
            environment,
            folder=self._root,
            log=self.log_path(name),
            stop_seconds=patience(STOP_SECONDS),
        )
        self._children[name] = child
        child.start()

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        """Sends a process a signal and waits for its end."""
        os.kill(self._children[name].pid, number)
        self._children[name].wait()

    def pid(self, name: str) -> int:
        """Number of a process."""
        return self._children[name].pid

    def ended(self, name: str) -> str:
        """How a process ended, in words; empty while it runs."""
        return self._children[name].ended()

    def address(self, name: str) -> str | None:
        """Where a process serves gRPC; None for one that does not."""
        kind = name.partition("-")[0]
        common = {"cachemgr": self.cachemgr, "executor": self.executor, "scheduler": self.scheduler}
        own = self.own.get(name, {}).get(f"{kind}_address")
        return common.get(kind) if own is None else str(own)

    def wait_until_serving(self, name: str) -> None:
        """Waits for grpc.health.v1; an ended process or a long wait is an error that shows its log."""
        address = self.address(name)
        security = load(ProcessSettings, self._environment).security
        deadline = time.monotonic() + patience(START_SECONDS)
        while time.monotonic() < deadline and not self._children[name].ended():
            if self._is_listening(name) if address is None else is_serving(address, security):
                return
            time.sleep(0.05)
        raise RuntimeError(f"{name} did not begin to serve\n{self.logs()}")

    def _is_listening(self, name: str) -> bool:
        """Whether a process without a health service, the console, reports in its log that it serves."""
        return '"event": "listening"' in self.log_path(name).read_text()

    def log_path(self, name: str) -> Path:
        """Log of a process."""
        return self.folder / f"{name}.log"

    def logs(self) -> str:
        """The end of every log."""
        return "\n".join("\n".join([f"--- {name}", *child.tail()]) for name, child in self._children.items())

    def stop(self) -> None:
        """Ends all processes, the last started first, and removes the folder."""
        for child in reversed(self._children.values()):
            child.terminate()
            child.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


class FleetStack(Stack):
    """Engines behind a router as run-stack starts them, with the settings of a Stack.

    `scheduler` is the router's address; `cachemgr` and `admin` are those of the first shard.
    """

    def __init__(self, engines: int, shards: int = 1, **settings: object) -> None:
        super().__init__(**settings)
        processes = layout.fleet(self._environment, engines, shards)
        self.modules = {process.name: process.module for process in processes}
        self.own = {process.name: dict(process.own) for process in processes}
        self.router_metrics = str(settings.get("router_metrics_address", ""))


def _variables(settings: Mapping[str, object]) -> dict[str, str]:
    return {f"KVKEEP_{name.upper()}": str(value) for name, value in settings.items() if value is not None}


def metrics(address: str) -> Iterator[tuple[str, str, float]]:
    """Samples of a Prometheus endpoint: (sample name, labels as text, value)."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=patience(10)) as answer:
        for line in answer.read().decode().splitlines():
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                family, _, labels = name.partition("{")
                yield family, labels.rstrip("}"), float(value)
