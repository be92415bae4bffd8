"""Every service can be explored and called with grpcurl and no .proto."""

import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from protos.execution.v1 import execution_pb2
from protos.generation.v1 import generation_pb2
from protos.kvcache.v1 import kvcache_pb2
from tests.stack import Stack
from tests.support.patience import patience

GRPCURL = Path(sys.executable).parent / "grpcurl"
DATA, ADMIN, EVENTS = (f"kvcache.v1.Cache{name}Service" for name in ("Manager", "Admin", "Event"))
EXECUTOR, GENERATION = "execution.v1.ExecutorService", "generation.v1.GenerationService"
OPERATION = "generation.v1.SchedulerAdminService"
SERVICES = (DATA, ADMIN, EVENTS, EXECUTOR, GENERATION, OPERATION)
# grpcurl adds 64 to the code of a status.
NOT_FOUND = 64 + 5
# OK, INVALID_ARGUMENT, DEADLINE_EXCEEDED, NOT_FOUND, PERMISSION_DENIED, FAILED_PRECONDITION.
ANSWERED = {0, *(64 + code for code in (3, 4, 5, 7, 9))}

pytestmark = pytest.mark.model


@dataclass
class Grpcurl:
    """The real binary against one address."""

    address: str

    def run(self, *arguments: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
        path = self.address.removeprefix("unix:")
        command = [GRPCURL, "-plaintext", "-unix", "-max-msg-sz", str(64 << 20), *options, path, *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=patience(60), check=False)

    def text(self, *arguments: str) -> str:
        done = self.run(*arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def call(self, method: str, status: int = 0, **fields: Any) -> dict[str, Any]:
        """The answer of a method that is expected to end with this exit status; error output under "error"."""
        done = self.run(method, options=("-d", json.dumps(fields), "-emit-defaults"))
        assert done.returncode == status, done.stdout[-500:] + done.stderr
        return json.loads(done.stdout) if status == 0 else {"error": done.stderr}

    def stream(self, method: str, *options: str, **fields: Any) -> list[dict[str, Any]]:
        """All messages of a stream."""
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
    """The address of a service."""
    return {
        DATA: stack.cachemgr,
        ADMIN: stack.admin,
        EVENTS: stack.admin,
        EXECUTOR: stack.executor,
        GENERATION: stack.scheduler,
        OPERATION: stack.scheduler,
    }[service]


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


@pytest.mark.parametrize("service", SERVICES)
def test_every_method_takes_json_and_answers_or_names_a_missing_field(stack: Stack, service: str) -> None:
    client = Grpcurl(address_of(stack, service))

    def status(method: str) -> int:
        # A watch lasts until its time is over.
        return client.run(method, options=("-d", "{}", "-max-time", "5")).returncode

    with ThreadPoolExecutor(4) as pool:
        statuses = dict(zip(methods(service), pool.map(status, methods(service)), strict=True))
    assert set(statuses.values()) <= ANSWERED, statuses


def test_a_stream_and_an_error_are_shown(stack: Stack) -> None:
    generation, admin = Grpcurl(stack.scheduler), Grpcurl(stack.admin)
    messages = generation.stream(f"{GENERATION}/StreamGenerate", text="The capital of France is", max_tokens=8)
    assert "Paris" in "".join(message["text"] for message in messages)
    assert "pool_id" in admin.call(f"{ADMIN}/GetPool", NOT_FOUND, pool_id="nowhere/0")["error"]
