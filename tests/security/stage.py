"""A stack with mutual TLS and tokens, a tenant with something to lose, and channels of all roles."""

from __future__ import annotations

import json
import secrets
import ssl
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import certs
import grpc
import openai

from protos.generation.v1 import generation_pb2 as pb
from protos.generation.v1 import generation_pb2_grpc as rpc
from protos.kvcache.v1 import kvcache_pb2 as kv
from protos.kvcache.v1 import kvcache_pb2_grpc as kv_rpc
from protos.rpc.channel import open_channel
from protos.rpc.identity import Role
from protos.rpc.security import Security
from tests.stack import CONSOLE, MODULES, Stack
from tests.support.generation import generate
from tests.support.keyring import Keyring
from tests.support.patience import patience
from tests.support.ports import free_address

VICTIM, ATTACKER = "acme", "globex"
MAX_TENANT_REQUESTS = 16
PROMPT = tuple(range(1000, 1064))


def request(prompt: tuple[int, ...] = PROMPT, **cache: Any) -> pb.StreamGenerateRequest:
    """Generates one token after a prompt."""
    return pb.StreamGenerateRequest(
        token_ids=pb.TokenIds(token_ids=prompt), max_tokens=1, ignore_eos=True, cache=pb.CacheOptions(**cache)
    )


def context(tls: Security) -> ssl.SSLContext:
    """What a client that trusts and shows these certificates has."""
    made = ssl.create_default_context(cafile=tls.tls_ca_file)
    if tls.tls_cert_file is not None:
        made.load_cert_chain(tls.tls_cert_file, tls.tls_key_file)
    return made


class Stage:
    """Use it in a with statement; the victim's names have a marker that no other can guess."""

    def __init__(self, folder: Path, crowd: int) -> None:
        """crowd: how many more tenants attack, whose caches are empty."""
        self.ca = certs.authority()
        trusted, _ = self.ca.write(folder, "ca")
        cert, key = certs.certificate(self.ca, "peer").write(folder, "peer")
        self.tls = Security(tls_cert_file=cert, tls_key_file=key, tls_ca_file=trusted)
        keys = Keyring(folder, self.tls)
        self.audit_file = folder / "audit"
        self.marker = secrets.token_hex(8)
        self.salt, self.session = f"salt-{self.marker}", f"session-{self.marker}"
        self.bound_salt, self.bound_session = f"{VICTIM}/{self.salt}", f"{VICTIM}/{self.session}"
        self.keys = keys
        # Over HTTP: a caller, a viewer, and metrics.
        self.pages = {free_address(): path for path in ("/health", "/", "/metrics")}
        http, console, metrics = self.pages
        self.stack = Stack(
            tls_cert_file=cert,
            tls_key_file=key,
            tls_ca_file=trusted,
            tls_client_ca_file=trusted,
            tokens_file=keys.file,
            audit_file=self.audit_file,
            executor_max_tokens=8192,
            scheduler_http_address=http,
            modules=MODULES | CONSOLE,
            console_address=console,
            executor_metrics_address=metrics,
            scheduler_max_tenant_requests=MAX_TENANT_REQUESTS,
        )
        for role in (Role.SCHEDULER, Role.EXECUTOR):
            self.stack.own[role.value] = {"token_file": keys.add(role).token_file}
        self.stack.own["console"] = {"token_file": keys.add(Role.VIEWER).token_file}
        self.root = keys.add(Role.OPERATOR)
        self.tenants = {
            tenant: {role: keys.add(role, tenant) for role in (Role.CALLER, Role.OPERATOR, Role.VIEWER)}
            for tenant in (VICTIM, ATTACKER)
        }
        self.crowd = [keys.add(Role.CALLER, f"{ATTACKER}-{number}").token() for number in range(crowd)]
        self.hold = ""

    def __enter__(self) -> Self:
        self.stack.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stack.__exit__(kind, error, trace)

    def scheduler(self, security: Security) -> grpc.aio.Channel:
        """A channel to the scheduler."""
        return open_channel(self.stack.scheduler, security)

    def admin(self, security: Security) -> grpc.aio.Channel:
        """A channel to the operators' services."""
        return open_channel(self.stack.admin, security)

    def http(self) -> openai.DefaultAsyncHttpxClient:
        """A client of the HTTP API, without a token."""
        return openai.DefaultAsyncHttpxClient(
            base_url=f"https://{self.stack.http}", verify=context(self.tls), timeout=patience(60)
        )

    async def victim_hits(self) -> int:
        """Sends the victim's prompt again; tokens that came from its cache."""
        async with self.scheduler(self.tenants[VICTIM][Role.CALLER]) as channel:
            stub: rpc.GenerationServiceAsyncStub = rpc.GenerationServiceStub(channel)
            output = await generate(stub, request(salt=self.salt, session_id=self.session))
        return output.usage.cached_tokens

    async def prepare(self) -> None:
        """Gives the victim blocks, a pin, a rule and a quota."""
        await self.victim_hits()
        async with self.admin(self.root) as channel:
            admin: kv_rpc.CacheAdminServiceAsyncStub = kv_rpc.CacheAdminServiceStub(channel)
            pinned = await admin.PinPrefix(
                kv.PinPrefixRequest(
                    prefix=kv.PrefixSelector(salt=self.bound_salt, token_ids=PROMPT),
                    owner=self.marker,
                    duration={"seconds": 3600},  # type: ignore[arg-type]
                ),
                timeout=patience(10),
            )
            self.hold = pinned.hold_name
            rule = kv.RetentionRule(
                name=self.marker, match=kv.RuleMatch(tenant_id=VICTIM), action=kv.RuleAction(retention_priority=90)
            )
            await admin.CreateRetentionRule(kv.CreateRetentionRuleRequest(rule=rule), timeout=patience(10))
            quota = kv.Quota(salt=self.bound_salt, device_floor_blocks=3)
            await admin.SetQuota(kv.SetQuotaRequest(quota=quota), timeout=patience(10))

    def audited(self) -> Iterator[dict[str, Any]]:
        """Lines of the audit file."""
        for line in self.audit_file.read_text().splitlines():
            yield json.loads(line)

    def ended_requests(self, tenant: str) -> int:
        """Requests for output of a tenant, or of those whose names begin with its name, by the scheduler's log."""
        lines = self.stack.log_path("scheduler").read_text().splitlines()
        found = [json.loads(line) for line in lines if '"finish_reason"' in line]
        return sum(line["tenant"].startswith(tenant) for line in found)
