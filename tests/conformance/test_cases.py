"""All conformance cases against the object, its replayed log and the service."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from scheduler.cache.waiting_queue import WaitingQueue
from scheduler.request import AdmissionAttempt, Request
from tests.conformance import runner
from tests.conformance.cases import BACKEND_NAMES, Part, all_cases

# None may get lost. C101 is about the scheduler and has a separate test.
NUM_CASES = 75
ORDER_CASE = "C101"


def _runs() -> Iterator[object]:
    for case in all_cases().values():
        if case.case_id == ORDER_CASE:
            continue
        for part in case.parts:
            for backend in BACKEND_NAMES:
                name = "-".join(filter(None, (case.case_id, part.name, backend)))
                yield pytest.param(part, backend, id=name)


@pytest.mark.parametrize(("part", "backend"), list(_runs()))
def test_case(part: Part, backend: str, tmp_path: Path) -> None:
    runner.run(part, backend, tmp_path)


def test_requests_wait_in_order_of_their_priority() -> None:
    (part,) = all_cases()[ORDER_CASE].parts
    queue, levels = WaitingQueue(), sorted(part.setup["levels"])
    for step in part.steps[:-1]:
        request = Request("r", (1,), 1, None, step["id"], 0.0, priority=levels.index(step["level"]))
        queue.push(AdmissionAttempt(request, (1,)))
    order = []
    while first := queue.first(1):
        order.append(first[0].request.arrival)
        queue.remove(order[-1])
    assert order == part.steps[-1]["expect"]["order"]


def test_every_case_is_there() -> None:
    assert len(all_cases()) == NUM_CASES
