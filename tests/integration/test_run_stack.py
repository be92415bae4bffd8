"""`make run-stack`: its output, and that it leaves nothing running."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.stack import ROOT
from tests.support.patience import patience
from tests.support.ports import free_address

PROCESSES = ("SCHEDULER", "CACHEMGR", "CACHEMGR_ADMIN", "EXECUTOR", "CONSOLE")
READY_SECONDS = patience(60)
STOP_SECONDS = patience(40)

pytestmark = pytest.mark.model


class RunningStack:
    """ops/run_stack.py as a process, with a separate state folder and separate ports."""

    def __init__(self, folder: Path, *arguments: str, **settings: str) -> None:
        self.address, self.http = free_address(), free_address()
        environment = {name: value for name, value in os.environ.items() if not name.startswith("KVKEEP_")}
        environment |= {f"KVKEEP_{name}_ADDRESS": free_address() for name in PROCESSES}
        environment |= {
            f"KVKEEP_{name}_METRICS_ADDRESS": "" for name in ("SCHEDULER", "CACHEMGR", "EXECUTOR", "ROUTER")
        }
        environment |= {
            "KVKEEP_SCHEDULER_ADDRESS": self.address,
            "KVKEEP_SCHEDULER_HTTP_ADDRESS": self.http,
            "KVKEEP_EXECUTOR_MAX_TOKENS": "4096",
            "XDG_STATE_HOME": str(folder),
            "PYTHONPATH": str(ROOT),
        }
        self.environment = environment | settings
        self.output = ""
        self.process = subprocess.Popen(
            [sys.executable, "ops/run_stack.py", *arguments],
            cwd=ROOT,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line

    def wait_for(self, text: str, seconds: float = READY_SECONDS) -> None:
        self.wait(lambda: text in self.output, seconds, f"no {text!r}")

    def wait_for_end(self, seconds: float = STOP_SECONDS) -> int:
        self.wait(lambda: self.process.poll() is not None, seconds, "it did not end")
        self._reader.join(patience(5))
        assert self.process.returncode is not None
        return self.process.returncode

    def wait(self, condition: Callable[[], bool], seconds: float, complaint: str) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            ended = self.process.poll() is not None and not self._reader.is_alive()
            if time.monotonic() > deadline or (ended and not condition()):
                pytest.fail(f"{complaint}:\n{self.output}")
            time.sleep(0.05)

    def children(self) -> dict[str, psutil.Process]:
        """Its child processes: by module name, a second process with a 2 at the end, the Redis server by "redis"."""
        found: dict[str, psutil.Process] = {}
        for process in psutil.Process(self.process.pid).children(recursive=True):
            # It may have ended since.
            with contextlib.suppress(psutil.NoSuchProcess):
                line = process.cmdline()
                name = line[2] if "-m" in line else "redis"
                found[f"{name} 2" if name in found else name] = process
        return found

    def generate(self, prompt: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "scheduler.generate", prompt, "--address", self.address, "--max-tokens", "16"]
        return subprocess.run(
            command, cwd=ROOT, env=self.environment, capture_output=True, text=True, timeout=patience(60), check=False
        )

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join(patience(5))
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short enough for the sockets in it."""
    folder = Path(tempfile.mkdtemp(prefix="kvk-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def run_stack(folder: Path) -> Iterator[Callable[..., RunningStack]]:
    running: list[RunningStack] = []

    def start(*arguments: str, **settings: str) -> RunningStack:
        running.append(RunningStack(folder, *arguments, **settings))
        return running[-1]

    yield start
    for stack in running:
        stack.end()


def assert_ended(processes: dict[str, psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes.values(), timeout=patience(5))
    assert alive == []


def test_stack_becomes_ready_answers_and_leaves_nothing_behind(run_stack: Callable[..., RunningStack]) -> None:
    stack = run_stack()
    stack.wait_for("Ctrl-C stops the stack")
    for variable in ("SCHEDULER", "CACHEMGR", "CACHEMGR_ADMIN", "EXECUTOR"):
        assert stack.environment[f"KVKEEP_{variable}_ADDRESS"] in stack.output
    assert "unix://" in stack.output
    [api] = re.findall(r"http  +(http://\S+/v1)$", stack.output, re.MULTILINE)
    with urllib.request.urlopen(f"{api}/models", timeout=patience(10)) as models:
        assert b"SmolLM2" in models.read()
    children = stack.children()
    assert set(children) == {"redis", "cachemgr", "executor", "scheduler", "kvctl.console"}
    [console] = re.findall(r"console  +(http://\S+/)$", stack.output, re.MULTILINE)
    with urllib.request.urlopen(f"{console}api/pools", timeout=patience(10)) as pools:
        assert b"executor-0/0" in pools.read()

    answer = stack.generate("What is the capital of France?")
    assert "Paris" in answer.stdout, answer.stderr + stack.output
    command = re.search(r"^ +(\S*/grpcurl .*)$", stack.output, re.MULTILINE)
    assert command is not None
    pasted = subprocess.run(
        ["bash", "-c", command[1]], cwd=ROOT, capture_output=True, text=True, timeout=patience(60), check=False
    )
    assert "Paris" in pasted.stdout, pasted.stderr

    stack.process.send_signal(signal.SIGINT)
    assert stack.wait_for_end() == 0, stack.output
    assert_ended(children)
    order = [
        stack.output.index(f"{name}: stopped") for name in ("console", "scheduler", "executor", "cachemgr", "redis")
    ]
    assert order == sorted(order)


def test_a_fleet_answers_where_a_stack_does_and_leaves_nothing_behind(run_stack: Callable[..., RunningStack]) -> None:
    stack = run_stack("--engines", "2", "--shards", "2", "--policy", "round-robin")
    stack.wait_for("Ctrl-C stops the stack")
    shown = dict(re.findall(r"^  ([a-z]+-?\d?) +(\S+)", stack.output, re.MULTILINE))
    assert shown["router"] == stack.address
    assert shown["cachemgr-0"] == stack.environment["KVKEEP_CACHEMGR_ADDRESS"]
    for name in ("cachemgr-1", "scheduler-0", "scheduler-1", "executor-0", "executor-1"):
        assert shown[name].startswith("unix:")
    [api] = re.findall(r"http  +(http://\S+/v1)$", stack.output, re.MULTILINE)
    assert api == f"http://{stack.http}/v1"
    with urllib.request.urlopen(f"{api}/models", timeout=patience(10)) as models:
        assert b"SmolLM2" in models.read()
    children = stack.children()
    both = {name for service in ("cachemgr", "executor", "scheduler") for name in (service, f"{service} 2")}
    assert set(children) == {"redis", *both, "scheduler.router", "kvctl.console"}
    [console] = re.findall(r"console  +(http://\S+/)$", stack.output, re.MULTILINE)

    def seen() -> Any:
        with urllib.request.urlopen(f"{console}api/fleet", timeout=patience(10)) as answer:
            return json.load(answer)

    assert seen()["shards"] == [
        stack.environment["KVKEEP_CACHEMGR_ADMIN_ADDRESS"],
        shown["cachemgr-1"].replace("cachemgr", "admin"),
    ]
    # A router serves as soon as the first engine has answered.
    engines = {"executor-0", "executor-1"}
    stack.wait(
        lambda: {engine["executor_id"] for engine in seen()["engines"]} == engines, patience(20), "engines are missing"
    )
    assert f"kvctl engines --router {stack.address}\n" in stack.output

    # Each engine answers once, also after a scheduler was started again.
    for killed in (False, True):
        if killed:
            children["scheduler 2"].kill()
            stack.wait(
                lambda: len(re.findall(r"scheduler-\d: ready", stack.output)) == 3, patience(20), "not ready again"
            )
        for _ in range(2):
            answer = stack.generate("What is the capital of France?")
            assert "Paris" in answer.stdout, answer.stderr + stack.output
    children = stack.children()
    stack.process.send_signal(signal.SIGINT)
    assert stack.wait_for_end() == 0, stack.output
    assert_ended(children)
    names = ("console", "router", "scheduler-1", "scheduler-0", "executor-1", "executor-0", "cachemgr-1", "cachemgr-0")
    order = [stack.output.index(f"{name}: stopped") for name in (*names, "redis")]
    assert order == sorted(order)


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (("--shards", "2"), 2, "--shards is of several engines: give --engines, too"),
        (("--policy", "cost"), 2, "--policy is of several engines: give --engines, too"),
        (("--engines", "2", "--shards", "3"), 1, "3 shards for 2 engines"),
        (("--engines", "2", "--policy", "coin"), 1, "KVKEEP_ROUTER_POLICY: must be one of"),
    ],
)
def test_a_fleet_that_cannot_be_is_refused_before_anything_starts(
    run_stack: Callable[..., RunningStack], arguments: tuple[str, ...], status: int, said: str
) -> None:
    stack = run_stack(*arguments)
    assert stack.wait_for_end() == status
    assert said in stack.output
    assert "starting" not in stack.output


def test_second_stack_on_the_same_folder_is_refused(run_stack: Callable[..., RunningStack]) -> None:
    first = run_stack()
    first.wait_for("scheduler: starting")
    second = run_stack()
    assert second.wait_for_end() == 1
    assert f"process {first.process.pid}" in second.output
    assert "KVKEEP_STATE_DIR" in second.output


def test_taken_port_is_named_with_its_setting(run_stack: Callable[..., RunningStack]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        stack = run_stack(KVKEEP_EXECUTOR_ADDRESS=address)
        assert stack.wait_for_end() == 1
    assert f"cannot listen on {address}" in stack.output
    assert "KVKEEP_EXECUTOR_ADDRESS" in stack.output


def test_wrong_setting_is_named_before_anything_starts(run_stack: Callable[..., RunningStack]) -> None:
    stack = run_stack(KVKEEP_SCHEDULER_MAX_RUNING="3")
    assert stack.wait_for_end() == 1
    assert "KVKEEP_SCHEDULER_MAX_RUNNING" in stack.output
    assert "starting" not in stack.output


def test_ended_process_is_started_again_until_it_ends_too_often(run_stack: Callable[..., RunningStack]) -> None:
    stack = run_stack()
    stack.wait_for("Ctrl-C stops the stack")
    for number in range(1, 4):
        before = stack.output.count("cachemgr: ready")
        stack.children()["cachemgr"].kill()
        stack.wait_for(f"number {number} of 3")
        stack.wait(
            lambda before=before: stack.output.count("cachemgr: ready") > before, patience(20), "not ready again"
        )
    answer = stack.generate("What is the capital of France?")
    assert "Paris" in answer.stdout, answer.stderr + stack.output
    children = stack.children()
    children["cachemgr"].kill()
    assert stack.wait_for_end() == 1
    assert "cachemgr was killed by SIGKILL, for the 4th time" in stack.output
    assert '"listening"' in stack.output.partition("last lines of its log")[2]
    assert_ended(children)


# Read by every Python process at its start. In the cache manager's, one step's progress is taken and then fails.
BREAK_ONCE = """
import os
import sys

if sys.orig_argv[-2:] == ["-m", "cachemgr"]:
    from cachemgr.manager import CacheManager

    whole = CacheManager.sync

    def sync(self, request):
        answer = whole(self, request)
        if request.handles and os.path.exists(os.environ["BREAK_ONCE"]):
            os.unlink(os.environ["BREAK_ONCE"])
            raise AssertionError("broken by a test")
        return answer

    CacheManager.sync = sync
"""


def test_a_call_that_fails_inside_the_cache_manager_costs_no_request(
    run_stack: Callable[..., RunningStack], folder: Path
) -> None:
    (folder / "sitecustomize.py").write_text(BREAK_ONCE)
    flag = folder / "break"
    stack = run_stack(PYTHONPATH=f"{folder}:{ROOT}", BREAK_ONCE=str(flag))
    stack.wait_for("Ctrl-C stops the stack")
    flag.touch()
    answer = stack.generate("What is the capital of France?")
    assert not flag.exists()
    assert "Paris" in answer.stdout, answer.stderr + stack.output
    stack.wait_for("cachemgr: ended with status 1", patience(20))
    stack.wait(lambda: stack.output.count("cachemgr: ready") == 2, patience(20), "not ready again")
    answer = stack.generate("What is the capital of France?")
    assert "Paris" in answer.stdout, answer.stderr + stack.output
    state = folder / "kvkeep" / "cachemgr-failed.jsonl"
    kinds = {json.loads(line)["kind"] for line in state.read_text().splitlines()}
    assert {"manager", "executor", "scheduler", "sequence"} <= kinds


def test_children_end_with_a_supervisor_that_is_killed(run_stack: Callable[..., RunningStack]) -> None:
    stack = run_stack()
    stack.wait_for("scheduler: starting")
    stack.wait(lambda: len(stack.children()) == 5, patience(60), "not all of them were started")
    children = stack.children()
    assert len(children) == 5
    stack.process.kill()
    stack.process.wait()
    assert_ended(children)


def test_process_that_cannot_start_shows_why(run_stack: Callable[..., RunningStack], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "nobodys"}')
    stack = run_stack(KVKEEP_EXECUTOR_MODEL=str(tmp_path))
    assert stack.wait_for_end() == 1
    assert "executor ended with status 1 before it was ready" in stack.output
    assert f"cannot load the model {tmp_path}" in stack.output


@pytest.mark.parametrize(
    ("arguments", "settings", "said"),
    [
        (
            (),
            {"KVKEEP_EXECUTOR_MODEL": "/nothing-here"},
            "KVKEEP_EXECUTOR_MODEL: the model /nothing-here does not exist",
        ),
        (("--model", "/proc"), {}, "KVKEEP_EXECUTOR_MODEL: cannot load the model /proc: it has no config.json"),
        (("--engines", "2"), {"KVKEEP_EXECUTOR_MODEL": "/nothing-here"}, "the model /nothing-here does not exist"),
        (
            (),
            {"KVKEEP_EXECUTOR_DEVICE": "cuda", "CUDA_VISIBLE_DEVICES": ""},
            "KVKEEP_EXECUTOR_DEVICE: cuda needs a GPU",
        ),
        ((), {"KVKEEP_EXECUTOR_DISK_CACHE_SIZE": "900TiB"}, "KVKEEP_EXECUTOR_DISK_CACHE_SIZE: no space"),
    ],
)
def test_what_no_executor_could_use_is_named_before_anything_starts(
    run_stack: Callable[..., RunningStack],
    tmp_path: Path,
    arguments: tuple[str, ...],
    settings: dict[str, str],
    said: str,
) -> None:
    stack = run_stack(*arguments, KVKEEP_EXECUTOR_DISK_CACHE_DIR=str(tmp_path), **settings)
    assert stack.wait_for_end() == 1
    assert stack.output.startswith("run-stack: ")
    assert said in stack.output
    assert "starting" not in stack.output


def test_a_redis_that_does_not_answer_is_reported_without_its_password(run_stack: Callable[..., RunningStack]) -> None:
    stack = run_stack(KVKEEP_REDIS_URL=f"redis://me:secret@{free_address()}/0?password=secret")
    stack.wait_for("warning: redis does not answer")
    stack.process.send_signal(signal.SIGINT)
    assert stack.wait_for_end() == 0, stack.output
    assert "secret" not in stack.output
