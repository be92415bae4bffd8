"""What a process writes to stderr when that is no terminal."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from protos.rpc.logs import FileLog

PROGRAM = """
import logging, structlog
from protos.rpc import logs
logs.configure("tester", "info")
structlog.contextvars.bind_contextvars(request_id="r1")
structlog.get_logger().debug("hidden")
structlog.get_logger().info("shown", count=2)
logging.getLogger("library").warning("from %s", "elsewhere")
try:
    prompt = "a secret prompt"
    1 / 0
except ZeroDivisionError:
    structlog.get_logger().exception("failed")
"""


def test_logs_are_json_lines_with_process_and_context_and_no_local_variables() -> None:
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    shown, foreign, failed = (json.loads(line) for line in run.stderr.splitlines())
    assert {key: shown[key] for key in ("event", "process", "level", "request_id", "count")} == {
        "event": "shown",
        "process": "tester",
        "level": "info",
        "request_id": "r1",
        "count": 2,
    }
    assert (foreign["event"], foreign["process"]) == ("from elsewhere", "tester")
    assert "ZeroDivisionError" in failed["exception"]
    assert "a secret prompt" not in failed["exception"]


def test_a_log_in_a_file_has_whole_lines_and_continues_in_a_new_file_when_that_was_moved_away(tmp_path: Path) -> None:
    path = tmp_path / "access.jsonl"
    for name in ("first", "second"):
        log = FileLog("tester", path)
        log.log.info("ended", name=name, tokens=3)
        log.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["event"], line["name"], line["tokens"], line["process"]) for line in lines] == [
        ("ended", "first", 3, "tester"),
        ("ended", "second", 3, "tester"),
    ]
    log = FileLog("tester", path)
    path.rename(tmp_path / "access.jsonl.1")
    log.log.info("ended", name="third")
    log.close()
    assert json.loads(path.read_text())["name"] == "third"


def test_a_log_that_cannot_be_opened_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        FileLog("tester", tmp_path / "nowhere" / "access.jsonl")
