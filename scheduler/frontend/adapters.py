"""The adapters that requests may name as their model, and how they come and go."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator

from scheduler.errors import ModelNotFoundError, UnknownAdapterError
from scheduler.request import Adapter, AdapterChange


class AdapterTable:
    """The adapters by name, and the samples that use each. On the asyncio loop; any thread may read `all`.

    A leaving adapter takes no new requests, and stays until the samples that use it have ended.
    """

    def __init__(self, adapters: Iterable[Adapter] = (), most: int = 0) -> None:
        """most: how many adapters the executor can have loaded at a time."""
        self.most = most
        self._by_name = {adapter.name: adapter for adapter in adapters}
        self._leaving: set[str] = set()
        # Numbers of samples by adapter_id.
        self._used: Counter[int] = Counter()
        self._unused: dict[int, asyncio.Event] = {}

    @property
    def all(self) -> list[Adapter]:
        """All adapters sorted by name, including those that leave."""
        return sorted(self._by_name.values())

    @property
    def names(self) -> list[str]:
        """Names of the adapters that take requests."""
        return sorted(self._by_name.keys() - self._leaving)

    def find(self, name: str) -> Adapter | None:
        """Returns the adapter that requests by this name get; None if there is none or it is leaving."""
        return None if name in self._leaving else self._by_name.get(name)

    def is_leaving(self, adapter: Adapter) -> bool:
        return adapter.name in self._leaving

    def uses(self, adapter: Adapter) -> int:
        """Returns the number of samples that use the adapter."""
        return self._used[adapter.adapter_id]

    def replace(self, adapters: Iterable[Adapter]) -> None:
        """Replaces all adapters."""
        self._by_name = {adapter.name: adapter for adapter in adapters}
        self._leaving.intersection_update(self._by_name)

    def change(self, changes: Iterable[AdapterChange]) -> None:
        for change in changes:
            if change.before is not None:
                self.remove(change.before)
            if change.now is not None:
                self.add(change.now)

    def add(self, adapter: Adapter) -> None:
        self._by_name[adapter.name] = adapter

    def remove(self, adapter: Adapter) -> None:
        if self._by_name.get(adapter.name) == adapter:
            del self._by_name[adapter.name]
            self._leaving.discard(adapter.name)

    def stay(self, adapter: Adapter) -> None:
        """Keeps an adapter that was to leave."""
        self._leaving.discard(adapter.name)

    def get(self, name: str) -> Adapter:
        """Like `find`, but raises UnknownAdapterError."""
        adapter = self.find(name)
        if adapter is None:
            raise UnknownAdapterError(f"there is no adapter {name!r}", fields={"name": "names no loaded adapter"})
        return adapter

    def leave(self, name: str) -> Adapter:
        """Makes an adapter leave: no new request gets it. Raises UnknownAdapterError."""
        adapter = self.get(name)
        self._leaving.add(name)
        return adapter

    @contextlib.contextmanager
    def using(self, adapter: Adapter | None, samples: int) -> Iterator[None]:
        """Surrounds a request's samples. Raises ModelNotFoundError if the adapter is unloaded, replaced or leaving."""
        if adapter is None:
            yield
            return
        if self.find(adapter.name) != adapter:
            raise ModelNotFoundError(
                f"the adapter {adapter.name!r} is no longer loaded", fields={"model": "is no longer loaded"}
            )
        self._used[adapter.adapter_id] += samples
        try:
            yield
        finally:
            self._used[adapter.adapter_id] -= samples
            if not self._used[adapter.adapter_id]:
                del self._used[adapter.adapter_id]
                if unused := self._unused.pop(adapter.adapter_id, None):
                    unused.set()

    async def unused(self, adapter: Adapter) -> None:
        """Waits until no sample uses the adapter."""
        while self._used[adapter.adapter_id]:
            await self._unused.setdefault(adapter.adapter_id, asyncio.Event()).wait()
