"""A host tier whose copies go no further until they are let go."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY

from executor.cache.pool import KvPools
from executor.cache.tiers.copy_threads import CopyThreads
from executor.cache.tiers.slot_file import HostFile
from executor.cache.tiers.tiers import Tiers
from tests.support.patience import patience
from tests.unit.executor.tiers.world import make_file


def waited_seconds() -> float:
    """Seconds that steps have waited for copies, as Prometheus reads them."""
    value = REGISTRY.get_sample_value("kvkeep_executor_copy_wait_seconds_total")
    assert value is not None
    return value


def when_awaited(copier: CopyThreads, act: Callable[[], object]) -> None:
    """Calls `act` once a step waits for copies, before any of them can end."""
    changed = copier._changed
    wait = changed.wait

    def act_and_wait(timeout: float | None = None) -> bool:
        changed.wait = wait  # type: ignore[method-assign]
        act()
        return wait(timeout)

    changed.wait = act_and_wait  # type: ignore[method-assign]


class Gate:
    """Open at first; copies of tiers made with `tiers` wait for it before they touch what they read or write."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()

    def tiers(self, pools: KvPools, folder: Path, slots: int = 6) -> Tiers:
        """One host tier."""
        gate = self.open

        class GatedHost(HostFile):
            def claim(self, group: int, slot: int) -> None:
                gate.wait(patience(10))
                super().claim(group, slot)

            def fetch(self, group: int, slot: int, staging: Any) -> Any:
                gate.wait(patience(10))
                return super().fetch(group, slot, staging)

        return Tiers(pools, [make_file(GatedHost, pools, folder, slots)])

    def opens_late(self, tiers: Tiers, seconds: float) -> None:
        """Shuts it until a step has waited for so long for copies of these tiers."""
        self.open.clear()
        when_awaited(tiers._copier, threading.Timer(seconds, self.open.set).start)
