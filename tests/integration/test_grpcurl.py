"""Every service can be explored and called by people who have grpcurl and no .proto."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from protos.execution.v1 import execution_pb2
from protos.generation.v1 import generation_pb2
from protos.kvcache.v1 import kvcache_pb2
from tests.stack import Stack

GRPCURL = Path(sys.executable).parent / "grpcurl"
DATA, ADMIN, EVENTS = (f"kvcache.v1.Cache{name}Service" for name in ("Manager", "Admin", "Event"))
EXECUTOR, GENERATION = "execution.v1.ExecutorService", "generation.v1.GenerationService"
OPERATION = "generation.v1.SchedulerAdminService"
SERVICES = (DATA, ADMIN, EVENTS, EXECUTOR, GENERATION, OPERATION)
# grpcurl adds 64 to the code of a status.
FAILED_PRECONDITION, NOT_FOUND = 64 + 9, 64 + 5

pytestmark = pytest.mark.model


@dataclass
class Grpcurl:
    """The real binary against one address; remembers what was called."""

    address: str
    called: set[str] = field(default_factory=set)

    def run(self, *arguments: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
        path = self.address.removeprefix("unix:")
        command = [GRPCURL, "-plaintext", "-unix", "-max-msg-sz", str(64 << 20), *options, path, *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    def text(self, *arguments: str) -> str:
        done = self.run(*arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def call(self, method: str, status: int = 0, **fields: Any) -> dict[str, Any]:
        """The answer of a method that is expected to end with this exit status; error output under "error"."""
        self.called.add(method)
        done = self.run(method, options=("-d", json.dumps(fields), "-emit-defaults"))
        assert done.returncode == status, done.stdout[-500:] + done.stderr
        return json.loads(done.stdout) if status == 0 else {"error": done.stderr}

    def stream(self, method: str, *options: str, **fields: Any) -> list[dict[str, Any]]:
        """All messages of a stream."""
        self.called.add(method)
        done = self.run(method, options=("-d", json.dumps(fields), "-emit-defaults", *options))
        decoder, text, messages = json.JSONDecoder(), done.stdout.strip(), []
        while text:
            message, end = decoder.raw_decode(text)
            messages.append(message)
            text = text[end:].lstrip()
        return messages


def methods(service: str) -> set[str]:
    """Full names of a service's methods."""
    for module in (execution_pb2, generation_pb2, kvcache_pb2):
        for descriptor in module.DESCRIPTOR.services_by_name.values():
            if descriptor.full_name == service:
                return {f"{service}/{method.name}" for method in descriptor.methods}
    raise AssertionError(service)


def address_of(stack: Stack, service: str) -> str:
    """Where a service is served."""
    return {
        DATA: stack.cachemgr,
        ADMIN: stack.admin,
        EVENTS: stack.admin,
        EXECUTOR: stack.executor,
        GENERATION: stack.scheduler,
        OPERATION: stack.scheduler,
    }[service]


@pytest.fixture
def client(stack: Stack, request: pytest.FixtureRequest) -> Iterator[Grpcurl]:
    """A client of the service that the test names; all its methods must have been called in the end."""
    service = request.param
    client = Grpcurl(address_of(stack, service))
    yield client
    if request.node.name.startswith("test_every_method"):
        assert client.called >= methods(service)


@pytest.mark.parametrize("service", SERVICES)
def test_service_is_listed_described_and_healthy(stack: Stack, service: str) -> None:
    client = Grpcurl(address_of(stack, service))
    assert {service, "grpc.health.v1.Health"} <= set(client.text("list").split())
    assert set(client.text("list", service).split()) == {name.replace("/", ".") for name in methods(service)}
    # With no name, everything that is listed must have a description.
    assert f"{service} is a service" in client.text("describe")
    described = client.text("describe", service)
    for method in methods(service):
        assert f"rpc {method.rpartition('/')[2]} (" in described
    assert client.call("grpc.health.v1.Health/Check", service=service) == {"status": "SERVING"}
    assert client.call("grpc.health.v1.Health/Check") == {"status": "SERVING"}
    assert "NotFound" in client.call("grpc.health.v1.Health/Check", NOT_FOUND, service="no.such.Service")["error"]


@pytest.mark.parametrize("service", SERVICES)
def test_messages_of_every_method_are_described(stack: Stack, service: str) -> None:
    client = Grpcurl(address_of(stack, service))
    messages = set(re.findall(r"\( (?:stream )?\.([\w.]+) \)", client.text("describe", service)))
    assert len(messages) == 2 * len(methods(service))
    with ThreadPoolExecutor(4) as pool:
        described = pool.map(lambda message: client.text("describe", message), messages)
        assert all("is a message" in text for text in described)


