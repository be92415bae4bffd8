"""The processes of a fleet: cache managers with Redis, stub executors, their schedulers, and routers in front."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import grpc
import psutil

from bench.fleet.client import Answer, Ask
from bench.runs import Others
from bench.stub_executor import Record, read_records
from protos.kvcache.v1 import kvcache_pb2 as kv
from protos.kvcache.v1 import kvcache_pb2_grpc as kv_rpc
from tests.stack import ROOT, Stack, metrics
from tests.support.ports import free_address

STUB = "bench.stub_executor"
ROUTER = "scheduler.router"
# The client itself calls one engine after the other, without a router.
DIRECT = "direct"
# A router's counters, and the words for them.
REQUESTS = "kvkeep_router_routed_requests_total"
COUNTERS = {
    "routed_tokens": "kvkeep_router_routed_tokens_total",
    "expected_cached_tokens": "kvkeep_router_expected_cached_tokens_total",
    "regret_tokens": "kvkeep_router_regret_tokens_total",
    "decisions": "kvkeep_router_decision_seconds_count",
    "decision_s": "kvkeep_router_decision_seconds_sum",
}


@dataclass
class Load:
    """The processes that used the processor during a measurement.

    machine, others: shares of all cores, used by all processes and by those outside the fleet. seconds: length of the
    measurement. cpu: processor seconds by kind of process. busiest: share of one core that the busiest process used.
    """

    machine: float
    others: float
    seconds: float
    cpu: dict[str, float]
    busiest: float


class Watch:
    """Measures processor use since its creation."""

    def __init__(self, processes: dict[str, psutil.Process]) -> None:
        self._processes = processes
        self._others = Others(processes.values())
        self._begin, self._machine, self._cpu = time.monotonic(), psutil.cpu_times(), self._seconds()

    def load(self) -> Load:
        """The load since the creation."""
        seconds, machine = time.monotonic() - self._begin, psutil.cpu_times()
        taken = {name: after - self._cpu[name] for name, after in self._seconds().items()}
        # Processes with a low priority give way, so their time counts as idle.
        idle = _unused(machine) - _unused(self._machine)
        cpu: dict[str, float] = {}
        for name, one in taken.items():
            kind = name.partition("-")[0]
            cpu[kind] = cpu.get(kind, 0.0) + one
        busy = 1 - idle / (sum(machine) - sum(self._machine))
        return Load(busy, self._others.share(), seconds, cpu, max(taken.values()) / seconds)

    def _seconds(self) -> dict[str, float]:
        return {name: sum(process.cpu_times()[:2]) for name, process in self._processes.items()}


def _unused(times: Any) -> float:
    return float(times.idle + times.iowait + times.nice)


@dataclass
class Measured:
    """One stage: the answers, each process's share of the processor time, and figures of engines and routers.

    idle_share: of the time with sequences, the share in which an engine ran no step, because of processes around it.
    router: the increase of the counters of all routers, empty without a router.
    """

    answers: list[Answer]
    load: Load
    idle_share: float
    by_engine: dict[str, float]
    router: dict[str, float]


@dataclass
class Fleet:
    """Engines and cache managers. Use it in a with statement.

    settings: of the processes, as a Stack takes them. Engine n belongs to shard n modulo `shards`. routers: the number
    of routers, each with its share of the requests.
    """

    engines: int
    shards: int = 1
    settings: dict[str, Any] = field(default_factory=dict)
    routers: int = 1

    def __post_init__(self) -> None:
        self._exits = ExitStack()
        self._stacks: list[Stack] = []
        # Each router, with the address of its metrics.
        self._routers: list[tuple[Stack, str]] = []
        self._read_records = dict.fromkeys(range(self.engines), 0)

    def __enter__(self) -> Self:
        with self._exits:
            for shard in range(self.shards):
                self._stacks.append(self._exits.enter_context(self._stack(shard)))
            self._exits = self._exits.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop_routers()
        self._exits.__exit__(kind, error, trace)

    def _stack(self, shard: int) -> Stack:
        modules, numbers = {"cachemgr": "cachemgr"}, range(shard, self.engines, self.shards)
        for number in numbers:
            modules |= {f"executor-{number}": STUB, f"scheduler-{number}": "scheduler"}
        stack = Stack(modules=modules, **self.settings)
        for number in numbers:
            executor = f"unix:{stack.folder}/executor-{number}.sock"
            stack.own[f"executor-{number}"] = {
                "executor_executor_id": f"executor-{number}",
                "executor_address": executor,
            }
            stack.own[f"scheduler-{number}"] = {
                "scheduler_scheduler_id": f"engine-{number}",
                "scheduler_address": f"unix:{stack.folder}/scheduler-{number}.sock",
                "executor_address": executor,
            }
        return stack

    def _stack_of(self, engine: int) -> Stack:
        return self._stacks[engine % self.shards]

    @property
    def schedulers(self) -> list[str]:
        """Addresses of the engines."""
        found = (self._stack_of(number).address(f"scheduler-{number}") for number in range(self.engines))
        return [address for address in found if address is not None]

    @property
    def targets(self) -> list[str]:
        """The addresses that requests go to in turns: the routers, or all engines if there is no router."""
        return [f"unix:{router.folder}/router.sock" for router, _ in self._routers] or self.schedulers

    def restart_routers(self, policy: str) -> None:
        """Replaces the routers by new routers, whose views are empty; with DIRECT there are no routers."""
        self.stop_routers()
        for number in range(self.routers if policy != DIRECT else 0):
            address = free_address()
            router = Stack(modules={"router": ROUTER})
            router.own["router"] = {
                "router_router_id": f"router-{number}",
                "router_address": f"unix:{router.folder}/router.sock",
                "router_http_address": "",
                "router_metrics_address": address,
                "router_engines": ",".join(self.schedulers),
                "router_policy": policy,
            }
            self._routers.append((router.__enter__(), address))

    def stop_routers(self) -> None:
        """Ends the routers, if there are any."""
        while self._routers:
            self._routers.pop()[0].stop()

    def purge(self) -> None:
        """Empties the caches; no sequence may be running."""
        for stack in self._stacks:
            with grpc.insecure_channel(stack.admin) as channel:
                kv_rpc.CacheAdminServiceStub(channel).PurgeBlocks(kv.PurgeBlocksRequest(), timeout=60)

    def measure(self, ask: Ask) -> Measured:
        """Runs one stage to its end, when the last request has been answered."""
        watch: Watch | None = None
        load: Load | None = None
        before, after = self._router_counts(), {}
        command = [sys.executable, "-m", "bench.fleet.client"]
        with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
            assert client.stdin is not None
            assert client.stdout is not None
            client.stdin.write(ask.dump())
            client.stdin.close()
            answers: list[Answer] = []
            for line in client.stdout:
                said = json.loads(line)
                if said["event"] == "begun":
                    self._new_records()
                    if ask.measured_from:
                        before = self._router_counts()
                    watch = Watch(self._processes() | {"client": psutil.Process(client.pid)})
                elif said["event"] == "ended":
                    assert watch is not None
                    load, idle_share = watch.load(), _idle_share(self._new_records())
                elif said["event"] == "answer":
                    answers.append(Answer(**said["answer"]))
                else:
                    after = self._router_counts()
        if load is None or client.returncode:
            raise RuntimeError("the client of the fleet ended early")
        return Measured(
            answers,
            load,
            idle_share,
            self._by_engine(answers, before, after),
            {word: after[name] - before.get(name, 0.0) for word, name in COUNTERS.items() if name in after},
        )

    def _by_engine(self, answers: list[Answer], before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
        """The number of requests that each engine got."""
        if not self._routers:
            targets = Counter(answer.target for answer in answers)
            return {f"engine-{number}": targets[number] for number in range(self.engines)}
        names = (f'{REQUESTS}{{engine="{address}"}}' for address in self.schedulers)
        return {f"engine-{number}": after.get(name, 0.0) - before.get(name, 0.0) for number, name in enumerate(names)}

    def _router_counts(self) -> dict[str, float]:
        """Metrics of all routers by name and labels; metrics of one name also add up under the name alone."""
        counts: dict[str, float] = {}
        for _, address in self._routers:
            for name, labels, value in metrics(address):
                for counted in (f"{name}{{{labels}}}", name):
                    counts[counted] = counts.get(counted, 0.0) + value
        return counts

    def _processes(self) -> dict[str, psutil.Process]:
        """All processes of the fleet, including this one, by their kind with a hyphen and a number."""
        found = {"parent": psutil.Process()}
        for number, stack in enumerate(self._stacks):
            for name in stack.modules:
                found[f"{name}-{number}"] = psutil.Process(stack.pid(name))
            found[f"redis-{number}"] = psutil.Process(stack.pid("redis"))
        for number, (router, _) in enumerate(self._routers):
            found[f"router-{number}"] = psutil.Process(router.pid("router"))
        return found

    def _new_records(self) -> list[list[Record]]:
        """Steps of each engine since the last call."""
        found = []
        for number, seen in self._read_records.items():
            found.append(read_records(self._stack_of(number).folder, seen, f"executor-{number}"))
            self._read_records[number] += len(found[-1])
        return found


def _idle_share(records: list[list[Record]]) -> float:
    """Idle time between steps as a share of the time in which there were sequences."""
    idle = sum(record.idle for one in records for record in one)
    busy = sum(record.seconds for one in records for record in one)
    return idle / max(idle + busy, 1e-9)
