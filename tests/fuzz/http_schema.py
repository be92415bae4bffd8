"""Requests over HTTP as the OpenAPI description allows them, and others, by schemathesis; answers are held against it.

Whether a request must be taken is not checked: what the description allows may rightly be refused with 400, such as an
id beyond the vocabulary, more tokens than the model's length has room for, two fields that exclude each other, a field
of OpenAI's that asks for what is not done here, 1.0 where an integer is asked for. And some of what it does not allow
is taken: fields that it does not name are passed over, as callers of OpenAI's API expect.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from typing import Any

import hypothesis
import requests
import schemathesis
from hypothesis import HealthCheck, Phase
from hypothesis.errors import Unsatisfiable
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import Failure, FailureGroup
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.fuzz.http_bodies import PATIENCE
from tests.fuzz.limits import keep_body
from tests.fuzz.report import Report

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
TELL_SECONDS = 5.0
# Requests that one search makes: more of them search where they have been before.
_SEARCH = 500
_GENERATING = "/v1/"


def fuzz(address: str, report: Report, count: int, tell: Callable[[str], None]) -> None:
    """So many requests."""
    schema = schemathesis.openapi.from_url(f"http://{address}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    weights = [1 + 4 * bool(one.path_parameters) + 20 * bool(one.body) for one in operations]
    calls = _Calls(f"http://{address}", report, tell)
    done = 0
    for index, operation in enumerate(operations):
        share = count * sum(weights[: index + 1]) // sum(weights) - done
        calls.make(operation, share)
        done += share


class _Calls:
    """Makes the calls of one operation after the other."""

    def __init__(self, url: str, report: Report, tell: Callable[[str], None]) -> None:
        self._url = url
        self._report = report
        self._tell = tell
        self._told = time.monotonic()
        self._session = requests.Session()
        self._left = 0

    def make(self, operation: Any, count: int) -> None:
        """So many calls of an operation, allowed ones and others in turn."""
        self._left, search = count, 0
        while self._left > 0:
            modes = (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE)
            before = self._left
            for mode in modes:
                # Not every operation has anything that could be wrong.
                with contextlib.suppress(Unsatisfiable):
                    self._search(operation, mode, search)
            search += 1
            if self._left == before:
                raise AssertionError(f"no request can be made of {operation.label}")

    def _search(self, operation: Any, mode: schemathesis.GenerationMode, number: int) -> None:
        budget = min(self._left, _SEARCH)
        if not budget:
            return

        @hypothesis.seed(f"{self._report.seed} {operation.label} {number}")
        @hypothesis.settings(
            max_examples=budget,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            # What is found is reported, and made no smaller.
            phases=[Phase.generate],
        )
        @hypothesis.given(operation.as_strategy(generation_mode=mode))
        def call(case: schemathesis.Case) -> None:
            if self._left > 0:
                self._left -= 1
                self._call(operation.label, case)

        call()

    def _call(self, label: str, case: schemathesis.Case) -> None:
        if case.path.startswith(_GENERATING) and case.method == "POST":
            case.body = keep_body(case.body)
        begin = time.monotonic()
        try:
            response = case.call(base_url=self._url, session=self._session, timeout=PATIENCE)
        except requests.RequestException as error:
            self._report.count(label, type(error).__name__, time.monotonic() - begin)
            self._report.fault(f"no answer to {label}", str(error), _shown(case))
            return
        self._report.count(label, str(response.status_code), time.monotonic() - begin)
        try:
            case.validate_response(response, checks=CHECKS)
        except FailureGroup as group:
            for failure in group.exceptions:
                self._fault(label, case, failure)
        except Failure as failure:
            self._fault(label, case, failure)
        if time.monotonic() - self._told > TELL_SECONDS:
            self._told = time.monotonic()
            self._tell(f"HTTP: {label}, {self._left} calls left, {self._report.num_faults} faults")

    def _fault(self, label: str, case: schemathesis.Case, failure: BaseException) -> None:
        self._report.fault(f"{label}: {getattr(failure, 'title', type(failure).__name__)}", str(failure), _shown(case))


def _shown(case: schemathesis.Case) -> dict[str, object]:
    """What it was, to be sent again."""
    body = json.dumps(case.body, default=repr) if case.body is not None else ""
    return {"curl": case.as_curl_command(), "body": body[:20_000]}
