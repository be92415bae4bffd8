"""The stack that is called, and everything about it that must be as before when all calls are over."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Self

import grpc
import psutil
from google.protobuf.field_mask_pb2 import FieldMask
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.generation.v1 import generation_pb2 as pb
from protos.generation.v1 import generation_pb2_grpc as rpc
from protos.kvcache.v1 import kvcache_pb2 as kv
from protos.kvcommon.v1 import kvcommon_pb2 as common
from tests.chaos.checks import check_pools
from tests.chaos.measuring import Manager
from tests.fuzz.limits import OWN_EXECUTOR, OWN_SCHEDULER
from tests.fuzz.report import Report
from tests.stack import MODULES, Stack, metrics
from tests.support.generation import generate, greedy_request
from tests.support.patience import patience
from tests.support.ports import free_address

# Small, so that blocks are taken from each other and move between tiers.
MAX_TOKENS = 2048
HOST_BYTES = 64 << 20
LEASE_SECONDS = 3.0
CALL_SECONDS = patience(15)
SETTLE_SECONDS = patience(30)
TIDY_SECONDS = 0.1
# More rules and quotas than that are deleted, so that calls do not become slower and slower.
MOST_RULES = 30
# Between the steps of one generation, which stay open as long as both processes live.
_SESSION = "execution.v1.ExecutorService/StreamSteps"
_ERROR = re.compile('"level": "(error|critical)"|^Traceback')
# What gRPC says of a caller that had disconnected when the answer was to be sent.
_CALLER_GONE = "ExecuteBatchError raised in core"
# Whose output without any cache must be the same before and after.
_FAILED = re.compile('code="(INTERNAL|UNKNOWN|DATA_LOSS)"')
_PROMPT = tuple(range(2000, 2040))
_MOST_OF_POOL = MAX_TOKENS - 64


class Stage:
    """Use it in a with statement."""

    def __init__(self) -> None:
        self.metrics = {name: free_address() for name in MODULES}
        self.stack = Stack(
            scheduler_http_address=free_address(),
            scheduler_scheduler_id=OWN_SCHEDULER,
            executor_executor_id=OWN_EXECUTOR,
            executor_max_tokens=MAX_TOKENS,
            executor_host_cache_size=HOST_BYTES,
            cachemgr_lease_seconds=LEASE_SECONDS,
            **{f"{name}_metrics_address": address for name, address in self.metrics.items()},
        )
        self.stack.own["executor"] = {"executor_host_cache_dir": Path("/dev/shm", self.stack.folder.name)}
        self._output: list[int] = []
        self._memory: dict[str, int] = {}
        self._lines_seen = dict.fromkeys(MODULES, 0)

    def __enter__(self) -> Self:
        self.stack.__enter__()
        asyncio.run(self._fill())
        self._output = asyncio.run(self._generate())
        self._memory = self._resident()
        return self

    def __exit__(self, *error: Any) -> None:
        self.stack.__exit__(*error)

    def crashes(self) -> list[str]:
        """Processes that have ended."""
        return [f"{name} {how}" for name in MODULES if (how := self.stack.ended(name))]

    @contextlib.asynccontextmanager
    async def kept(self, report: Report) -> AsyncIterator[None]:
        """Asks each process repeatedly whether it is well, and undoes changes that would stop the work of others."""
        tasks = [asyncio.create_task(self._watch(name, report)) for name in MODULES]
        tasks.append(asyncio.create_task(self._tidy()))
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    def grown(self) -> dict[str, int]:
        """By how many bytes the resident memory of each process has grown since all of the pool was in use."""
        return {name: size - self._memory[name] for name, size in self._resident().items()}

    async def check(self, report: Report, *, fenced: bool = False) -> None:
        """Adds every difference from the state before to the faults.

        fenced: others have registered in the names of the stack's own processes, which know themselves replaced; the
        cache manager's books must be right all the same.
        """
        for crash in self.crashes():
            report.fault("crash", f"{crash}\n{self.stack.logs()}")
        self._check_logs(report)
        if self.crashes():
            return
        async with Manager(self.stack.admin) as manager:
            await self._clear(manager)
            if fenced:
                faults = await _check_books(manager)
            else:
                await _set_serving(self.stack.scheduler)
                faults = await check_pools(manager)
                if await self._generate() != self._output:
                    faults.append("a greedy output is another one than before")
        faults += await self._in_flight() + await self._failed_calls()
        for fault in faults:
            report.fault("left behind", fault)
        grown = ", ".join(f"{name} {size / 1e6:+.0f} MB" for name, size in self.grown().items())
        report.note(f"resident memory: {grown}")

    async def recover(self, report: Report) -> None:
        """Restarts all processes, as an operator does whose processes were shut out, and checks all."""
        for name in reversed(MODULES):
            self.stack.kill(name)
        for name in MODULES:
            self.stack.start(name)
        for name in MODULES:
            await asyncio.to_thread(self.stack.wait_until_serving, name)
        await self._fill()
        self._memory = self._resident()
        await self.check(report)

    async def _fill(self) -> None:
        """Writes to nearly every block of the pool, whose memory the system gives at the first write: no leak."""
        request = greedy_request(range(2000, 2000 + _MOST_OF_POOL), 1, reuse=False)
        async with grpc.aio.insecure_channel(self.stack.scheduler) as channel:
            await generate(rpc.GenerationServiceStub(channel), request, SETTLE_SECONDS)

    async def _generate(self) -> list[int]:
        """A short output that depends on nothing but the model."""
        request = greedy_request(_PROMPT, 8, reuse=False)
        request.eviction_policy.kind = common.EVICTION_KIND_NONE
        async with grpc.aio.insecure_channel(self.stack.scheduler) as channel:
            return (await generate(rpc.GenerationServiceStub(channel), request, SETTLE_SECONDS)).token_ids

    async def _watch(self, name: str, report: Report) -> None:
        """A process that does not say within the time that it is well hangs."""
        async with grpc.aio.insecure_channel(getattr(self.stack, name)) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            while not self.stack.ended(name):
                begin = time.monotonic()
                try:
                    await stub.Check(health_pb2.HealthCheckRequest(), timeout=CALL_SECONDS)
                except grpc.aio.AioRpcError as error:
                    if not self.stack.ended(name):
                        report.hang("hang", f"{name} says nothing of its health: {error.code().name}", begin)
                report.count(f"health of {name}, each second", "asked", time.monotonic() - begin)
                await asyncio.sleep(1)

    async def _tidy(self) -> None:
        async with Manager(self.stack.admin) as manager:
            while True:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    await _set_serving(self.stack.scheduler)
                    await self._clear(manager, MOST_RULES)
                await asyncio.sleep(TIDY_SECONDS)

    async def _clear(self, manager: Manager, most: int = 0) -> None:
        """Deletes rules, quotas and holds if there are more than `most` of them, and restores the pools' sizes."""
        admin = manager.admin
        rules = (
            await admin.ListRetentionRules(kv.ListRetentionRulesRequest(page_size=1000), timeout=patience(30))
        ).rules
        for rule in rules if len(rules) > most else ():
            await _ignoring(
                admin.DeleteRetentionRule(kv.DeleteRetentionRuleRequest(name=rule.name), timeout=patience(30))
            )
        for pool in await manager.pools():
            full = kv.Pool(pool_id=pool.pool_id, total_blocks=pool.spec.num_blocks)
            if pool.total_blocks < full.total_blocks:
                update = kv.UpdatePoolRequest(pool=full, update_mask=FieldMask(paths=["total_blocks"]))
                await _ignoring(admin.UpdatePool(update, timeout=patience(30)))
        quotas = (await admin.ListQuotas(kv.ListQuotasRequest(page_size=1000), timeout=patience(30))).quotas
        for usage in quotas if len(quotas) > most else ():
            account = usage.quota.WhichOneof("account")
            asked = kv.DeleteQuotaRequest(**{account: getattr(usage.quota, account)})
            await _ignoring(admin.DeleteQuota(asked, timeout=patience(30)))
        while holds := (await admin.ListHolds(kv.ListHoldsRequest(page_size=1000), timeout=patience(30))).holds:
            if len(holds) <= most:
                return
            for hold in holds:
                await _ignoring(admin.ReleaseHold(kv.ReleaseHoldRequest(name=hold.name), timeout=patience(30)))

    async def _in_flight(self) -> list[str]:
        """Calls that no client waits for any more and that still run."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while True:
            left = [
                f"{count:.0f} calls of {labels} still run in the {name}"
                for name, metric, labels, count in await asyncio.to_thread(self._samples)
                if metric == "kvkeep_rpc_in_flight" and count > (_SESSION in labels)
            ]
            if not left or time.monotonic() > deadline:
                return left
            await asyncio.sleep(0.2)

    async def _failed_calls(self) -> list[str]:
        """What the processes themselves have counted, also of calls whose callers did not wait for an answer."""
        return [
            f"{count:.0f} calls with {labels} in the {name}"
            for name, metric, labels, count in await asyncio.to_thread(self._samples)
            if metric == "kvkeep_rpc_handled_total" and _FAILED.search(labels) and count
        ]

    def _samples(self) -> list[tuple[str, str, str, float]]:
        """What the processes measure: process, metric, labels, value."""
        return [(name, *sample) for name, address in self.metrics.items() for sample in metrics(address)]

    def _check_logs(self, report: Report) -> None:
        """New errors in each log are faults."""
        for name in MODULES:
            lines = self.stack.log_path(name).read_text(errors="replace").splitlines()
            new = lines[self._lines_seen[name] :]
            self._lines_seen[name] = len(lines)
            errors = [_readable(line) for line in new if _ERROR.search(line) and _CALLER_GONE not in line]
            for text in dict.fromkeys(errors):
                report.fault(f"error in the log of the {name}", text)

    def _resident(self) -> dict[str, int]:
        return {name: psutil.Process(self.stack.pid(name)).memory_info().rss for name in MODULES}


def _readable(line: str) -> str:
    """An event with its traceback as lines."""
    try:
        event = json.loads(line)
    except ValueError:
        return line
    return f"{event.get('event')}\n{event.pop('exception', event)}"


async def _set_serving(scheduler: str) -> None:
    """Ends a drain that a call has begun."""
    async with grpc.aio.insecure_channel(scheduler) as channel:
        stub: rpc.SchedulerAdminServiceAsyncStub = rpc.SchedulerAdminServiceStub(channel)
        await stub.SetDraining(pb.SetDrainingRequest(draining=False), timeout=CALL_SECONDS)


async def _check_books(manager: Manager) -> list[str]:
    """What the cache manager itself finds, when the leases of all invented schedulers have expired.

    Sequences in the name of the stack's own scheduler stay, as it lives.
    """
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        answer = await manager.admin.ListSequences(kv.ListSequencesRequest(page_size=1000), timeout=CALL_SECONDS)
        live = {sequence.scheduler_id for sequence in answer.sequences} - {OWN_SCHEDULER}
        if not live or time.monotonic() > deadline:
            break
        await asyncio.sleep(0.2)
    checked = await manager.admin.CheckPool(kv.CheckPoolRequest(), timeout=SETTLE_SECONDS)
    faults = [f"sequences of {live} are live"] if live else []
    return faults + [f"CheckPool: {one.pool_id} slot {one.slot}: {one.message}" for one in checked.violations]


async def _ignoring(call: Any) -> None:
    """Deletes things that may be deleted already."""
    with contextlib.suppress(grpc.aio.AioRpcError):
        await call
