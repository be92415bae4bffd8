"""Other weights in place of an executor's, over a unix socket, with a cache manager that only takes notes."""

import asyncio
import contextlib
import json
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from executor.errors import WeightsFixedError
from executor.models.checkpoint import load_decoder
from executor.models.forward import Model
from executor.models.load import model_of
from executor.rpc.sessions import Sessions
from executor.rpc.weights import WeightUpdates
from protos.execution.v1 import execution_pb2 as pb
from protos.rpc.errors import from_rpc_error
from tests.support.adapters import save_adapter
from tests.support.patience import patience
from tests.unit.executor.running_stack import Stack, cannot_load, join, refused, running


def model_from(folder: Path, *, seed: int = 0) -> Model:
    """A model of a folder, in torch. seed: of noise on its weights; 0 for none."""
    module = load_decoder(str(folder), torch.float32)
    if seed:
        generator = torch.Generator().manual_seed(seed)
        for parameter in module.parameters():
            parameter.data += torch.randn(parameter.shape, generator=generator) * 0.2
    return model_of(module, "llama")


@pytest.fixture
async def stack(model_folder: Callable[[str], Path], tmp_path: Path) -> AsyncIterator[Stack]:
    """An executor whose folder has the weights 1 and 2, and those of another model."""
    start = model_folder("llama")

    def load(folder: Path | None) -> Model:
        if folder is None:
            return model_from(start)
        if folder.name == "other":
            return replace(model_from(start), vocab_size=5)
        return model_from(start, seed=int(folder.name)) if folder.name.isdigit() else cannot_load(folder)

    for name in ("1", "2", "other", "broken"):
        (tmp_path / "weights" / name).mkdir(parents=True)
        (tmp_path / "weights" / name / "config.json").write_text("{}")
    async with running(model_from(start), tmp_path, load=load) as stack:
        yield stack


async def called(call: Awaitable[Any]) -> Any:
    """Its answer. Raises RemoteError."""
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error


async def update(stack: Stack, version: str, path: str) -> int:
    request = pb.UpdateWeightsRequest(weight_version=version, path=path)
    return (await called(stack.stub.UpdateWeights(request, timeout=patience(60)))).other_blocks


async def version_of(stack: Stack) -> str:
    return (await stack.stub.GetExecutor(pb.GetExecutorRequest(), timeout=patience(5))).weight_version


def told(stack: Stack) -> list[str]:
    """The versions that the manager was told, without the digests of the files."""
    return [version.partition("@")[0] for version in stack.manager.weight_versions]


async def logprobs(stack: Stack) -> list[float]:
    """What the model says of a prompt."""
    async with stack.session() as stream:
        result = await stream.run(**join(1))
        return [*result.logprobs[0].top_token_ids, *result.logprobs[0].top_logprobs]


async def test_other_weights_answer_otherwise_and_those_of_the_start_as_before(stack: Stack) -> None:
    start = await logprobs(stack)
    assert await update(stack, "v1", "1") == 3
    first = await logprobs(stack)
    assert await version_of(stack) == "v1"
    assert await update(stack, "v2", "2") == 3
    second = await logprobs(stack)
    assert len({tuple(one) for one in (start, first, second)}) == 3
    await update(stack, "", "")
    assert await logprobs(stack) == start
    assert await version_of(stack) == ""
    assert told(stack) == ["v1", "v2", ""]


async def test_a_session_ends_and_no_sequence_outlives_it(stack: Stack) -> None:
    async with stack.session() as stream:
        await stream.run(**join(1))
        updating = asyncio.create_task(update(stack, "v1", "1"))
        with refused("UPDATING_WEIGHTS", code=grpc.StatusCode.UNAVAILABLE):
            await stream.read()
        await updating
    assert stack.runner.num_sequences == 0
    async with stack.session() as stream:
        assert (await stream.run(**join(1))).num_tokens


async def test_a_registration_says_the_version(stack: Stack) -> None:
    await update(stack, "v1", "1")
    stack.manager.restart()
    before = len(stack.manager.registrations)
    await stack.manager.until(lambda: len(stack.manager.registrations) > before)
    assert stack.manager.registrations[-1].weight_version == stack.manager.weight_versions[-1]
    assert told(stack) == ["v1"]


@pytest.mark.parametrize(
    ("version", "path", "reason", "field"),
    [
        ("v1", "nothing", "INVALID_WEIGHTS", "path"),
        ("v1", "..", "INVALID_FIELD", "path"),
        ("v1", "", "INVALID_FIELD", "path"),
        ("", "1", "INVALID_FIELD", "weight_version"),
        ("v" * 201, "1", "INVALID_FIELD", "weight_version"),
        ("a\nb", "1", "INVALID_FIELD", "weight_version"),
        ("v1", "other", "INVALID_WEIGHTS", "path"),
        ("v1", "broken", "INVALID_WEIGHTS", "path"),
    ],
)
async def test_bad_updates_change_nothing(stack: Stack, version: str, path: str, reason: str, field: str) -> None:
    before = await logprobs(stack)
    async with stack.session() as stream:
        await stream.run(**join(1))
        with refused(reason, field):
            await update(stack, version, path)
        # The session goes on.
        await stream.run()
    assert await logprobs(stack) == before
    assert (await version_of(stack), stack.manager.weight_versions) == ("", [])


