"""kvctl has an executor compute with other weights, through its scheduler."""

from pathlib import Path

import pytest

from kvctl.status import Status
from tests.support.scheduler.fleet import run_engine
from tests.unit.kvctl.conftest import Kvctl


async def test_weights_are_updated_and_reset(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], clean: pytest.MonkeyPatch
) -> None:
    async with run_engine(tmp_path) as engine:
        clean.setenv("KVKEEP_SCHEDULER_ADDRESS", engine.address)
        kvctl = Kvctl(capfd, {})
        said = await kvctl.text("weights", "update", "step-1", "checkpoints/step-1", "--yes")
        assert said.strip() == "computing with the weights step-1; 7 cached blocks of other weights stay"
        assert engine.executor.weights == ("step-1", "checkpoints/step-1")
        engine.executor.broken_weights.add("checkpoints/step-2")
        refused = await kvctl.run("weights", "update", "step-2", "checkpoints/step-2", "--yes")
        assert refused.status == Status.USAGE
        assert "path has no weights" in refused.err
        assert engine.executor.weights == ("step-1", "checkpoints/step-1")
        said = await kvctl.text("weights", "reset", "--yes")
        assert said.strip() == "computing with the weights of the start; 7 cached blocks of other weights stay"
        assert engine.executor.weights == ("", "")
        assert await kvctl.data("weights", "reset", "--yes") == {"other_blocks": "7"}