@pytest.mark.parametrize("client", [GENERATION], indirect=True)
def test_every_method_of_generation(client: Grpcurl) -> None:
    model = client.call(f"{GENERATION}/GetModel")
    assert model["vocab_size"] == 49_152
    messages = client.stream(f"{GENERATION}/StreamGenerate", text="The capital of France is", max_tokens=8)
    assert "Paris" in "".join(message["text"] for message in messages)
    assert messages[-1]["usage"]["output_tokens"] == 8
    assert len(client.call(f"{GENERATION}/TokenizePrompt", text="The capital of France is")["token_ids"]) == 5
    loads = client.call(f"{GENERATION}/GetLoads")
    assert int(loads["steps"]) > 0


@pytest.mark.parametrize("client", [OPERATION], indirect=True)
def test_every_method_of_the_schedulers_operation(client: Grpcurl) -> None:
    # What others find drained, they cannot use: only what it would do.
    answer = client.call(f"{OPERATION}/SetDraining", draining=True, validate_only=True)
    assert set(answer) == {"running_requests", "waiting_requests"}


@pytest.mark.parametrize("client", [EXECUTOR], indirect=True)
def test_every_method_of_the_executor_and_a_stale_session_disturbs_nobody(stack: Stack, client: Grpcurl) -> None:
    model = client.call(f"{EXECUTOR}/GetModel")
    assert model["vocab_size"] == 49_152
    executor = client.call(f"{EXECUTOR}/GetExecutor")
    stream = f"{EXECUTOR}/StreamSteps"
    opening = {"scheduler_id": "stranger", "scheduler_epoch": 1, "executor_epoch": executor["executor_epoch"]}
    assert "older" in client.call(stream, FAILED_PRECONDITION, open=opening)["error"]
    opening = {"scheduler_id": "stranger", "scheduler_epoch": 2**63, "executor_epoch": 1}
    assert "open.executor_epoch" in client.call(stream, FAILED_PRECONDITION, open=opening)["error"]
    generation = Grpcurl(stack.scheduler)
    messages = generation.stream(f"{GENERATION}/StreamGenerate", text="One, two,", max_tokens=4)
    assert messages[-1]["usage"]["output_tokens"] == 4


@pytest.mark.parametrize("client", [ADMIN], indirect=True)
def test_every_method_of_the_admin_service(client: Grpcurl, stack: Stack) -> None:
    prompt = "Blocks of sixteen tokens each hold what a long enough prompt leaves behind in the cache, " * 3
    Grpcurl(stack.scheduler).stream(f"{GENERATION}/StreamGenerate", text=prompt, max_tokens=2)
    pools = client.call(f"{ADMIN}/ListPools")["pools"]
    pool_id = next(pool["pool_id"] for pool in pools if pool["pool_id"].startswith("executor-0/"))
    assert client.call(f"{ADMIN}/GetPool", pool_id=pool_id)["pool"]["total_blocks"] > 0
    assert client.call(f"{ADMIN}/ListBlocks", pool_id=pool_id, page_size=2)["blocks"]
    client.call(f"{ADMIN}/ListSequences")
    assert client.call(f"{ADMIN}/CheckPool", pool_id=pool_id)["violations"] == []
    purged = client.call(f"{ADMIN}/PurgeBlocks", filter={"pool_id": pool_id}, validate_only=True)
    assert int(purged["purged_blocks"]) > 0
    assert client.call(f"{ADMIN}/GetStats", pool_id=pool_id, window="60s")["tiers"]
    assert client.call(f"{ADMIN}/GetGhostCaches", executor_id=pool_id.partition("/")[0])["caches"]
    assert client.call(f"{ADMIN}/ListPrefixes", pool_id=pool_id)["prefixes"]
    client.call(f"{ADMIN}/ListLeases", pool_id=pool_id)
    total = client.call(f"{ADMIN}/GetPool", pool_id=pool_id)["pool"]["total_blocks"]
    share = {"pool_id": pool_id, "total_blocks": total}
    mask = {"paths": ["total_blocks"]}
    answer = client.call(f"{ADMIN}/UpdatePool", pool=share, update_mask=mask, validate_only=True)
    assert answer["pool"]["total_blocks"] == total
    assert client.stream(f"{ADMIN}/DumpState")[-1]["state_hash"]

    blocks = client.call(f"{ADMIN}/ListBlocks", pool_id=pool_id, page_size=1000, include_token_ids=True)["blocks"]
    first = next(one for one in blocks if one["num_tokens"] == 16 and not one["parent_key"] and "salt" not in one)
    prefix = {"token_ids": first["token_ids"]}
    assert client.call(f"{ADMIN}/ExplainPrefix", prefix=prefix)["explanations"]
    pin = client.call(f"{ADMIN}/PinPrefix", prefix=prefix, owner="grpcurl", duration="60s")["hold_name"]
    assert [hold["name"] for hold in client.call(f"{ADMIN}/ListHolds", owner="grpcurl")["holds"]] == [pin]
    assert client.call(f"{ADMIN}/ReleaseHold", name=pin)["freed_blocks"] == 1
    client.call(f"{ADMIN}/ForgetBlocks", salt="grpcurl", validate_only=True)

    rule = {"name": "grpcurl", "match": {"salt": "grpcurl"}, "action": {"retention_priority": 1}}
    client.call(f"{ADMIN}/CreateRetentionRule", rule=rule)
    assert client.call(f"{ADMIN}/GetRetentionRule", name="grpcurl")["rule"]["name"] == "grpcurl"
    assert client.call(f"{ADMIN}/ListRetentionRules")["rules"]
    client.call(f"{ADMIN}/UpdateRetentionRule", rule=rule | {"order": 2}, update_mask={"paths": ["order"]})
    client.call(f"{ADMIN}/DeleteRetentionRule", name="grpcurl")
    client.call(f"{ADMIN}/SetQuota", quota={"salt": "grpcurl", "device_ceiling_blocks": 8})
    assert client.call(f"{ADMIN}/ListQuotas")["quotas"]
    client.call(f"{ADMIN}/DeleteQuota", salt="grpcurl")


