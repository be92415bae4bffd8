"""The state of all services over the last ten minutes, kept in the console for every viewer."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvctl.console.data import Json
from kvctl.measure.readings import WINDOW_SECONDS, Reading, ShardReading, rates, read_services, read_shard
from kvctl.session import Session
from kvctl.shards import Answers
from kvctl.status import CommandError
from protos.rpc.version import program_version

LOOK_SECONDS = 3.0
HISTORY_SECONDS = 600.0
# The pause after a cache manager has refused the console's own token: each refusal is a line in the audit log.
REFUSED_SECONDS = 60.0
# The name of Redis among the health services of a cache manager.
_REDIS = "redis"
_NOT_SERVING = "answers, but does not serve"


class Part(NamedTuple):
    """A part of the stack. state: "ok", "away", or "unknown" for a part that has never answered."""

    name: str
    state: str
    detail: str


class PoolSample(NamedTuple):
    """A pool at one time. The hit rate is of the last minute; evictions are counted since the cache manager started."""

    hit_rate: float | None
    used: int
    cached: int
    evicted: int


class Sample(NamedTuple):
    """All pools at one time, by shard and name. at: in seconds of this process's clock."""

    at: float
    pools: Mapping[tuple[str, str], PoolSample]
    tokens_per_second: float | None


class Monitor:
    """Looks at all services every few seconds, in a separate thread. Use it in a with statement.

    The end of the statement closes the session, too. The session carries the console's own token. Only viewers who may
    see all tenants may see the answers.
    """

    def __init__(self, session: Session, metrics: Mapping[str, str], executor: str = "") -> None:
        """metrics: addresses by process. executor: its address; empty with a router, which knows all executors."""
        self._session = session
        self._metrics = metrics
        self._executor = executor
        self._samples: deque[Sample] = deque(maxlen=round(HISTORY_SECONDS / LOOK_SECONDS) + 1)
        self._readings: deque[Reading] = deque(maxlen=round(WINDOW_SECONDS / LOOK_SECONDS) + 1)
        self._parts: tuple[Part, ...] = ()
        # The console may be unable to reach a part that has never answered: the part may still work.
        self._seen: set[str] = set()
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)

    def __enter__(self) -> Monitor:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()
        self._session.__exit__()

    def look(self) -> Reading:
        """Asks all services once."""
        self._session.forget_engines()
        try:
            shards = self._session.ask(read_shard)
        except CommandError as error:
            shards = Answers[ShardReading]({}, {"": error})
        reading = read_services(self._session, self._metrics, shards)
        parts = tuple(self._look_at_parts(reading))
        with self._lock:
            tokens = rates(self._readings[-1], reading)["output_tokens_per_second"] if self._readings else None
            self._readings.append(reading)
            self._samples.append(Sample(reading.at, dict(_pools(reading)), tokens))
            self._parts = parts
        return reading

    def data(self, shard: str, pool: str) -> Json:
        """The services as of the last look, and the history of a pool. shard: its address, empty for the only shard."""
        with self._lock:
            samples, readings, parts = list(self._samples), list(self._readings), self._parts
        found: Json = {"version": program_version(), "parts": [part._asdict() for part in parts]}
        if not readings:
            return found
        last = readings[-1]
        found["started"] = dict(last.started)
        found["rates"] = rates(readings[0], last) if len(readings) > 1 else {}
        found["history"] = {"seconds": HISTORY_SECONDS, **_history(samples, shard, pool)}
        if last.model is not None:
            found["model"] = {
                "name": last.model.model,
                "dtype": last.model.dtype,
                "cache": last.model.kv_cache_dtype,
                "longest": last.model.max_model_tokens,
            }
        if last.loads is not None:
            found["loads"] = {"running": last.loads.running_requests, "waiting": last.loads.waiting_requests}
        return found

    def _run(self) -> None:
        pause = 0.0
        while not self._stopping.wait(pause):
            failures = self.look().shards.failures.values()
            if not any(error.is_denied for error in failures):
                pause = LOOK_SECONDS
            elif self._session.security.token_file is None:
                # The services ask for tokens, and the console has no token until it starts again.
                return
            else:
                pause = REFUSED_SECONDS

    def _look_at_parts(self, reading: Reading) -> Iterator[Part]:
        try:
            problem = self._problem(self._session.scheduler.address)
        except CommandError as error:
            problem = str(error)
        yield self._part("router" if reading.routed else "scheduler", problem)
        try:
            shards = [shard.address for shard in self._session.shards]
        except CommandError:
            # Only the router knows the shards, and it does not answer.
            shards = []
        for address in shards:
            name = f"cachemgr {address}" if len(shards) > 1 else "cachemgr"
            yield self._part(name, self._problem(address))
        if reading.engines is not None:
            every = reading.engines.engines
            away = [one.address for one in every if not one.ready]
            yield Part(f"{len(every) - len(away)} of {len(every)} engines", "away" if away else "ok", ", ".join(away))
        elif self._executor:
            yield self._part("executor", self._problem(self._executor))
        copies = [
            problem for address in reading.shards.by_shard if (problem := self._problem(address, _REDIS)) is not None
        ]
        if copies:
            yield self._part("Redis", next(filter(None, copies), ""))

    def _part(self, name: str, problem: str | None) -> Part:
        if problem == "":
            self._seen.add(name)
            return Part(name, "ok", "")
        is_known = problem == _NOT_SERVING or name in self._seen
        return Part(name, "away" if is_known else "unknown", problem or "has no health service")

    def _problem(self, address: str, service: str = "") -> str | None:
        """Why a service does not serve; empty when the service serves, None if the server has no such service."""
        try:
            stub = health_pb2_grpc.HealthStub(self._session.at(address))
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=self._session.timeout)
        except CommandError as error:
            return str(error)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                return None
            return f"no answer at {address}"
        return "" if answer.status == health_pb2.HealthCheckResponse.SERVING else _NOT_SERVING


def _pools(reading: Reading) -> Iterator[tuple[tuple[str, str], PoolSample]]:
    for address, shard in reading.shards.by_shard.items():
        for pool in shard.pools:
            tokens = shard.stats[pool.pool_id].tokens
            hit_rate = tokens.hit_tokens / tokens.queried_tokens if tokens.queried_tokens else None
            sample = PoolSample(hit_rate, pool.used_blocks, pool.cached_blocks, pool.evicted_blocks)
            yield (address, pool.pool_id), sample


def _history(samples: Iterable[Sample], shard: str, pool: str) -> Json:
    """Columns of numbers, the oldest first; None for unknown values. ages: in seconds. evicted: blocks per second."""
    ages: list[float] = []
    columns: dict[str, list[float | None]] = {name: [] for name in ("hit_rate", "used", "cached", "evicted", "tokens")}
    before: tuple[float, PoolSample] | None = None
    now = time.monotonic()
    for at, pools, tokens in samples:
        ages.append(round(now - at, 1))
        named = (one for (address, name), one in pools.items() if name == pool and shard in ("", address))
        found = next(named, None)
        evicted = None
        if found and before and at > before[0]:
            # A cache manager that has started again counts from the beginning.
            evicted = max(0, found.evicted - before[1].evicted) / (at - before[0])
        before = (at, found) if found else None
        values = (found.hit_rate, found.used, found.cached) if found else (None, None, None)
        for name, value in zip(columns, (*values, evicted, tokens), strict=True):
            columns[name].append(value if value is None else round(value, 4))
    return {"ages": ages, **columns}
