"""Tries to see or touch another tenant's cache: `python -m tests.security.probes --count 10000`."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import openai

from bench.result import Result
from protos.generation.v1 import generation_pb2 as pb
from protos.generation.v1 import generation_pb2_grpc as rpc
from protos.kvcache.v1 import kvcache_pb2 as kv
from protos.kvcache.v1 import kvcache_pb2_grpc as kv_rpc
from protos.kvcommon.v1 import kvcommon_pb2 as common
from protos.rpc import audit
from protos.rpc.channel import open_channel
from protos.rpc.identity import Role
from tests.security.stage import ATTACKER, MAX_TENANT_REQUESTS, PROMPT, VICTIM, Stage, request
from tests.support.patience import patience

# Less than a tenant may have, so that nothing is refused for that.
CONCURRENCY = MAX_TENANT_REQUESTS // 2
CALL_SECONDS = patience(60)
# There are no fewer kinds of probes.
LEAST_KINDS = 60
_OWN_NAME = re.compile(rf'{ATTACKER}[-0-9]*/[^"\s]*')


@dataclass
class Found:
    """What the probes came to. A leak is an answer, error or event with something of the victim in it."""

    probes: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    hits: int = 0
    leaks: list[str] = field(default_factory=list)
    logged: int = 0

    @property
    def count(self) -> int:
        """All probes."""
        return self.probes.total()


class HttpAnswer(NamedTuple):
    """What HTTP answered."""

    status: int
    text: str


# Sends one call; returns the answers.
Probe = Callable[[], Awaitable[list[Any]]]


async def _one(call: Any) -> list[Any]:
    return [await call]


async def _all(call: Any) -> list[Any]:
    return [message async for message in call]


def _generations(stage: Stage, stub: rpc.GenerationServiceAsyncStub) -> Iterator[tuple[str, Probe]]:
    """Requests with the victim's prompt, under every name that could be taken for the victim's."""

    def probe(**cache: Any) -> Probe:
        asked = request(no_store=True, **cache)
        return lambda: _all(stub.StreamGenerate(asked, timeout=CALL_SECONDS))

    for salt in _salts(stage):
        yield "generate by salt", probe(salt=salt)
    yield "generate without a salt", probe()
    yield "generate by session", probe(salt=stage.salt, session_id=stage.session)
    yield "generate by session", probe(session_id=stage.bound_session)
    yield "generate as the tenant", probe(tenant_id=VICTIM, salt=stage.salt)
    hint = common.HintAction(action_id="1", action_type="Prefetch", action_version="0.1")
    hints = common.KvHints(protocol_version="0.1", message_id="m", actions=[hint])
    yield "hint by salt", probe(salt=stage.bound_salt, kv_hints=hints)


def _salts(stage: Stage) -> list[str]:
    """Every name that could be taken for the victim's salt."""
    bound = stage.bound_salt
    return [stage.salt, bound, VICTIM, f"../{bound}", f"/{bound}", f"{VICTIM}/"]


def _http(stage: Stage, client: openai.DefaultAsyncHttpxClient) -> Iterator[tuple[str, Probe]]:
    """The same probes over HTTP. Their prompts stay cached: each probe has a different tenant, without hits."""

    def probe(authorization: str = "", **fields: Any) -> Probe:
        tokens = iter(stage.crowd)

        async def send() -> list[Any]:
            header = authorization or f"Bearer {next(tokens)}"
            body = {"prompt": list(PROMPT), "max_tokens": 1, **fields}
            answer = await client.post("/v1/completions", json=body, headers={"Authorization": header})
            return [HttpAnswer(answer.status_code, answer.text)]

        return send

    for salt in _salts(stage):
        yield "HTTP by salt", probe(cache_salt=salt)
    yield "HTTP by session", probe(cache_salt=f"{stage.salt}-", session_id=stage.bound_session)
    yield "HTTP without a token", probe("Bearer nobody", cache_salt=stage.salt)


