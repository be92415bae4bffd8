"""All conformance cases against the object, its replayed log and the service."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from scheduler.cache.waiting_queue import WaitingQueue
from scheduler.request import AdmissionAttempt, Request
from tests.conformance import runner
from tests.conformance.cases import BACKEND_NAMES, VECTORS, Part, all_cases

# None may get lost. C101 is about the scheduler and has a test of its own.
NUM_CASES = 75
ORDER_CASE = "C101"


def _runs() -> Iterator[object]:
    for case in all_cases().values():
        if case.case_id == ORDER_CASE:
            continue
        for part in case.parts:
            for backend in BACKEND_NAMES:
                needs = part.needs_on(backend)
                marks = [pytest.mark.xfail(reason="needs " + ", ".join(needs), strict=True)] if needs else []
                name = "-".join(filter(None, (case.case_id, part.name, backend)))
                yield pytest.param(part, backend, id=name, marks=marks)


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


def test_cases_that_differ_are_told() -> None:
    """The list in the folder's README is the list in the data, and each says which rule it follows."""
    differing = {case_id: case.differs for case_id, case in all_cases().items() if case.differs}
    told = (VECTORS / "README.md").read_text()
    assert [line.split(":")[0][2:] for line in told.splitlines() if line.startswith("- C")] == sorted(
        differing, key=lambda case_id: int(case_id[1:])
    )
    assert all("rule" in reason.lower() for reason in differing.values())
