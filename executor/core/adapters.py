"""The adapters that sequences may use: loaded at the start, and at run time if a setting allows it."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import structlog

from executor.core.given_folders import folder_below
from executor.core.runner import Runner
from executor.errors import (
    AdapterError,
    AdapterExistsError,
    AdaptersFixedError,
    ModelError,
    TooManyAdaptersError,
    UnknownAdapterError,
)
from executor.models.adapters import CONFIG, WEIGHTS, Adapter, read_adapter
from executor.models.forward import Model
from protos.rpc.errors import InvalidField

MAX_NAME_BYTES = 256
# How long the device keeps an unloaded adapter: a step that was sent earlier may still name it.
KEEP_SECONDS = 5.0

log = structlog.get_logger()


@dataclass(frozen=True)
class LoadedAdapter:
    """An adapter under its name. path: its folder, as it was given."""

    name: str
    adapter_id: int
    rank: int
    path: str


class Adapters:
    """The loaded adapters by name. On the asyncio loop; two names with the same content share its memory."""

    def __init__(self, runner: Runner, *, folder: Path | None, most: int, largest_rank: int) -> None:
        """folder: where adapters to load at run time must lie; None allows none. most: adapters at a time."""
        self.most = most
        self._runner = runner
        self._folder = folder
        self._largest_rank = largest_rank
        self._by_name: dict[str, LoadedAdapter] = {}
        # The folder that each adapter was read from, by its id.
        self._folders: dict[int, Path] = {}
        # While this is held, no other adapter is loaded. Loads take turns, because files may be large.
        self.turn = asyncio.Lock()

    @property
    def loaded(self) -> list[LoadedAdapter]:
        """The loaded adapters, sorted by name."""
        return [adapter for _, adapter in sorted(self._by_name.items())]

    def load_given(self, given: Mapping[str, str], setting: str) -> None:
        """Loads what a setting names, before the executor serves. Raises ModelError, which names the setting."""
        for name, path in given.items():
            try:
                self._check(name)
                folder = Path(path).expanduser()
                self._put(name, path, folder, *self._prepare(folder))
            except (AdapterError, InvalidField, TooManyAdaptersError) as error:
                raise ModelError(f"{setting}: the adapter {name} cannot be loaded: {error}") from error

    async def load(self, name: str, path: str) -> LoadedAdapter:
        """Loads a folder under a name; an adapter that is already loaded under this name stays.

        Raises AdaptersFixedError, InvalidField, AdapterError, AdapterExistsError and TooManyAdaptersError.
        """
        if self._folder is None:
            raise AdaptersFixedError(
                "no adapters are loaded at run time here: KVKEEP_EXECUTOR_ADAPTER_DIR names a folder for them"
            )
        async with self.turn:
            self._check(name)
            folder = folder_below(self._folder, path, "KVKEEP_EXECUTOR_ADAPTER_DIR", (CONFIG, WEIGHTS))
            adapter, prepared = await asyncio.to_thread(self._prepare, folder)
            before = self._by_name.get(name)
            if before is not None and before.adapter_id != adapter.adapter_id:
                raise AdapterExistsError(
                    f"another adapter is loaded as {name}: unload it first",
                    fields={"name": "is that of another loaded adapter"},
                )
            return self._put(name, path, folder, adapter, prepared)

    def prepared_for(self, model: Model) -> dict[int, object]:
        """Returns the loaded adapters prepared for another model, by their ids; in any thread. Raises AdapterError."""
        found: dict[int, object] = {}
        for loaded in self.loaded:
            folder = self._folders.get(loaded.adapter_id)
            if folder is None:
                # The adapter has been unloaded since this loop began.
                continue
            adapter = read_adapter(folder, model.linears, self._largest_rank)
            if adapter.adapter_id != loaded.adapter_id:
                raise AdapterError(f"the files of the adapter {loaded.name} have changed since it was loaded")
            found[adapter.adapter_id] = model.forward.adapter(adapter.modules)
        return found

    async def unload(self, name: str, *, validate_only: bool = False) -> None:
        """Keeps new sequences from an adapter; frees its memory after KEEP_SECONDS and once its last sequence has left.

        validate_only: only raises, without unloading. Raises AdaptersFixedError and UnknownAdapterError.
        """
        if self._folder is None:
            raise AdaptersFixedError("no adapters are unloaded at run time here: KVKEEP_EXECUTOR_ADAPTER_DIR is empty")
        adapter = self._by_name.get(name)
        if adapter is None:
            raise UnknownAdapterError(f"no adapter is loaded as {name}", fields={"name": "names no loaded adapter"})
        if validate_only:
            return
        del self._by_name[name]
        log.info("adapter unloaded", name=name)
        asyncio.get_running_loop().call_later(KEEP_SECONDS, self._forget, adapter.adapter_id)

    def _forget(self, adapter_id: int) -> None:
        if all(adapter.adapter_id != adapter_id for adapter in self._by_name.values()):
            self._runner.adapters.pop(adapter_id, None)
            self._folders.pop(adapter_id, None)

    def _check(self, name: str) -> None:
        """Raises for a name that no adapter can have, and if there are too many adapters."""
        if not name or len(name.encode()) > MAX_NAME_BYTES or not name.isprintable() or "," in name:
            raise InvalidField("name", f"must have 1 to {MAX_NAME_BYTES} bytes that can be printed, and no comma")
        if name == self._runner.model.name:
            raise InvalidField("name", "is that of the model")
        if name not in self._by_name and len(self._by_name) >= self.most:
            raise TooManyAdaptersError(f"{self.most} adapters are loaded, which is the bound: unload some")

    def _prepare(self, folder: Path) -> tuple[Adapter, object]:
        model = self._runner.model
        adapter = read_adapter(folder, model.linears, self._largest_rank)
        return adapter, self._runner.adapters.get(adapter.adapter_id) or model.forward.adapter(adapter.modules)

    def _put(self, name: str, path: str, folder: Path, adapter: Adapter, prepared: object) -> LoadedAdapter:
        # Both at once, because `_forget` may have dropped an adapter with this content while it was prepared.
        self._folders[adapter.adapter_id] = folder
        self._runner.adapters.setdefault(adapter.adapter_id, prepared)
        if name not in self._by_name:
            self._by_name[name] = LoadedAdapter(name, adapter.adapter_id, adapter.rank, path)
            log.info("adapter loaded", name=name, rank=adapter.rank, modules=len(adapter.modules))
        return self._by_name[name]