def _admin_calls(stage: Stage, stub: kv_rpc.CacheAdminServiceAsyncStub) -> Iterator[tuple[str, Probe]]:
    """Calls of the other tenant's operator, which name the victim's things or would show them."""

    def probe(method: str, asked: Any) -> tuple[str, Probe]:
        call = getattr(stub, method)
        return method, lambda: _one(call(asked, timeout=CALL_SECONDS))

    pool = "executor-0/0"
    prefix = kv.PrefixSelector(salt=stage.bound_salt, token_ids=PROMPT)
    own_prefix = kv.PrefixSelector(salt=f"{ATTACKER}/{stage.salt}", token_ids=PROMPT)
    bare_prefix = kv.PrefixSelector(token_ids=PROMPT)
    filters = [
        kv.BlockFilter(salt=stage.bound_salt),
        kv.BlockFilter(salt=VICTIM),
        kv.BlockFilter(tenant_id=VICTIM),
        kv.BlockFilter(session_id=stage.bound_session),
        kv.BlockFilter(prefix=prefix),
        kv.BlockFilter(),
    ]
    for selected in filters:
        yield probe("ListBlocks", kv.ListBlocksRequest(pool_id=pool, filter=selected, include_token_ids=True))
        yield probe("ListPrefixes", kv.ListPrefixesRequest(pool_id=pool, filter=selected))
        yield probe("PurgeBlocks", kv.PurgeBlocksRequest(filter=selected, skip_used=True))
    for one in (prefix, own_prefix, bare_prefix):
        yield probe("ExplainPrefix", kv.ExplainPrefixRequest(prefix=one))
        yield probe("PinPrefix", kv.PinPrefixRequest(prefix=one, owner="x", duration={"seconds": 1}))  # type: ignore[arg-type]
        yield probe("ForgetBlocks", kv.ForgetBlocksRequest(prefix=one))
    yield probe("ForgetBlocks", kv.ForgetBlocksRequest(salt=stage.bound_salt))
    yield probe("ForgetBlocks", kv.ForgetBlocksRequest(salt=stage.salt))
    yield probe("ForgetBlocks", kv.ForgetBlocksRequest(session_id=stage.bound_session))
    yield probe("ReleaseHold", kv.ReleaseHoldRequest(name=stage.hold))
    yield probe("ListLeases", kv.ListLeasesRequest(pool_id=pool))
    yield probe("ListLeases", kv.ListLeasesRequest(pool_id=pool, holder=f"rule/{stage.marker}"))
    yield probe("ListHolds", kv.ListHoldsRequest())
    yield probe("ListSequences", kv.ListSequencesRequest())
    yield probe("ListSequences", kv.ListSequencesRequest(salt=stage.bound_salt))
    yield probe("ListRetentionRules", kv.ListRetentionRulesRequest())
    yield probe("GetRetentionRule", kv.GetRetentionRuleRequest(name=stage.marker))
    yield probe("DeleteRetentionRule", kv.DeleteRetentionRuleRequest(name=stage.marker))
    yield probe("ListQuotas", kv.ListQuotasRequest())
    yield probe("DeleteQuota", kv.DeleteQuotaRequest(salt=stage.bound_salt))
    yield probe("GetStats", kv.GetStatsRequest(pool_id=pool))
    yield probe("CheckPool", kv.CheckPoolRequest())
    yield "DumpState", lambda: _all(stub.DumpState(kv.DumpStateRequest(), timeout=CALL_SECONDS))


def _others(
    admin: kv_rpc.CacheAdminServiceAsyncStub, manager: kv_rpc.CacheManagerServiceAsyncStub, stage: Stage
) -> Iterator[tuple[str, Probe]]:
    """What a caller's token is not for."""
    admission = kv.AdmitSequenceRequest(sequence_id="x", salt=stage.bound_salt, token_ids=PROMPT)
    admissions = kv.AdmitSequencesRequest(admissions=[admission])
    forget = kv.ForgetBlocksRequest(salt=stage.bound_salt)
    yield "admit as a caller", lambda: _one(manager.AdmitSequences(admissions, timeout=CALL_SECONDS))
    yield "forget as a caller", lambda: _one(admin.ForgetBlocks(forget, timeout=CALL_SECONDS))


def _has_hit(message: Any) -> bool:
    match message:
        case pb.StreamGenerateResponse():
            usage = message.usage
            told = any(answer.num_blocks for answer in usage.hint_answers)
            return bool(usage.cached_tokens or usage.host_tokens or usage.disk_tokens) or told
        case HttpAnswer():
            usage = json.loads(message.text).get("usage", {})
            return bool(usage.get("prompt_tokens_details", {}).get("cached_tokens"))
        case kv.ExplainPrefixResponse():
            never = kv.MissReason.MISS_REASON_NEVER_STORED
            return any(one.cached_tokens or one.miss_reason != never for one in message.explanations)
        case kv.PurgeBlocksResponse():
            return bool(message.purged_blocks or message.used_blocks)
        case kv.ForgetBlocksResponse():
            return bool(message.removed or message.used_blocks or message.shared_blocks)
        case kv.PinPrefixResponse():
            return bool(message.hold_names)
    return False


