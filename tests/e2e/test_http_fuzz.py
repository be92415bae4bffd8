"""Every HTTP route with requests that its description allows, with others, and with broken bodies, on a real stack.

schemathesis makes the requests and holds each answer against the OpenAPI description. HTTP_EXAMPLES=5000 makes more.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from scheduler.frontend.openai.app import create_app
from tests.fuzz.http_bounds import VALID
from tests.fuzz.limits import keep_body
from tests.fuzz.report import Report
from tests.fuzz.stage import Stage
from tests.support.patience import patience
from tests.support.scheduler.http import starting_service

pytestmark = pytest.mark.model

EXAMPLES = int(os.environ.get("HTTP_EXAMPLES", "25"))
SECONDS = patience(60)
# Not whether a request is accepted: what the description allows may be refused, as an id beyond the vocabulary.
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
BROKEN = (
    *(b"", b" ", b"{", b"hello", b"{'a': 1}", b"\xff\xfe", b"\x00" * 100, b'{"a": 1', b"[1, 2", b'"\\ud800"', b"null"),
    *(b"[]", b"NaN", b"1e400", b"1" * 5000, b"[" * 200_000, b'{"a":' * 500 + b"1" + b"}" * 500, b'{"\\ud800": 1}'),
    *(b'{"prompt": "\\ud800"}', b'{"prompt": ' + b"[" * 900 + b"]" * 900 + b"}", b" " * (13 << 20)),
)


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """A stack that must be as before when all requests are over."""
    report = Report(1, tmp_path_factory.mktemp("faults"))
    with Stage() as stage:
        yield stage
        asyncio.run(stage.check(report))
        assert not report.num_faults, report.text()


schema = schemathesis.openapi.from_dict(create_app(starting_service(), max_prompt_bytes=1).openapi())


@schema.parametrize()
@settings(max_examples=EXAMPLES, database=None, deadline=None, phases=[Phase.generate], derandomize=True,
          suppress_health_check=list(HealthCheck))  # fmt: skip
def test_every_route_answers_as_described(stage: Stage, case: schemathesis.Case) -> None:
    if case.method == "POST":
        case.body = keep_body(case.body)
    case.call_and_validate(base_url=f"http://{stage.stack.http}", checks=CHECKS, timeout=SECONDS)


@pytest.mark.parametrize("path", VALID)
def test_a_broken_body_is_refused_in_the_shape_of_errors(stage: Stage, path: str) -> None:
    with requests.Session() as session:
        for body in BROKEN:
            headers = {"Content-Type": "application/json"}
            answer = session.post(f"http://{stage.stack.http}{path}", data=body, headers=headers, timeout=SECONDS)
            assert 400 <= answer.status_code < 500, (body[:80], answer.text)
            error = json.loads(answer.text)["error"]
            assert error["message"], body[:80]
            assert {"type", "param", "code"} <= error.keys()