async def test_weights_that_the_manager_does_not_learn_of_are_not_used(stack: Stack) -> None:
    before = await logprobs(stack)
    stack.manager.refuse_weights = 3
    with refused("UNEXPECTED"):
        await update(stack, "v1", "1")
    # It may have carried out the change that it seemed to refuse.
    assert told(stack) == ["v1", "", "", ""]
    assert (await logprobs(stack), await version_of(stack)) == (before, "")


async def test_weights_that_fail_in_place_leave_those_of_before(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    before = await logprobs(stack)

    def fail() -> None:
        # The manager is not to be reached either.
        stack.manager.refuse_weights = 2
        raise RuntimeError("no memory for graphs")

    with monkeypatch.context() as patched:
        patched.setattr(stack.runner, "warmup", fail)
        with refused("INVALID_WEIGHTS"):
            await update(stack, "v1", "1")
    assert told(stack) == ["v1", "", "", ""]
    stack.manager.restart()
    registered = len(stack.manager.registrations)
    await stack.manager.until(lambda: len(stack.manager.registrations) > registered)
    assert stack.manager.registrations[-1].weight_version == ""
    assert (await logprobs(stack), await version_of(stack)) == (before, "")


async def test_an_update_goes_on_when_its_caller_has_left(stack: Stack) -> None:
    call = stack.stub.UpdateWeights(pb.UpdateWeightsRequest(weight_version="v1", path="1"))
    async with asyncio.timeout(patience(20)):
        # A call that is cancelled before it is checked begins nothing.
        while not stack.servicer._weights._tasks:
            await asyncio.sleep(0)
    call.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await call
    await stack.manager.until(lambda: told(stack) == ["v1"])
    async with asyncio.timeout(patience(20)):
        while await version_of(stack) != "v1":
            await asyncio.sleep(0.01)


async def test_a_version_that_comes_again_with_other_content_has_other_keys(stack: Stack, tmp_path: Path) -> None:
    for content in (b"first", b"second", b"first"):
        (tmp_path / "weights" / "1" / "model.safetensors").write_bytes(content)
        await update(stack, "v1", "1")
    first, second, again = stack.manager.weight_versions
    assert first == again != second
    assert told(stack) == ["v1"] * 3
    assert await version_of(stack) == "v1"


@pytest.mark.parametrize("name", ["../2/model.safetensors", "/etc/passwd"])
async def test_an_index_that_names_files_elsewhere_is_refused(stack: Stack, tmp_path: Path, name: str) -> None:
    index = {"metadata": {}, "weight_map": {"a": name}}
    (tmp_path / "weights" / "1" / "model.safetensors.index.json").write_text(json.dumps(index))
    with refused("INVALID_FIELD", "path"):
        await update(stack, "v1", "1")
    (tmp_path / "weights" / "1" / "model.safetensors.index.json").write_text("[")
    with refused("INVALID_FIELD", "path"):
        await update(stack, "v1", "1")


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "config.json"])
async def test_a_link_to_a_file_elsewhere_is_refused(stack: Stack, tmp_path: Path, name: str) -> None:
    (tmp_path / "elsewhere").write_text("{}")
    link = tmp_path / "weights" / "1" / name
    link.unlink(missing_ok=True)
    link.symlink_to(tmp_path / "elsewhere")
    with refused("INVALID_FIELD", "path"):
        await update(stack, "v1", "1")


async def test_weights_that_were_refused_take_no_memory(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    await update(stack, "v1", "1")
    used = weakref.ref(stack.runner.model.forward)

    def fail() -> None:
        refs.append(weakref.ref(stack.runner.model.forward))
        raise RuntimeError("no memory for graphs")

    refs: list[weakref.ref[Any]] = []
    monkeypatch.setattr(stack.runner, "warmup", fail)
    with refused("INVALID_WEIGHTS"):
        await update(stack, "v2", "2")
    assert (used() is not None, [ref() for ref in refs]) == (True, [None])


async def test_adapters_stay(stack: Stack, model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    save_adapter(model_folder("llama"), tmp_path / "adapters" / "one", 1)
    adapter = (await called(stack.stub.LoadAdapter(pb.LoadAdapterRequest(name="a", path="one")))).adapter

    async def adapted() -> list[float]:
        async with stack.session() as stream:
            result = await stream.run(**join(1, adapter_id=adapter.adapter_id))
            return list(result.logprobs[0].top_logprobs)

    before = await adapted()
    await update(stack, "v1", "1")
    assert await adapted() not in (before, (await logprobs(stack))[2:])
    await update(stack, "", "")
    assert await adapted() == before
    (tmp_path / "adapters" / "one" / "adapter_config.json").unlink()
    with refused("INVALID_ADAPTER"):
        await update(stack, "v1", "1")
    assert await adapted() == before


async def test_an_executor_without_a_folder_keeps_its_weights(stack: Stack) -> None:
    sessions = Sessions(1, stack.leases, stack.worker)
    fixed = WeightUpdates(stack.worker, sessions, stack.client, stack.servicer._adapters, cannot_load, None)
    with pytest.raises(WeightsFixedError, match="KVKEEP_EXECUTOR_WEIGHTS_DIR"):
        await fixed.update("v1", "1")