@pytest.mark.parametrize("client", [EVENTS], indirect=True)
def test_every_method_of_the_event_service(client: Grpcurl, stack: Stack) -> None:
    prompt = "Events tell of every block that enters the cache and of every block that leaves it again, " * 3
    Grpcurl(stack.scheduler).stream(f"{GENERATION}/StreamGenerate", text=prompt, max_tokens=2)
    messages = client.stream(f"{EVENTS}/WatchEvents", "-max-time", "2")
    kinds = {event["kind"] for message in messages for event in message["events"]}
    assert {"EVENT_KIND_CREATED", "EVENT_KIND_STORED"} <= kinds


@pytest.mark.parametrize("client", [DATA], indirect=True)
def test_every_method_of_the_data_plane(client: Grpcurl) -> None:
    epoch = time.time_ns()
    scheduler = {"scheduler_id": "grpcurl", "scheduler_epoch": epoch}
    executor = {"executor_id": "grpcurl", "executor_epoch": epoch}
    pool = {"group": 0, "num_blocks": 32, "num_layers": 1, "num_kv_heads": 1, "head_dim": 8, "block_bytes": 256}
    fingerprint = {"model": "tiny", "model_fingerprint": "AAAA", "block_size": 4}
    registered = client.call(f"{DATA}/RegisterExecutor", **executor, **fingerprint, pools=[pool | {"dtype": "float32"}])
    manager = {"manager_epoch": registered["manager_epoch"]}
    client.call(f"{DATA}/RenewExecutor", **executor, **manager)
    client.call(f"{DATA}/RegisterScheduler", **scheduler)

    admission = {"sequence_id": "a", "executor_id": "grpcurl", "token_ids": list(range(10)), **scheduler}
    assert client.call(f"{DATA}/PreviewAdmission", admission=admission)["admitted"]
    admitted = client.call(f"{DATA}/AdmitSequence", **admission)
    assert admitted["admitted"]
    assert admitted["block_tables"][0]["slots"][0] > 0
    handle = admitted["sequence_handle"]
    columns = {"handles": [handle], "computed_tokens": [10], "new_token_counts": [0]}
    client.call(f"{DATA}/SyncSequences", **scheduler, **manager, sync_number=1, step=1, **columns)
    assert client.call(f"{DATA}/EstimateSequence", **scheduler, sequence_id="a", max_new_tokens=8)["estimates"]
    retain = {
        "action_id": "1",
        "action_type": "Retain",
        "action_version": "0.1",
        "payload": {"priority": 60, "duration_seconds": 600},
    }
    hints = {"protocol_version": "0.1", "message_id": "grpcurl", "actions": [retain]}
    prefix = {"executor_id": "grpcurl", "token_ids": list(range(8))}
    (answer,) = client.call(f"{DATA}/SendHints", prefix=prefix, hints=hints)["answers"]
    assert answer["outcome"] == "HINT_OUTCOME_ACCEPTED"
    assert (
        client.call(f"{DATA}/ExtendSequence", **scheduler, sequence_id="a", capacity_tokens=60)["capacity_tokens"] >= 60
    )
    assert client.call(f"{DATA}/TruncateSequence", **scheduler, sequence_id="a", num_tokens=9)["found"]
    forked = client.call(f"{DATA}/ForkSequence", **scheduler, parent_sequence_id="a", sequence_id="b")
    assert forked["admitted"]
    tickets = [transfer["ticket"] for transfer in forked["transfers"]]
    confirmed = client.call(f"{DATA}/ConfirmTransfers", **executor, tickets=tickets)
    assert confirmed["unknown_tickets"] == 0
    client.call(f"{DATA}/HoldSequence", **scheduler, sequence_id="a", owner="grpcurl", duration="1s")
    assert client.call(f"{DATA}/ReleaseSequence", **scheduler, sequence_id="a")["found"]
    assert client.call(f"{DATA}/ReleaseSequence", **scheduler, sequence_id="b")["found"]
    assert not client.call(f"{DATA}/ReleaseSequence", **scheduler, sequence_id="a")["found"]
    both = [admission | {"sequence_id": name} for name in ("c", "d")]
    answers = client.call(f"{DATA}/AdmitSequences", admissions=both)["answers"]
    assert [answer["admitted"] for answer in answers] == [True, True]
