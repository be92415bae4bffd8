"""kvctl in the process that serves."""

import asyncio
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from kvctl.app import main
from tests.support.kvctl import Done

VARIABLES = ("KVCTL_SERVER", "KVCTL_ROUTER", "KVKEEP_CACHEMGR_ADMIN_ADDRESS", "KVKEEP_ROUTER_ADDRESS",
             "KVKEEP_SCHEDULER_ADDRESS", "KVKEEP_CACHEMGR_ADDRESS")  # fmt: skip


class Kvctl:
    """The command line, in another thread of the process that serves."""

    def __init__(self, captured: pytest.CaptureFixture[str], variables: dict[str, str]) -> None:
        self._captured = captured
        self.variables = variables

    async def run(self, *line: object) -> Done:
        self._captured.readouterr()
        status = await asyncio.to_thread(main, [str(word) for word in line])
        return Done(status, *self._captured.readouterr())

    async def text(self, *line: object, status: int = 0) -> str:
        done = await self.run(*line)
        assert done.status == status, done
        return done.out

    async def rows(self, *line: object, status: int = 0) -> list[list[str]]:
        """The words of each line."""
        return [row.split() for row in (await self.text(*line, status=status)).splitlines()]

    async def data(self, *line: object, status: int = 0) -> Any:
        return json.loads(await self.text(*line, "-o", "json", status=status))


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """No address is given, and the services in this process print no log among what kvctl prints."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    yield monkeypatch
    structlog.configure(**before)
