"""The device never waits for work that could already have been launched, and a device that fails ends the process."""

import threading
from typing import Any, cast

import pytest
import torch

from executor.core.outbox import Outbox, Session
from executor.core.runner import Runner
from executor.core.worker import Worker
from executor.errors import StepFailedError
from executor.step import Step
from tests.support.patience import patience
from tests.support.simulated_device import SimulatedRunner, outputs_of
from tests.support.worker_loop import NoConfirmations


def test_a_step_that_arrives_while_another_computes_is_launched_at_once() -> None:
    # The device ends no step before the next one is launched: a worker that waited for it first would hang.
    assert [output.number for output in outputs_of(12)] == list(range(1, 13))


def fail(*_: object) -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_a_device_that_has_failed_ends_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    # Without CUDA, each of these calls would fail for its lack.
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    runner, lost, answers = SimulatedRunner(1), threading.Event(), []
    runner.model.device = torch.device("cuda:0")
    monkeypatch.setattr(runner, "prepare", fail)
    worker = Worker(cast(Runner, cast(Any, runner)), Outbox(NoConfirmations(), {}), lost.set)
    session = Session(answers.append)
    worker.open(session)
    worker.submit(session, Step(1))
    worker.start()
    assert lost.wait(patience(5))
    assert worker.stop()
    assert [type(answer) for answer in answers] == [int, StepFailedError]
