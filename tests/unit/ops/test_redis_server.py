"""The Redis server of run-stack keeps its data, is reached by its owner alone, and says why there is none."""

import importlib.metadata
import stat
from pathlib import Path

import pytest
import redis
from redis_server import RedisServerError, redis_child, redis_url

from tests.support.local_redis import LocalRedis


@pytest.mark.parametrize("folder", ["plain", 'a "quoted" folder', "x" * 60 + "/" + "y" * 60])
def test_data_outlives_a_stop_behind_a_socket_of_its_owner(tmp_path: Path, folder: str) -> None:
    server = LocalRedis(tmp_path / folder)
    try:
        with redis.Redis(unix_socket_path=server.url.removeprefix("unix://")) as client:
            assert client.config_get("port")["port"] == "0"
            client.set("kept", b"\x00\xff")
            server.stop()
            with pytest.raises(redis.ConnectionError):
                client.get("kept")
            server.start()
            assert client.get("kept") == b"\x00\xff"
            # The journal is synced each second: answered writes survive a kill, too.
            server.kill()
            server.start()
            assert client.get("kept") == b"\x00\xff"
    finally:
        server.stop()
    path = Path(server.url.removeprefix("unix://"))
    assert len(bytes(path)) <= 100
    assert redis_url(tmp_path / folder) == server.url
    configuration = tmp_path / folder / "redis" / "server.conf"
    assert stat.S_IMODE(configuration.stat().st_mode) == 0o600
    assert stat.S_IMODE(configuration.parent.stat().st_mode) == 0o700


def test_no_server_at_all_is_said_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(importlib.metadata, "files", lambda _: None)
    with pytest.raises(RedisServerError, match="KVKEEP_REDIS_URL"):
        redis_child(tmp_path, tmp_path / "log")
