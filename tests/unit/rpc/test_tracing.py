"""The cost of traces that are off, and traces that cannot be sent."""

import json
import subprocess
import sys

import pytest

from protos.rpc import tracing
from protos.rpc.spans import Context
from tests.support.ports import free_address

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PROGRAM = """
import sys
from protos.rpc import logs, tracing
logs.configure("tester", "info")
{first}
import os
tracing.start("tester", os.environ)
span = tracing.begin("work")
print(tracing.is_on(), bool(span.traceparent), any(name.startswith("opentelemetry") for name in sys.modules))
span.end({{"tokens": 3}})
tracing.stop()
"""


def run(first: str = "", **environment: str) -> tuple[str, list[dict[str, object]]]:
    """What a process with this environment prints, and its log."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(first=first)],
        capture_output=True, text=True, check=True, env={"PATH": "", "PYTHONPATH": ":".join(sys.path), **environment},
    )  # fmt: skip
    return done.stdout.strip(), [json.loads(line) for line in done.stderr.splitlines()]


def test_without_an_endpoint_nothing_is_imported_and_nothing_said() -> None:
    assert run() == ("False False False", [])
    assert run(OTEL_EXPORTER_OTLP_ENDPOINT="") == ("False False False", [])
    assert run(OTEL_EXPORTER_OTLP_ENDPOINT="http://x", OTEL_SDK_DISABLED="true") == ("False False False", [])


def test_a_missing_package_is_one_line_that_says_what_to_install() -> None:
    printed, [line] = run(
        "sys.modules['opentelemetry.sdk.trace'] = None", OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:4317"
    )
    assert printed.startswith("False False")
    assert (line["level"], line["package"], line["hint"]) == (
        "warning", "opentelemetry.sdk.trace", "pip install 'kvkeep[tracing]'"
    )  # fmt: skip


def test_another_protocol_is_one_line_that_names_the_setting() -> None:
    printed, [line] = run(OTEL_EXPORTER_OTLP_ENDPOINT="http://x", OTEL_EXPORTER_OTLP_PROTOCOL="http/protobuf")
    assert printed.startswith("False False")
    assert "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=grpc" in str(line["hint"])


def test_a_receiver_that_is_not_there_does_not_keep_a_process_from_its_end() -> None:
    printed, lines = run(OTEL_EXPORTER_OTLP_ENDPOINT=f"http://{free_address()}")
    assert printed == "True True True"
    assert lines[0]["event"] == "traces are sent"
    assert all(line["level"] in ("info", "warning", "error") for line in lines)


@pytest.mark.parametrize("flags", ["00", "01", "03"])
def test_a_context_is_read_as_w3c_writes_it(flags: str) -> None:
    context = Context(f"00-{TRACE}-{SPAN}-{flags}")
    assert (context.trace_id, context.span_id, context.flags) == (TRACE, SPAN, int(flags))
    assert Context(f"cc-{TRACE}-{SPAN}-{flags}-what-comes-later").trace_id == TRACE


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        "garbage",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE}-{SPAN}-01\n",
    ],
)
def test_what_is_no_context_is_none(wrong: str) -> None:
    with pytest.raises(ValueError, match="W3C"):
        Context(wrong)
    tracing.receive(wrong)
    assert tracing.current() == ""
    assert tracing.join("work", wrong) is tracing.OFF
