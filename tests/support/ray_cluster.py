"""A fleet on a Ray cluster of a head and two nodes, all on this machine."""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import layout
import psutil
import pytest
import ray
import ray_fleet
import ray_member
from ray._private.utils import get_ray_address_file  # type: ignore[attr-defined]
from ray._raylet import Config  # type: ignore[attr-defined]
from ray.cluster_utils import Cluster
from ray_member import FleetPlan, Member, Status

from bench.stub_executor import StubSettings
from protos.rpc.settings import load
from tests.chaos.stub_executor import FAULT
from tests.stack import ROOT, metrics
from tests.support.local_redis import LocalRedis
from tests.support.patience import patience

# Ray replaces 127.0.0.1 by another address of this machine.
HEAD, HOSTS = "127.0.0.2", ("127.0.0.3", "127.0.0.4")
SECONDS = patience(60)
PAUSE_SECONDS, REDIS_SECONDS = 8.0, 30.0
# CPUs of a node: it has room for all members.
ROOM = 8
# Executors without a model: tokens depend on the prompt only, or on the contents of blocks, which takes more work.
STUB, BLOCK_STUB = "tests.support.exact_stub", "tests.chaos.stub_executor"
STEP_SECONDS = 0.02
# Ray listens on an address for other machines, and would write its own token into the user's home.
RAY = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(), "RAY_USAGE_STATS_ENABLED": "0"}


@contextlib.contextmanager
def ray_cluster(engines: int = 2, shards: int = 1, routers: int = 1, **settings: object) -> Iterator[RayFleet]:
    """A cluster without a fleet, until the with statement ends. Sizes and settings are of the fleet."""
    # Unix socket paths are short.
    folder = Path(tempfile.mkdtemp(prefix="kvk-", dir="/tmp"))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in RAY.items():
            patch.setenv(name, value)
        running = RayFleet(folder, engines, shards, routers, settings)
        try:
            yield running
        finally:
            running.stop()
            shutil.rmtree(folder, ignore_errors=True)


