"""The adapters that requests may name as their model, and how they come and go."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator

from scheduler.errors import ModelNotFoundError, UnknownAdapterError
from scheduler.request import Adapter, AdapterChange


class AdapterTable:
    """The adapters by name, and the samples that use each. On the asyncio loop.

    An adapter that leaves takes no new requests, and stays until the samples that use it have ended.
    """

    def __init__(self, adapters: Iterable[Adapter] = (), most: int = 0) -> None:
        """most: adapters that the executor can have loaded at a time."""
        self.most = most
        self._by_name = {adapter.name: adapter for adapter in adapters}
        self._leaving: set[str] = set()
        # By identity.
        self._used: Counter[int] = Counter()
        self._unused: dict[int, asyncio.Event] = {}

    @property
    def all(self) -> list[Adapter]:
        """By name, those that leave too."""
        return sorted(self._by_name.values())

    @property
    def names(self) -> list[str]:
        """Of those that take requests."""
        return sorted(self._by_name.keys() - self._leaving)

    def find(self, name: str) -> Adapter | None:
        """The adapter that requests by this name get; None for none, and for one that leaves."""
        return None if name in self._leaving else self._by_name.get(name)

    def is_leaving(self, adapter: Adapter) -> bool:
        return adapter.name in self._leaving

    def uses(self, adapter: Adapter) -> int:
        """Samples that use it."""
        return self._used[adapter.adapter_id]

    def replace(self, adapters: Iterable[Adapter]) -> None:
        """These are there now, and no others."""
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
        """It does not leave after all."""
        self._leaving.discard(adapter.name)

    def get(self, name: str) -> Adapter:
        """As `find`. Raises UnknownAdapterError."""
        adapter = self.find(name)
        if adapter is None:
            raise UnknownAdapterError(f"there is no adapter {name!r}", fields={"name": "names no loaded adapter"})
        return adapter

    def leave(self, name: str) -> Adapter:
        """No request gets it any more. Raises UnknownAdapterError."""
        adapter = self.get(name)
        self._leaving.add(name)
        return adapter

    @contextlib.contextmanager
    def using(self, adapter: Adapter | None, samples: int) -> Iterator[None]:
        """Around the samples of a request. Raises ModelNotFoundError where its adapter has gone meanwhile."""
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
        """Waits until no sample uses it."""
        while self._used[adapter.adapter_id]:
            await self._unused.setdefault(adapter.adapter_id, asyncio.Event()).wait()
