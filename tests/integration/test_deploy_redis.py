"""The Redis that deployments bring: a real server with the same settings answers the cache manager only."""

import asyncio
import contextlib
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from protos.rpc.redis_client import UNAVAILABLE, open_redis
from tests.support.deployed import Secrets, composed, pods, processes, render, variables
from tests.support.patience import patience
from tests.support.ports import free_address

PASSWORD = "a1b2c3"
COMPOSE_NAMES = {"ca": "ca", "certificate": "certificate", "key": "key"}
CHART_NAMES = {"ca": "tls/ca.crt", "certificate": "tls/tls.crt", "key": "tls/tls.key"}


class Deployed:
    """Settings of a deployment's Redis and cache manager, moved to a folder and a port of this machine."""

    def __init__(self, folder: Path, command: list[str], url: str, check: list[str]) -> None:
        self._folder, self._port = folder, free_address().rpartition(":")[2]
        self.command, self.check = [self._here(word) for word in command], [self._here(word) for word in check]
        self.url = self._here(url)

    def _here(self, word: str) -> str:
        word = re.sub(r"(?<=[/@])(demo-kvkeep-)?redis:6379", f"localhost:{self._port}", word)
        word = re.sub(r"\$\(\w+\)|(?<=:)secret(?=@)", PASSWORD, word).replace("/run/secrets", str(self._folder))
        return {"/data": str(self._folder), "6379": self._port}.get(word, word)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        # Without a port, it would take 6379.
        command = [_program("redis-server"), "--port", self._port, *self.command[1:]]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=self._folder) as server:
            try:
                deadline = time.monotonic() + patience(30)
                while not self.healthy():
                    assert server.poll() is None
                    assert time.monotonic() < deadline
                    time.sleep(0.05)
                yield
            finally:
                server.terminate()

    def healthy(self) -> bool:
        """What its health check finds."""
        cli = [_program("redis-cli"), "-p", self._port, *self.check[1:]]
        environment = os.environ | {"REDISCLI_AUTH": PASSWORD}
        done = subprocess.run(cli, capture_output=True, text=True, timeout=patience(10), check=False, env=environment)
        return done.stdout == "PONG\n"


def _program(name: str) -> str:
    if not (found := shutil.which(name)):
        pytest.skip(f"no {name} on the PATH")
    return found


def compose_tls(folder: Path) -> Deployed:
    services = composed("tls")["services"]
    url = services["cachemgr"]["environment"]["KVKEEP_REDIS_URL"]
    Secrets(folder, COMPOSE_NAMES)
    return Deployed(folder, services["redis"]["command"], url, services["redis"]["healthcheck"]["test"][1:])


def chart(folder: Path, values: dict[str, Any]) -> Deployed:
    found = processes(render(values))
    url = variables(found["cachemgr"])["KVKEEP_REDIS_URL"]
    Secrets(folder, CHART_NAMES)
    redis = found["redis"]
    return Deployed(folder, redis["command"] + redis["args"], url, redis["readinessProbe"]["exec"]["command"])


async def answer(url: str) -> bool:
    redis = open_redis(url)
    try:
        await redis.set("kvkeep:seen", "1")
        return bool(await redis.get("kvkeep:seen") == b"1")
    except UNAVAILABLE:
        return False
    finally:
        await redis.aclose()
        # TLS says goodbye afterwards, and the loop is about to end.
        await asyncio.sleep(0.1)


def answers(url: str) -> bool:
    """Whether it answers at last: a busy machine may take longer for a connection than a cache manager waits."""
    deadline = time.monotonic() + patience(30)
    while time.monotonic() < deadline:
        if asyncio.run(answer(url)):
            return True
    return False


@pytest.mark.parametrize("deployment", ["compose", "chart"])
def test_redis_with_tls_answers_only_clients_with_a_certificate_of_its_authority(
    deployment: str, tmp_path: Path
) -> None:
    told = compose_tls(tmp_path) if deployment == "compose" else chart(tmp_path, {})
    with told.running():
        assert answers(told.url)
        place, _, query = told.url.partition("?")
        ca, *_ = query.split("&")
        assert ca.startswith("ssl_ca_certs=")
        assert not asyncio.run(answer(f"{place}?{ca}"))
        assert not asyncio.run(answer(place.replace("rediss://", "redis://")))


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_redis_of_the_chart_asks_for_its_password(tls: bool, tmp_path: Path) -> None:
    values = {} if tls else {"tls": {"enabled": False}, "tokens": {"enabled": False}, "insecure": True}
    told = chart(tmp_path, values)
    with told.running():
        assert answers(told.url)
        assert not asyncio.run(answer(told.url.replace(f":{PASSWORD}@", "")))


def test_password_of_the_charts_redis_is_made_or_the_users_own() -> None:
    def named(values: dict[str, Any]) -> set[str]:
        told = [pod["containers"][0]["env"] for part, pod in pods(render(values)) if part in ("redis", "cachemgr")]
        wanted = [
            one["valueFrom"]["secretKeyRef"]
            for env in told
            for one in env
            if "secretKeyRef" in one.get("valueFrom", ())
        ]
        assert [one["key"] for one in wanted] == ["password", "password"]
        return {one["name"] for one in wanted}

    (made,) = (one for one in render({}) if one["kind"] == "Secret")
    assert named({}) == {made["metadata"]["name"]}
    assert len(made["data"]["password"]) > 40
    ours = {"redis": {"passwordSecret": "ours"}}
    assert named(ours) == {"ours"}
    assert not [one for one in render(ours) if one["kind"] == "Secret"]
