"""A host tier whose copies go no further until they are let go."""

import threading
from pathlib import Path
from typing import Any

from executor.cache.pool import KvPools
from executor.cache.tiers.slot_file import HostFile
from executor.cache.tiers.tiers import Tiers
from tests.unit.executor.tiers.world import make_file


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
                gate.wait(10)
                super().claim(group, slot)

            def fetch(self, group: int, slot: int, staging: Any) -> Any:
                gate.wait(10)
                return super().fetch(group, slot, staging)

        return Tiers(pools, [make_file(GatedHost, pools, folder, slots)])

    def opens_in(self, seconds: float) -> None:
        """Shuts it for a while."""
        self.open.clear()
        threading.Timer(seconds, self.open.set).start()