def command(*arguments: str, **environ: str) -> subprocess.Popen[str]:
    """`python -m ops.ray_fleet` in the checkout."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("KVKEEP_")}
    return subprocess.Popen(
        [sys.executable, "-m", "ops.ray_fleet", *arguments],
        cwd=ROOT,
        env=own | environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )


class StubMember(Member):
    """A member whose executor is a stub."""

    module = STUB

    def __init__(self, name: str, plan: FleetPlan) -> None:
        # This runs in the process of the actor.
        settings_from = partial(load, StubSettings)
        kind = layout._KINDS["executor"]._replace(module=self.module, load=settings_from)
        layout._KINDS["executor"] = kind
        vars(layout)["settings_from"] = settings_from
        super().__init__(name, plan)


class BlockStubMember(StubMember):
    """A member whose executor is the stub that reads its blocks."""

    module = BLOCK_STUB


class RayFleet:
    """Nodes are loopback addresses. The folder is short, for unix sockets."""

    def __init__(self, folder: Path, engines: int, shards: int, routers: int, settings: Mapping[str, object]) -> None:
        self.engines = engines
        self.num_routers = routers
        # The module of its executors.
        self.stub = STUB
        self._folder = folder
        # Ray has read the environment at its import.
        Config.initialize("")
        # Ray also writes the address of a cluster there, but does not make the folder.
        Path(get_ray_address_file(None)).parent.mkdir(parents=True, exist_ok=True)
        self.redis = LocalRedis(folder / "redis")
        self.cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 0,
                "node_ip_address": HEAD,
                "include_dashboard": False,
                "temp_dir": str(folder / "ray"),
            },
        )
        self._nodes: dict[str, Any] = {}
        for host in HOSTS:
            self.add(host)
        own = {"state_dir": folder, "redis_url": self.redis.url, "executor_host_cache_dir": folder / "host", **settings}
        self.plan = FleetPlan(
            {f"KVKEEP_{name.upper()}": str(value) for name, value in own.items()},
            shards=shards,
            cpus=1,
            gpus=0,
            memory=0.25,
            first_port=random.SystemRandom().randrange(20_000, 32_000),
        )
        ray.init(address=self.cluster.address, namespace=ray_member.NAMESPACE, log_to_driver=False)

    def stop(self) -> None:
        ray.shutdown()
        self.cluster.shutdown()
        self.redis.stop()

    def add(self, host: str) -> None:
        """Starts a node."""
        self._nodes[host] = self.cluster.add_node(num_cpus=ROOM, node_ip_address=host)

    def lose(self, host: str) -> None:
        """Kills a node's processes, and waits until the fleet is complete without the node."""
        self.cluster.remove_node(self._nodes.pop(host), allow_graceful=False)
        self.wait_until(lambda: not self.members_on(host), "members are there still")
        self.wait_until_whole(self.engines)

    def members_on(self, host: str) -> list[str]:
        """Names of the members that answer from a node."""
        return sorted(name for name, said in self.say().items() if f"{host}:" in str(said.addresses))

    def scale(self, engines: int) -> None:
        """Scales the fleet; returns before new members serve."""
        ray_fleet.scale(self.plan, engines=engines, routers=self.num_routers)

    def run(self, *arguments: str, **changes: str) -> tuple[int, str, str]:
        """Runs the command with the settings of this fleet; returns its status and its output."""
        with command(*arguments, **{**self.plan.settings, "RAY_ADDRESS": self.cluster.address, **changes}) as program:
            out, err = program.communicate(timeout=SECONDS)
            return program.returncode, out, err

    def say(self) -> dict[str, Status]:
        """Statuses of the members that answer."""
        return ray_member.ask(ray_member.members())

    def host_of(self, name: str, setting: str) -> str:
        """The address on which a member's process listens; empty while it does not listen."""
        said = self.say().get(name)
        return said.addresses.get(setting, "").rpartition(":")[0] if said else ""

    @property
    def router(self) -> str:
        """The address of the first router."""
        return next(iter(self.routers().values()))

    def routers(self) -> dict[str, str]:
        """The addresses of the routers that answer, by name."""
        found = {name: said.addresses.get("router_address", "") for name, said in self.say().items()}
        return {name: address for name, address in found.items() if address}

    def faults(self) -> list[str]:
        """Contradictions that executors found in their blocks, by their logs."""
        logs = self._folder.glob("ray/session_*/logs/*")
        lines = (line for path in logs if path.is_file() for line in path.read_text(errors="replace").splitlines())
        return [line for line in lines if FAULT in line]

    def wait_until(self, condition: Callable[[], object], what: str) -> float:
        """Waits until the condition holds; returns the seconds that it took."""
        begin = time.monotonic()
        deadline = begin + SECONDS
        while not condition():
            assert time.monotonic() < deadline, f"{what}: {self.say()}"
            time.sleep(0.1)
        return time.monotonic() - begin

    def wait_until_whole(self, engines: int) -> float:
        """Waits until all members serve and each router has `engines` engines; returns the seconds that it took."""
        return self.wait_until(lambda: self._is_whole(engines), f"not whole with {engines} engines")

    def _is_whole(self, engines: int) -> bool:
        said = self.say()
        if len(said) < len(ray_member.members()) or any(status.pending for status in said.values()):
            return False
        watched = [one for status in said.values() if (one := status.addresses.get("router_metrics_address"))]
        ready = ("kvkeep_router_engines", 'state="ready"', float(engines))
        with contextlib.suppress(OSError):
            return all(ready in metrics(address) for address in watched)
        return False

    def folder(self, name: str) -> str:
        """The state folder of a member."""
        return str(Path(self.plan.settings["KVKEEP_STATE_DIR"]).resolve() / name)

    def process(self, module: str, **settings: str) -> psutil.Process | None:
        """The process of this fleet with this module and these settings."""
        wanted = {f"KVKEEP_{name.upper()}": value for name, value in settings.items()}
        folder = self.plan.settings["KVKEEP_STATE_DIR"]
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.cmdline()[1:] == ["-m", module]:
                    environ = process.environ()
                    if environ.get("KVKEEP_STATE_DIR", "").startswith(folder) and wanted.items() <= environ.items():
                        return process
        return None

    def kill_process(self, module: str, **settings: str) -> None:
        """Kills a process, and waits until all is there again."""
        before = self._running(module, **settings)
        before.kill()
        self._wait_for_another(before, module, **settings)

    def kill_actor(self, module: str, **settings: str) -> None:
        """Kills the actor that has started a process, and waits until all is there again."""
        before = self._running(module, **settings)
        before.parent().kill()
        # Its processes end with the actor.
        before.wait(SECONDS)
        self._wait_for_another(before, module, **settings)

    def pause_process(self, module: str, **settings: str) -> None:
        """Stops a process with a signal for a while, and waits until all is there again."""
        paused = self._running(module, **settings)
        paused.suspend()
        try:
            time.sleep(PAUSE_SECONDS)
        finally:
            # It may have been replaced meanwhile.
            with contextlib.suppress(psutil.NoSuchProcess):
                paused.resume()
        self.wait_until_whole(self.engines)

    def stop_redis(self) -> None:
        """Ends Redis for a while."""
        self.redis.stop()
        time.sleep(REDIS_SECONDS)
        self.redis.start()
        self.wait_until_whole(self.engines)

    def _running(self, module: str, **settings: str) -> psutil.Process:
        found = self.process(module, **settings)
        assert found is not None
        return found

    def _wait_for_another(self, before: psutil.Process, module: str, **settings: str) -> None:
        self.wait_until(lambda: self.process(module, **settings) not in (None, before), "there is no new one")
        self.wait_until_whole(self.engines)