class Attack:
    """One run of probes, with a watch of events beside it."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self.found = Found()

    async def run(self, count: int) -> Found:
        """Sends N = `count` probes of all kinds in turn."""
        stage = self._stage
        tokens = stage.tenants[ATTACKER]
        caller = tokens[Role.CALLER]
        async with (
            stage.scheduler(caller) as generation,
            stage.admin(tokens[Role.OPERATOR]) as admin,
            stage.admin(tokens[Role.VIEWER]) as viewer,
            stage.admin(caller) as wrong_admin,
            open_channel(stage.stack.cachemgr, caller) as wrong_data,
            stage.http() as http,
        ):
            watching = asyncio.create_task(self._watch(kv_rpc.CacheEventServiceStub(viewer)))
            kinds = [
                *_generations(stage, rpc.GenerationServiceStub(generation)),
                *_http(stage, http),
                *_admin_calls(stage, kv_rpc.CacheAdminServiceStub(admin)),
                *_others(kv_rpc.CacheAdminServiceStub(wrong_admin), kv_rpc.CacheManagerServiceStub(wrong_data), stage),
            ]
            free = asyncio.Semaphore(CONCURRENCY)
            async with asyncio.TaskGroup() as tasks:
                for kind, probe in itertools.islice(itertools.cycle(kinds), count):
                    await free.acquire()
                    tasks.create_task(self._send(kind, probe)).add_done_callback(lambda _: free.release())
            await stage.victim_hits()
            watching.cancel()
            await asyncio.wait({watching})
            if not watching.cancelled():
                watching.result()
        # The last refusals are counted when their window ends; a busy process writes their line later.
        deadline = time.monotonic() + patience(15)
        await asyncio.sleep(2 * audit._WINDOW_SECONDS)
        while (logged := self._count_logged()) < self.found.count and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
        self.found.logged = logged
        return self.found

    async def _send(self, kind: str, probe: Probe) -> None:
        self.found.probes[kind] += 1
        try:
            messages = await probe()
        except grpc.aio.AioRpcError as error:
            self.found.outcomes[error.code().name] += 1
            self._look(kind, f"{error.details()} {error.trailing_metadata()}")
            return
        http = [message for message in messages if isinstance(message, HttpAnswer)]
        self.found.outcomes[f"HTTP {http[0].status}" if http else "OK"] += 1
        for message in messages:
            self.found.hits += _has_hit(message)
            self._look(kind, str(message))

    async def _watch(self, stub: kv_rpc.CacheEventServiceAsyncStub) -> None:
        async for message in stub.WatchEvents(kv.WatchEventsRequest()):
            self._look("event", str(message))

    def _look(self, where: str, text: str) -> None:
        """What the attacker itself has named after the victim's things is no leak."""
        text = _OWN_NAME.sub("", text).replace(f"there is no rule {self._stage.marker!r}", "")
        if self._stage.marker in text or VICTIM in text:
            self.found.leaks.append(f"{where}: {text[:200]}")

    def _count_logged(self) -> int:
        lines = list(self._stage.audited())
        calls = sum(
            line["event"] == "audit" and line["tenant"] == ATTACKER and "WatchEvents" not in line["method"]
            for line in lines
            if line.get("outcome") != "STARTED"
        )
        denied = sum(line["count"] for line in lines if line["event"] == "call denied")
        return calls + denied + self._stage.ended_requests(ATTACKER)


def crowd_for(count: int) -> int:
    """The number of tenants that N = `count` probes need: one tenant for each turn of a kind."""
    return count // LEAST_KINDS + 1


async def attack(stage: Stage, count: int) -> Found:
    """Prepares the victim and runs the probes; a victim that has lost anything is an error."""
    await stage.prepare()
    found = await Attack(stage).run(count)
    kept = await stage.victim_hits()
    if kept < len(PROMPT) - 1:
        raise AssertionError(f"only {kept} tokens of the victim are still cached")
    return found


def main() -> int:
    """Prints the findings; returns the exit status."""
    parser = argparse.ArgumentParser(description="Probes whether tenants stay apart.")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for the results")
    given = parser.parse_args()
    count: int = given.count
    with tempfile.TemporaryDirectory() as folder, Stage(Path(folder), crowd_for(count)) as stage:
        found = asyncio.run(attack(stage, count))
    for kind, number in sorted(found.probes.items()):
        print(f"{number:>8}  {kind}")
    print("outcomes:", ", ".join(f"{code} {number}" for code, number in found.outcomes.most_common()))
    print(f"probes {found.count}, hits {found.hits}, leaks {len(found.leaks)}, logged {found.logged}")
    for leak in found.leaks[:20]:
        print(" ", leak)
    figures = {"probes": found.probes, "outcomes": found.outcomes, "hits": found.hits, "leaks": found.leaks}
    Result("probes", figures | {"logged": found.logged}, {"count": found.count}).write(given.json)
    return int(bool(found.hits or found.leaks or found.logged != found.count))


if __name__ == "__main__":
    sys.exit(main())
