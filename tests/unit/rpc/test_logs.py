"""What a process writes to stderr when that is no terminal."""

import json
import subprocess
import sys

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
