"""A test that decides by wall time is found, and a number that is the subject of a test is not."""

import textwrap
from pathlib import Path

import check_deadlines
import pytest
from check_deadlines import BOUND, DEADLINE, SLEEP, findings

REFUSED = {
    "async with asyncio.timeout(20): ...": DEADLINE,
    "async with opened(), asyncio.timeout(2 * 10): ...": DEADLINE,
    "await asyncio.wait_for(event.wait(), 5)": DEADLINE,
    "stack.wait_for('ready', 20)": DEADLINE,
    "subprocess.run(command, timeout=60)": DEADLINE,
    "assert (await stub.GetPool(asked, timeout=0.5)).pool": DEADLINE,
    "await asyncio.wait(tasks, timeout=SECONDS)": DEADLINE,
    "await asyncio.wait(tasks, timeout=OF_TWO)": DEADLINE,
    "answer(timeout=FAR)": DEADLINE,
    "event.wait(10)": DEADLINE,
    "future.result(3)": DEADLINE,
    "end = time.monotonic() + 60": DEADLINE,
    "await asyncio.sleep(0.1)\nassert done": SLEEP,
    "while True:\n    time.sleep(TICK * 2)\n    assert done": SLEEP,
    "assert time.monotonic() - begin < 5": BOUND,
    "assert 5 >= time.perf_counter() - begin": BOUND,
    "begin = time.monotonic()\nend = time.monotonic()\nassert 1 < end - begin < 2": BOUND,
    "took = time.monotonic() - begin\nassert len(steps) <= 3 and took < 1": BOUND,
    "began, seen = loop.time(), 0\ntook, seen = (loop.time() - began) / 2, 1\nassert took < 1": BOUND,
    "if (took := time.time() - begin):\n    assert took < 1": BOUND,
}
ALLOWED = (
    "async with asyncio.timeout(patience(20)): ...",
    "async with asyncio.timeout(0): ...",
    "async with asyncio.timeout(None): ...",
    "await asyncio.wait_for(event.wait(), patience(5))",
    "subprocess.run(command, timeout=patience(60))",
    "subprocess.run(command, timeout=EXPLAINED)",
    "stub.GetPool(asked, timeout=0.2)  # subject: a deadline that passes",
    "stub.GetPool(\n    asked,\n    timeout=0.2,  # subject: a deadline that passes\n)",
    "', '.join(names)",
    "event.wait()",
    "end = time.monotonic() + patience(60)",
    "assert time.monotonic() < end",
    "await asyncio.sleep(0)\nassert done",
    "await asyncio.sleep(0.1)\nsee()\nassert done",
    "await asyncio.sleep(0.1)  # subject: nothing happens meanwhile\nassert not done",
    "assert time.monotonic() - begin > 5",
    "assert computed < time.perf_counter() - begin",
    "started = time.time()\nassert written >= started - 1",
    "begin = time.process_time()\nassert time.process_time() - begin < 5",
    "assert len(seen) < 5",
    "one = lambda: 1 if done else 2",
)
MODULE = """
from tests.support.somewhere import FAR, NEAR

SECONDS = 20
ONE, OF_TWO = "a", 2.0
TICK: float = 0.02
EXPLAINED = 2.0  # subject: what answers within it is in the table


async def test():
"""


def found(body: str) -> list[str]:
    source = MODULE + textwrap.indent(body, "    ")
    return [advice for _, advice in findings(source, {"tests.support.somewhere": {"FAR"}})]


@pytest.mark.parametrize("body", REFUSED)
def test_what_decides_by_wall_time_is_refused_with_an_advice(body: str) -> None:
    assert found(body) == [REFUSED[body]]


@pytest.mark.parametrize("body", ALLOWED)
def test_what_does_not_is_allowed(body: str) -> None:
    assert found(body) == []


def test_a_mark_without_a_reason_allows_nothing() -> None:
    assert found("event.wait(10)  # subject: ") == [DEADLINE]
    assert found("event.wait(10)  # noqa") == [DEADLINE]


def test_each_line_is_named_with_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["check_deadlines.py"])
    monkeypatch.setattr(check_deadlines, "ROOT", tmp_path)
    monkeypatch.setattr(check_deadlines, "TESTS", tmp_path / "tests")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/far.py").write_text("FAR = 9\n")
    (tmp_path / "tests/test_it.py").write_text("from tests.far import FAR\n\nevent.wait(FAR)\n")
    assert check_deadlines.main() == 1
    assert capsys.readouterr().err.startswith("tests/test_it.py:3: a deadline is a number")
    (tmp_path / "tests/far.py").write_text("FAR = patience(9)\n")
    assert check_deadlines.main() == 0
