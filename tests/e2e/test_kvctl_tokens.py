"""kvctl on a stack that asks for tokens: the view of a tenant's operator."""

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


class Guarded:
    """A stack with tokens, and the file with the token of each."""

    def __init__(self, folder: Path) -> None:
        self.keys = Keyring(folder)
        self.stack = Stack(tokens_file=self.keys.file, executor_max_tokens=256)
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
