"""Replaces the executor's weights while a model is trained: loads them beside running steps, then swaps them.

No step is computed from the time when the cache manager learns the new version until the weights are in place. So a
block has the key of the weights that it was computed with. The manager is told the version with a digest of
the files, because a version may return with different content.
"""

import asyncio
import json
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import structlog
import torch

from executor.core.adapters import Adapters
from executor.core.given_folders import folder_below
from executor.core.worker import Worker
from executor.errors import ModelError, UpdatingWeightsError, WeightsError, WeightsFixedError, first_line
from executor.models.fingerprint import weights_digest
from executor.models.forward import Model
from executor.models.load import release_unused_memory
from executor.rpc.manager_client import ManagerClient
from executor.rpc.sessions import Sessions
from protos.rpc.errors import InvalidField, PassedOnError, RemoteError

SETTING = "KVKEEP_EXECUTOR_WEIGHTS_DIR"
# The manager takes 256 bytes, including the digest.
MAX_VERSION_BYTES = 200
_DIGEST_BYTES = 8
# The files that are read from a folder.
_FILES = ("config.json", "*.json", "*.safetensors", "*.bin")

log = structlog.get_logger()


class WeightUpdates:
    """The version of the weights, and updates of them. On the asyncio loop; one update at a time."""

    def __init__(
        self,
        worker: Worker,
        sessions: Sessions,
        client: ManagerClient,
        adapters: Adapters,
        load: Callable[[Path | None], Model],
        folder: Path | None,
    ) -> None:
        """load: loads a model from a folder, None for that of the start; called in any thread, raises ModelError.

        folder: where weights must lie; None allows no updates.
        """
        self.version = self.path = ""
        # The version by which the manager knows the weights.
        self._key_version = ""
        self._worker = worker
        self._sessions = sessions
        self._client = client
        self._adapters = adapters
        self._load = load
        self._folder = folder
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[int]] = set()

    async def update(self, version: str, path: str) -> int:
        """Computes with the weights of a folder from now on; returns how many cached blocks are of other weights.

        version, path: both empty for the weights of the start. An update goes on if its caller disconnects. Raises
        WeightsFixedError, InvalidField, WeightsError, AdapterError and PassedOnError; then the previous weights stay.
        """
        if self._folder is None:
            raise WeightsFixedError(f"no other weights are loaded at run time here: {SETTING} names a folder for them")
        _check(version, path)
        folder = folder_below(self._folder, path, SETTING, _FILES) if path else None
        if folder is not None:
            await asyncio.to_thread(_check_indices, folder)
        task = asyncio.create_task(self._update(version, path, folder))
        # asyncio keeps only a weak reference to a task, and the caller may leave.
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def _ended(self, task: asyncio.Task[int]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("the weights are not updated", cause=str(error))

    async def _update(self, version: str, path: str, folder: Path | None) -> int:
        async with self._turn, self._adapters.turn:
            try:
                return await self._replace(version, path, folder)
            except Exception as error:
                _clear_frames(error)
                raise
            finally:
                # The memory of the previous weights, or of refused weights.
                await asyncio.to_thread(release_unused_memory)

    async def _replace(self, version: str, path: str, folder: Path | None) -> int:
        begun = time.monotonic()
        model, adapters = await asyncio.to_thread(self._prepare, folder)
        digest = b"" if folder is None else await asyncio.to_thread(weights_digest, folder)
        key_version = f"{version}@{digest[:_DIGEST_BYTES].hex()}" if digest else version
        loaded = time.monotonic()
        obstacle = UpdatingWeightsError("the executor is about to compute with other weights")
        if (session := self._sessions.suspend(obstacle)) is not None:
            session.end(obstacle)
        try:
            others = await self._put_in_place(key_version, model, adapters)
            self.version, self.path, self._key_version = version, path, key_version
        finally:
            self._sessions.resume(obstacle)
        log.info(
            "computing with other weights",
            weight_version=version,
            other_blocks=others,
            seconds_to_load=round(loaded - begun, 1),
            seconds_without_steps=round(time.monotonic() - loaded, 3),
        )
        return others

    def _prepare(self, folder: Path | None) -> tuple[Model, dict[int, object]]:
        now = self._worker.runner.model
        try:
            model = self._load(folder)
        except ModelError as error:
            raise WeightsError(str(error), fields={"path": "has no weights that can be used here"}) from error
        if other := _difference(now, model):
            raise WeightsError(
                f"the weights are those of another model: it has {other}",
                fields={"path": "has the weights of another model"},
            )
        return model, self._adapters.prepared_for(model)

    async def _put_in_place(self, key_version: str, model: Model, adapters: Mapping[int, Any]) -> int:
        try:
            others = await self._client.update_weights(key_version)
        except RemoteError as error:
            raise PassedOnError(error) from error
        try:
            # Some adapters may have been unloaded since they were prepared.
            loaded = {one.adapter_id for one in self._adapters.loaded}
            kept = {adapter_id: adapter for adapter_id, adapter in adapters.items() if adapter_id in loaded}
            await asyncio.wrap_future(self._worker.use(model.forward, kept))
        except Exception as error:
            await self._client.take_weights_back(self._key_version)
            raise WeightsError(f"the weights cannot be put in place: {first_line(error)}") from error
        return others


def _clear_frames(error: BaseException | None) -> None:
    """Releases refused weights, which the frames of the error still hold."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _check(version: str, path: str) -> None:
    if len(version.encode()) > MAX_VERSION_BYTES or not version.isprintable():
        raise InvalidField("weight_version", f"must have at most {MAX_VERSION_BYTES} bytes that can be printed")
    if bool(version) != bool(path):
        raise InvalidField("path" if version else "weight_version", "must be given unless both are empty")


def _check_indices(folder: Path) -> None:
    """Checks that an index only names files beside it. Raises InvalidField."""
    for index in folder.glob("*.index.json"):
        try:
            names = set(json.loads(index.read_text())["weight_map"].values())
            is_plain = all(isinstance(name, str) and name == Path(name).name for name in names)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise InvalidField("path", f"has an index of weights that cannot be read: {index.name}") from None
        if not is_plain:
            raise InvalidField("path", f"has an index that names files elsewhere: {index.name}")


def _difference(now: Model, new: Model) -> str:
    """Returns the first difference that keeps a new model from replacing the present model; empty for none."""
    same_rotary = (now.rotary is None) == (new.rotary is None)
    if same_rotary and now.rotary is not None and new.rotary is not None:
        same_rotary = torch.equal(now.rotary, new.rotary)
    compared = {
        "other layers": now.groups == new.groups,
        "another vocabulary": now.vocab_size == new.vocab_size,
        "another number of positions": now.max_positions == new.max_positions,
        "weights of another type": now.dtype == new.dtype,
        "other matrices": now.linears == new.linears,
        "other rotary embeddings": same_rotary,
        "another way to be computed": type(now.forward) is type(new.forward),
    }
    return next((what for what, is_same in compared.items() if not is_same), "")
