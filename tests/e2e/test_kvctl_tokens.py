"""kvctl on a stack that asks for tokens: calls that need two tokens, and the view of a tenant's operator."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from protos.generation.v1 import generation_pb2_grpc as rpc
from protos.rpc.channel import open_sync_channel
from protos.rpc.identity import Role
from protos.rpc.security import Security
from tests.stack import Stack
from tests.support.generation import greedy_request
from tests.support.keyring import Keyring
from tests.support.kvctl import Kvctl
from tests.support.patience import patience

pytestmark = pytest.mark.model

TENANT = "acme"
TENANT_REQUESTS = 3


class Guarded:
    """A stack with tokens, and the file with the token of each."""

    def __init__(self, folder: Path) -> None:
        self.keys = Keyring(folder)
        self.stack = Stack(
            tokens_file=self.keys.file, executor_max_tokens=256, scheduler_max_tenant_requests=TENANT_REQUESTS
        )
        for role in (Role.SCHEDULER, Role.EXECUTOR):
            self.stack.own[role.value] = {"token_file": self.keys.add(role).token_file}
        self.caller = self.keys.add(Role.CALLER, TENANT)
        self.operator, self.viewer = self.keys.add(Role.OPERATOR), self.keys.add(Role.VIEWER)
        self.tenants_operator = self.keys.add(Role.OPERATOR, TENANT)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    made = Guarded(tmp_path_factory.mktemp("tokens"))
    with made.stack:
        yield made


@pytest.fixture
def kvctl(guarded: Guarded, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Kvctl:
    return Kvctl(guarded.stack, capfd, monkeypatch)


def show(patch: pytest.MonkeyPatch, security: Security) -> None:
    """Has kvctl show a token."""
    patch.setenv("KVKEEP_TOKEN_FILE", str(security.token_file))


def generate(guarded: Guarded, prompt: range) -> None:
    with open_sync_channel(guarded.stack.scheduler, guarded.caller) as channel:
        stub: rpc.GenerationServiceStub = rpc.GenerationServiceStub(channel)
        assert list(stub.StreamGenerate(greedy_request(prompt, 1), timeout=patience(60)))


def test_a_tenants_operator_sees_top(guarded: Guarded, kvctl: Kvctl, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        generate(guarded, range(1000, 1064))
    show(monkeypatch, guarded.tenants_operator)
    found = kvctl.data("top", "--once", "--interval", 0.1)
    [stats] = found["stats"].values()
    assert stats["tokens"]["queried_tokens"] == "128"
    assert [one["salt"] for one in stats["salts"]] == [TENANT]
    lines = kvctl.text("top", "--once", "--interval", 0.1).splitlines()
    [pool] = [line for line in lines if "executor-0/0" in line]
    assert f"{int(stats['tokens']['hit_tokens']) / 128:.1%}" in pool
    assert "hit 60s" not in "".join(lines)
    show(monkeypatch, guarded.viewer)
    assert "hit 60s" in kvctl.text("top", "--once", "--interval", 0.1)


def test_limits_looks_with_one_token_and_generates_with_another(
    guarded: Guarded, kvctl: Kvctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = ("limits", "--mode", "gen_throughput", "--prompt-tokens", 16, "--output-tokens", 4, "--csv", "/dev/null")
    caller = ("--caller-token-file", guarded.caller.token_file)
    show(monkeypatch, guarded.operator)
    done = kvctl.run(*line, *caller, "--yes")
    assert done.status == 0, done
    assert "most prompts at once: 3 prompts; 4: as many requests as the caller's tenant may have" in done.out
    show(monkeypatch, guarded.viewer)
    monkeypatch.setenv("KVCTL_CALLER_TOKEN_FILE", str(guarded.caller.token_file))
    assert "would load the stack to its limits" in kvctl.text(*line, "--dry-run")


@pytest.mark.parametrize(
    ("own", "caller", "status", "said"),
    [
        ("operator", None, 2, "--caller-token-file: is needed beside KVKEEP_TOKEN_FILE"),
        (None, "caller", 2, "--caller-token-file: needs KVKEEP_TOKEN_FILE beside it"),
        ("operator", "nowhere", 2, "--caller-token-file: "),
        ("operator", "viewer", 4, "the caller's token: the role of this token may not call this method"),
        ("caller", "caller", 4, "the role of this token may not call this method"),
        ("tenants_operator", "caller", 4, "the token of KVKEEP_TOKEN_FILE is a tenant's"),
    ],
)
def test_a_token_that_limits_lacks_is_named(
    guarded: Guarded,
    kvctl: Kvctl,
    monkeypatch: pytest.MonkeyPatch,
    own: str | None,
    caller: str | None,
    status: int,
    said: str,
) -> None:
    if own is not None:
        show(monkeypatch, getattr(guarded, own))
    files = {"nowhere": "/nowhere"} | {name: str(getattr(guarded, name).token_file) for name in ("caller", "viewer")}
    option = () if caller is None else ("--caller-token-file", files[caller])
    done = kvctl.run("limits", "--mode", "gen_length", "--csv", "/dev/null", "--prompt-tokens", 16, "--yes", *option)
    assert (done.status, done.out) == (status, "")
    assert said in done.err
    assert done.err.count("\n") == 1
