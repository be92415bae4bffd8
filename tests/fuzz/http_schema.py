"""Requests over HTTP as the OpenAPI description allows them, and others, by schemathesis; answers are held against it.

Making a body takes longer than answering it: with each one several more are sent, put together from the fields of those
that were made before.

Whether a request must be taken is not checked: what the description allows may rightly be refused with 400, such as an
id beyond the vocabulary, more tokens than the model's length has room for, two fields that exclude each other, a field
of OpenAI's that asks for what is not done here, 1.0 where an integer is asked for, a name that the chat template
does not read. And some of what it does not allow is taken: null is the same as an absent field, whatever its name.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
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
CONCURRENCY = 8
TELL_SECONDS = 5.0
# Requests that one search makes: more of them search where they have been before.
_SEARCH = 500
_GENERATING = "/v1/"
# Bodies sent for each that was made, and values that are kept of each field.
_SENT_PER_MADE = 5
_KEPT = 50


def fuzz(address: str, report: Report, count: int, tell: Callable[[str], None]) -> None:
    """So many requests."""
    schema = schemathesis.openapi.from_url(f"http://{address}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    weights = [_weight(one) for one in operations]
    done = 0
    with ThreadPoolExecutor(CONCURRENCY) as threads:
        calls = _Calls(f"http://{address}", report, tell, threads)
        for index, operation in enumerate(operations):
            share = count * sum(weights[: index + 1]) // sum(weights) - done
            calls.make(operation, share)
            done += share


def _weight(operation: Any) -> int:
    """More for what has a body, but less where it is a conversation: those take longest to be made and answered."""
    if not operation.body:
        return 5 if operation.path_parameters else 1
    return 8 if "chat" in operation.path else 20


class _Calls:
    """Makes the calls of one operation after the other."""

    def __init__(self, url: str, report: Report, tell: Callable[[str], None], threads: Executor) -> None:
        self._url = url
        self._threads = threads
        # As many as run, and as many again that wait.
        self._room = threading.Semaphore(2 * CONCURRENCY)
        self._own = threading.local()
        self._report = report
        self._tell = tell
        self._told = time.monotonic()
        self._rng = random.Random(f"{report.seed} bodies")
        self._left = 0

    def make(self, operation: Any, count: int) -> None:
        """So many calls of an operation, allowed ones and others in turn."""
        self._left, search = count, 0
        modes = list(schemathesis.GenerationMode)
        while self._left > 0:
            for mode in list(modes):
                try:
                    self._search(operation, mode, search)
                except Unsatisfiable:
                    # Not every operation has anything that could be wrong.
                    modes.remove(mode)
            search += 1
            if not modes:
                raise AssertionError(f"no request can be made of {operation.label}")

    def _search(self, operation: Any, mode: schemathesis.GenerationMode, number: int) -> None:
        budget = min(-(-self._left // _SENT_PER_MADE), _SEARCH)
        if not budget:
            return
        # Values of the fields of bodies that were made in this search.
        seen: dict[str, deque[Any]] = {}

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
            self._call(operation.label, case)
            if not isinstance(case.body, dict):
                return
            for name, value in case.body.items():
                seen.setdefault(name, deque(maxlen=_KEPT)).append(value)
            for _ in range(1, _SENT_PER_MADE):
                self._call(operation.label, self._mixed(case, seen))

        call()

    def _mixed(self, case: schemathesis.Case, seen: Mapping[str, Sequence[Any]]) -> schemathesis.Case:
        """Another case, with some of the fields as others had them."""
        rng = self._rng
        body = {name: rng.choice(seen[name]) if rng.random() < 0.5 else value for name, value in case.body.items()}
        for name in rng.sample(sorted(seen), min(2, len(seen))):
            body.setdefault(name, rng.choice(seen[name]))
        return case.operation.Case(
            method=case.method,
            path_parameters=case.path_parameters,
            headers=case.headers,
            query=case.query,
            body=body,
            media_type=case.media_type,
        )

    def _call(self, label: str, case: schemathesis.Case) -> None:
        """Hands a case over; waits while too many are under way."""
        if not self._left:
            return
        self._left -= 1
        if case.path.startswith(_GENERATING) and case.method == "POST":
            case.body = keep_body(case.body)
        self._room.acquire()
        self._threads.submit(self._send, label, case).add_done_callback(self._sent)
        if time.monotonic() - self._told > TELL_SECONDS:
            self._told = time.monotonic()
            self._tell(f"HTTP: {label}, {self._left} calls left, {self._report.num_faults} faults")

    def _sent(self, sending: Future[None]) -> None:
        self._room.release()
        if error := sending.exception():
            self._report.fault("a check that failed itself", repr(error))

    def _send(self, label: str, case: schemathesis.Case) -> None:
        if not hasattr(self._own, "session"):
            self._own.session = requests.Session()
        begin = time.monotonic()
        try:
            response = case.call(base_url=self._url, session=self._own.session, timeout=PATIENCE)
        except requests.RequestException as error:
            self._report.count(label, type(error).__name__, time.monotonic() - begin)
            self._report.hang(f"no answer to {label}", str(error), begin, _shown(case))
            return
        self._report.count(label, str(response.status_code), time.monotonic() - begin)
        try:
            case.validate_response(response, checks=CHECKS)
        except FailureGroup as group:
            for failure in group.exceptions:
                self._fault(label, case, failure)
        except Failure as failure:
            self._fault(label, case, failure)

    def _fault(self, label: str, case: schemathesis.Case, failure: BaseException) -> None:
        self._report.fault(f"{label}: {getattr(failure, 'title', type(failure).__name__)}", str(failure), _shown(case))


def _shown(case: schemathesis.Case) -> dict[str, object]:
    """What it was, to be sent again."""
    body = json.dumps(case.body, default=repr) if case.body is not None else ""
    return {"curl": case.as_curl_command(), "body": body[:20_000]}
