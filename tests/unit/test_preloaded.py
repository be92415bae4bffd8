"""Forks of processes that have imported everything behave like separate processes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.stack import ROOT
from tests.support.local_redis import LocalRedis
from tests.support.patience import patience
from tests.support.preloaded import PreloadedChild, can_preload

Start = Callable[..., PreloadedChild]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a cache manager with sockets in a folder; kills all remaining processes after the test."""
    redis = LocalRedis(tmp_path / "redis")
    started: list[PreloadedChild] = []

    def begin(**settings: str) -> PreloadedChild:
        own = {
            "KVKEEP_CACHEMGR_ADDRESS": f"unix:{tmp_path}/data",
            "KVKEEP_CACHEMGR_ADMIN_ADDRESS": f"unix:{tmp_path}/admin",
            "KVKEEP_CACHEMGR_METRICS_ADDRESS": "",
            "KVKEEP_REDIS_URL": redis.url,
        }
        environment = dict(os.environ) | own | settings
        command, log = [sys.executable, "-m", "cachemgr"], tmp_path / "log"
        child = PreloadedChild(command, environment, folder=ROOT, log=log, stop_seconds=patience(10))
        child.start()
        started.append(child)
        return child

    yield begin
    for child in started:
        child.kill()
    redis.stop()


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + patience(30)
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_it_serves_logs_and_ends_when_asked(start: Start) -> None:
    child = start()
    wait_for(lambda: sum('"listening"' in line for line in child.tail()) == 2)
    assert child.ended() == ""
    assert os.getpgid(child.pid) == child.pid
    child.terminate()
    assert child.wait()
    assert child.ended() == "ended with status 0"


def test_a_second_one_reads_settings_of_its_own_and_its_status_is_known(start: Start) -> None:
    first = start()
    refused = start(KVKEEP_CACHEMGR_ADDRESS="nonsense")
    wait_for(refused.ended)
    assert refused.ended() == "ended with status 1"
    assert "KVKEEP_CACHEMGR_ADDRESS" in "".join(refused.tail())
    assert first.ended() == ""
    first.kill()
    wait_for(first.ended)
    assert first.ended() == "was killed by SIGKILL"


def test_one_that_is_stopped_is_killed_in_the_end(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    child = start()
    wait_for(lambda: any('"listening"' in line for line in child.tail()))
    os.kill(child.pid, signal.SIGSTOP)
    monkeypatch.setattr(child, "_stop_seconds", 0.1)
    child.terminate()
    assert not child.wait()
    assert child.ended() == "was killed by SIGKILL"


def test_forks_end_with_the_process_that_wanted_them(tmp_path: Path) -> None:
    script = f"""
import os, sys
from pathlib import Path
sys.path.insert(0, "ops")
from tests.support.preloaded import PreloadedChild
settings = {{"KVKEEP_CACHEMGR_ADDRESS": "unix:{tmp_path}/data", "KVKEEP_REDIS_URL": "unix:{tmp_path}/no"}}
settings |= os.environ
command = [sys.executable, "-m", "cachemgr"]
child = PreloadedChild(command, settings, folder=Path.cwd(), log=Path("{tmp_path}/log"), stop_seconds=1)
child.start()
print(child.pid, flush=True)
os._exit(0)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, capture_output=True, text=True)
    wait_for(lambda: not psutil.pid_exists(int(done.stdout)))


def test_what_libraries_read_when_they_are_imported_needs_a_process_of_its_own() -> None:
    same = dict(os.environ)
    assert can_preload("executor", same | {"KVKEEP_LOG_LEVEL": "debug"})
    assert not can_preload("executor", same | {"OMP_NUM_THREADS": "1"})
    assert not can_preload("kvctl.console", same)