# What a fleet loses: each call returns when the fleet is complete again.
LOSSES: dict[str, Callable[[RayFleet], None]] = {
    "executor, `kill -9`": lambda fleet: fleet.kill_process(fleet.stub, executor_executor_id="executor-1"),
    "scheduler, `kill -9`": lambda fleet: fleet.kill_process("scheduler", scheduler_scheduler_id="scheduler-0"),
    "cache manager, `kill -9`": lambda fleet: fleet.kill_process("cachemgr", state_dir=fleet.folder("cachemgr-0")),
    "engine's actor, `kill -9`": lambda fleet: fleet.kill_actor(fleet.stub, executor_executor_id="executor-0"),
    "cache manager's actor, `kill -9`": lambda fleet: fleet.kill_actor(
        "cachemgr", state_dir=fleet.folder("cachemgr-0")
    ),
}
# Only routers end streams: callers ask them again.
ROUTER_LOSSES: dict[str, Callable[[RayFleet], None]] = {
    "router, `kill -9`": lambda fleet: fleet.kill_process("scheduler.router", router_router_id="router-0"),
    "router's actor, `kill -9`": lambda fleet: fleet.kill_actor("scheduler.router", router_router_id="router-0"),
}
# What is away for a while and then goes on.
PAUSES: dict[str, Callable[[RayFleet], None]] = {
    "executor, stopped for 8 s": lambda fleet: fleet.pause_process(fleet.stub, executor_executor_id="executor-1"),
    "scheduler, stopped for 8 s": lambda fleet: fleet.pause_process("scheduler", scheduler_scheduler_id="scheduler-0"),
    "cache manager, stopped for 8 s": lambda fleet: fleet.pause_process(
        "cachemgr", state_dir=fleet.folder("cachemgr-0")
    ),
    "router, stopped for 8 s": lambda fleet: fleet.pause_process("scheduler.router", router_router_id="router-0"),
    "Redis, away for 30 s": RayFleet.stop_redis,
}
