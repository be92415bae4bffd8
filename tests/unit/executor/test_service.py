"""The executor's service over a unix socket, with a cache manager that only takes notes."""

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
import torch
from supervisor import is_serving

from executor.core.adapters import Adapters
from executor.core.outbox import Outbox, Session
from executor.core.runner import LaunchedStep, Runner
from executor.core.worker import Worker
from executor.errors import AdaptersFixedError, ModelError, StoppingError, UpdatingWeightsError
from executor.models.adapters import Adapter
from executor.models.forward import Model
from executor.models.tokenizer import TokenizerFiles
from executor.rpc import service
from executor.rpc.convert import parse_step
from executor.rpc.service import ExecutorServicer
from executor.rpc.sessions import Sessions
from executor.rpc.weights import WeightUpdates
from executor.step import Step
from protos.execution.v1 import execution_pb2 as pb
from protos.rpc.errors import from_rpc_error
from protos.rpc.identity import Identity, PermissionDeniedError, Role, assume
from tests.support.adapters import save_adapter
from tests.support.patience import patience
from tests.unit.executor.conftest import BLOCK_SIZE
from tests.unit.executor.running_stack import (
    EPOCH,
    MAX_BATCHED_TOKENS,
    PROMPT,
    FakeManager,
    Stack,
    Stream,
    cannot_load,
    join,
    refused,
    running,
)


@pytest.fixture
async def stack(tiny: Model, tmp_path: Path) -> AsyncIterator[Stack]:
    async with running(tiny, tmp_path) as stack:
        yield stack


async def test_the_model_and_the_executor_describe_themselves(stack: Stack) -> None:
    model = await stack.stub.GetModel(pb.GetModelRequest(), timeout=patience(5))
    assert (model.vocab_size, model.max_positions, model.hub_id) == (97, 256, "owner/tiny")
    assert (model.dtype, model.kv_cache_dtype) == ("float32", "float32")
    assert (model.tokenizer_json, model.chat_template, dict(model.special_tokens)) == (
        b"{}",
        "template",
        {"bos_token": "<s>"},
    )
    executor = await stack.stub.GetExecutor(pb.GetExecutorRequest(), timeout=patience(5))
    assert (executor.executor_epoch, executor.device, executor.num_groups) == (EPOCH, "cpu", 1)
    assert (executor.block_size, executor.max_tokens) == (BLOCK_SIZE, 800)


async def test_another_tokenizer_or_generation_config_is_another_model(stack: Stack) -> None:
    """A scheduler knows by the digest alone that its description of the model holds no longer."""
    model, tokenizer = stack.runner.model, TokenizerFiles(b"{}", "template", {"bos_token": "<s>"})
    changed = [
        (model, tokenizer),
        (model, replace(tokenizer, json=b'{"version": "1.0"}')),
        (model, replace(tokenizer, chat_template="another")),
        (model, replace(tokenizer, special_tokens={"bos_token": "<bos>"})),
        (replace(model, eos_token_ids=(7,)), tokenizer),
        (replace(model, max_positions=128), tokenizer),
        (replace(model, name="another"), tokenizer),
    ]
    digests = set()
    for one, files in changed:
        stack.runner.model = one
        adapters = Adapters(stack.runner, folder=None, most=0, largest_rank=1)
        sessions = Sessions(EPOCH, stack.leases, stack.worker)
        servicer = ExecutorServicer(
            service.Identity("executor-0", EPOCH),
            stack.runner,
            stack.worker,
            files,
            stack.leases,
            adapters,
            sessions,
            WeightUpdates(stack.worker, sessions, stack.client, adapters, cannot_load, None),
        )
        digests.add((await servicer.GetExecutor(pb.GetExecutorRequest(), None)).model_digest)
    assert len(digests) == len(changed)


async def test_a_session_runs_steps_in_order(stack: Stack) -> None:
    async with stack.session() as stream:
        assert stream.opened == pb.SessionOpened(first_step=1)
        first = await stream.run(**join(1))
        assert (first.step, list(first.sequences), first.num_tokens) == (1, [1], len(PROMPT))
        assert first.logprobs[0].top_token_ids[0] == first.token_ids[0]
        assert first.compute_time.ToTimedelta().total_seconds() > 0
        # Several in flight, as the scheduler keeps them.
        await stream.send()
        await stream.send(removed_sequences=[1])
        second, third = (await stream.read()).result, (await stream.read()).result
        assert (second.step, list(second.sequences)) == (2, [1])
        assert (third.step, list(third.sequences)) == (3, [])
        assert (await stack.stub.GetExecutor(pb.GetExecutorRequest(), timeout=patience(5))).last_step == 3


async def test_a_gpu_announces_for_how_many_tokens_of_a_step_it_keeps_memory(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = replace(stack.runner.model, device=torch.device("cuda"))
    with monkeypatch.context() as patched:
        patched.setattr(stack.runner, "model", gpu)
        async with stack.session() as stream:
            assert stream.opened == pb.SessionOpened(first_step=1, max_batched_tokens=MAX_BATCHED_TOKENS)


async def test_answers_still_come_after_the_scheduler_has_said_everything(stack: Stack) -> None:
    async with stack.session() as stream:
        await stream.send(**join(1))
        await stream.send()
        await stream.call.done_writing()
        assert [(await stream.read()).result.step for _ in range(2)] == [1, 2]
        with pytest.raises(EOFError):
            await stream.read()


async def test_a_new_session_starts_empty_and_the_step_number_continues(stack: Stack) -> None:
    async with stack.session() as stream:
        await stream.run(**join(1))
    async with stack.session() as stream:
        assert stream.next_step == 2
        assert stack.runner.num_sequences == 0
        assert list((await stream.run(**join(1))).sequences) == [1]


async def test_a_newer_scheduler_ends_the_older_session(stack: Stack) -> None:
    async with stack.session(scheduler_epoch=1) as older:
        await older.run(**join(1))
        async with stack.session(scheduler_epoch=2) as newer:
            with refused("SESSION_REPLACED", code=grpc.StatusCode.ABORTED):
                await older.read()
            assert list((await newer.run(**join(1))).sequences) == [1]


async def test_an_epoch_of_the_far_future_keeps_no_scheduler_away(stack: Stack) -> None:
    with refused(field="open.scheduler_epoch", code=grpc.StatusCode.INVALID_ARGUMENT):
        await opened(stack, (1 << 64) - 1)
    # The clocks of two machines may differ.
    await opened(stack, time.time_ns() + 1_000_000_000)


async def test_another_scheduler_is_let_in_when_the_lease_of_the_one_before_has_ended(stack: Stack) -> None:
    stack.manager.scheduler_ids = ["s", "other"]
    await renewed(stack.manager)
    async with stack.session() as own:
        await own.run(**join(1))
        with refused("EXECUTOR_IN_USE", "open.scheduler_id", grpc.StatusCode.UNAVAILABLE):
            await opened(stack, 2, scheduler_id="other")
        assert list((await own.run()).sequences) == [1]
    # Nor while the first one opens its session again after a broken stream.
    with refused("EXECUTOR_IN_USE"):
        await opened(stack, 2, scheduler_id="other")
    async with stack.session() as own:
        stack.manager.scheduler_ids = ["other"]
        await renewed(stack.manager)
        async with stack.session(2, scheduler_id="other") as other:
            with refused("SESSION_REPLACED"):
                await own.read()
            assert list((await other.run(**join(1))).sequences) == [1]


async def test_another_scheduler_is_not_let_in_before_the_cache_manager_has_been_asked_about_the_one_before(
    stack: Stack,
) -> None:
    """The last answer is of a time at which it had not registered."""
    stack.manager.scheduler_ids = []
    await renewed(stack.manager)
    stack.manager.answers_renewals.clear()
    async with stack.session() as own:
        with refused("EXECUTOR_IN_USE", "open.scheduler_id", grpc.StatusCode.UNAVAILABLE):
            await opened(stack, 2, scheduler_id="other")
        assert list((await own.run(**join(1))).sequences) == [1]
        stack.manager.scheduler_ids = ["other"]
        stack.manager.answers_renewals.set()
        await renewed(stack.manager)
        await renewed(stack.manager)
        async with stack.session(2, scheduler_id="other"):
            with refused("SESSION_REPLACED"):
                await own.read()


async def test_a_token_that_is_bound_to_ids_opens_no_session_for_another(stack: Stack) -> None:
    async def opening(scheduler_id: str) -> AsyncIterator[pb.StreamStepsRequest]:
        session = pb.OpenSession(scheduler_id=scheduler_id, scheduler_epoch=1, executor_epoch=EPOCH)
        yield pb.StreamStepsRequest(open=session)

    assume(Identity("token", Role.SCHEDULER, ids=("s",)))
    with pytest.raises(PermissionDeniedError) as caught:
        await anext(stack.servicer.StreamSteps(opening("other"), None))
    assert list(caught.value.fields) == ["open.scheduler_id"]
    answers = stack.servicer.StreamSteps(opening("s"), None)
    assert (await anext(answers)).opened.first_step == 1
    await cast(AsyncGenerator[pb.StreamStepsResponse], answers).aclose()


async def opened(stack: Stack, *epochs: int, **changes: Any) -> None:
    """Opens a session and leaves it."""
    async with stack.session(*epochs, **changes):
        pass


async def renewed(manager: FakeManager) -> None:
    """Waits until the executor has the answer to a renewal that begins now."""
    begin = manager.renewals
    await manager.until(lambda: manager.renewals > begin + 1)


async def test_an_older_scheduler_and_a_wrong_epoch_are_refused_and_change_nothing(stack: Stack) -> None:
    async with stack.session(scheduler_epoch=5) as current:
        await current.run(**join(1))
        for epochs, reason in (((4, EPOCH), "STALE_SCHEDULER_EPOCH"), ((6, EPOCH + 1), "WRONG_EXECUTOR_EPOCH")):
            with refused(reason, code=grpc.StatusCode.FAILED_PRECONDITION):
                await opened(stack, *epochs)
        assert list((await current.run()).sequences) == [1]
        assert (await stack.stub.GetExecutor(pb.GetExecutorRequest(), timeout=patience(5))).scheduler_epoch == 5


async def test_a_session_must_be_opened_first(stack: Stack) -> None:
    call = stack.stub.StreamSteps()
    await call.write(pb.StreamStepsRequest(step=pb.Step(step=1)))
    with refused("SESSION_NOT_OPEN"):
        await Stream(call).read()


BAD = {
    "columns": ({"chunk_sequences": [1], "chunk_tokens": []}, "chunk_tokens"),
    "slots": ({"table_sequences": [1], "table_groups": [0], "table_counts": [2], "table_slots": [1]}, "table_slots"),
    "copies": ({"copy_tickets": [1], "copy_groups": [0], "copy_source_slots": [1]}, "copy_target_slots"),
    "twice": ({"chunk_sequences": [1, 1], "chunk_tokens": [1, 1]}, "chunk_sequences"),
    "sampling": (join(2, sampling=pb.SamplingParams(top_p=2)), "new_sequences.sampling.top_p"),
    "groups": (
        join(2, block_tables=[pb.StepBlockTable(group=1, slots=[1, 2])]),
        "new_sequences.block_tables.group",
    ),
    "unknown": ({"removed_sequences": [9]}, "removed_sequences"),
}


@pytest.mark.parametrize("name", BAD)
async def test_a_bad_step_ends_its_session_with_the_fields_name(name: str, stack: Stack) -> None:
    changes, field_name = BAD[name]
    code = grpc.StatusCode.FAILED_PRECONDITION if name == "unknown" else grpc.StatusCode.INVALID_ARGUMENT
    async with stack.session() as stream:
        await stream.run(**join(1))
        with refused(field=field_name, code=code):
            await stream.run(**changes)
    async with stack.session() as stream:
        assert list((await stream.run(**join(1))).sequences) == [1]


async def test_a_failing_model_ends_the_session_and_not_the_process(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stack.session() as stream:
        await stream.run(**join(1))
        with monkeypatch.context() as patch:
            # The device answers with an error, as it does when memory runs out.
            patch.setattr(torch.nn.functional, "embedding", lambda *_, **__: torch.empty(1, 2) @ torch.empty(1, 2))
            with refused("STEP_FAILED", code=grpc.StatusCode.INTERNAL):
                await stream.run()
    async with stack.session() as stream:
        assert list((await stream.run(**join(1))).sequences) == [1]


def without_cuda_memory(*_: object, **__: object) -> torch.Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")


def without_cpu_memory(*_: object, **__: object) -> torch.Tensor:
    return torch.empty(1 << 55)


@pytest.mark.parametrize("failing", [without_cuda_memory, without_cpu_memory])
async def test_a_session_that_ends_for_lack_of_memory_says_so(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, failing: Callable[..., torch.Tensor]
) -> None:
    async with stack.session() as stream:
        await stream.run(**join(1))
        with monkeypatch.context() as patch:
            patch.setattr(torch.nn.functional, "embedding", failing)
            with refused("OUT_OF_MEMORY", code=grpc.StatusCode.RESOURCE_EXHAUSTED):
                await stream.run()
    async with stack.session() as stream:
        assert list((await stream.run(**join(1))).sequences) == [1]


COPY = {"copy_groups": [0], "copy_source_slots": [100], "copy_target_slots": [101]}


def late_step(stack: Stack, number: int) -> Step:
    """With a copy of ticket 7."""
    return parse_step(pb.Step(step=number, copy_tickets=[7], **COPY), stack.runner.layout)


@dataclass
class Failed:
    """Keeps the tickets of failed copies."""

    tickets: list[int]

    def confirm(self, done: tuple[int, ...], failed: tuple[int, ...]) -> None:
        self.tickets.extend(failed)


async def test_stopping_ends_the_session_behind_the_steps_that_were_submitted(stack: Stack) -> None:
    told: list[Any] = []
    failed: list[int] = []
    # Not started before all is submitted.
    outbox = Outbox(Failed(failed), {})
    worker = Worker(Runner(stack.runner.model, stack.runner.pools, copy_ended=outbox.copy_ended), outbox, lambda: None)
    session = Session(told.append)
    worker.open(session)
    worker.submit(session, parse_step(pb.Step(step=1, **join(1)), stack.runner.layout))
    worker.submit(session, parse_step(pb.Step(step=2), stack.runner.layout))
    worker.close(session, StoppingError("the executor is stopping"))
    worker.submit(session, late_step(stack, 3))
    worker.start()
    await asyncio.to_thread(worker.stop)
    opened, first, second, error = told
    assert (opened, first.number, second.number, type(error)) == (1, 1, 2, StoppingError)
    assert failed == [7]
    assert worker.last_step == 2


async def test_one_that_stops_ends_its_session_and_opens_no_other(stack: Stack) -> None:
    async with stack.session() as stream:
        await stream.run(**join(1))
        stack.servicer.stop()
        with refused("STOPPING"):
            await stream.read()
    with refused("STOPPING"):
        await opened(stack, scheduler_epoch=2)


async def test_no_step_behind_the_end_of_a_session_runs_and_its_copies_are_given_up(stack: Stack) -> None:
    answers: list[object] = []
    session = Session(answers.append)
    stack.worker.open(session)
    stack.worker.close(session, StoppingError("over"))
    stack.worker.submit(session, late_step(stack, 1))
    await stack.manager.until(lambda: bool(stack.manager.confirmations))
    assert list(stack.manager.confirmations[0].failed_tickets) == [7]
    assert stack.runner.last_step == 0
    assert isinstance(answers[-1], StoppingError)


async def test_the_pools_are_announced_and_again_after_a_restart_with_their_last_writes(stack: Stack) -> None:
    manager = stack.manager
    await manager.until(lambda: bool(manager.registrations))
    first = manager.registrations[0]
    assert (first.executor_id, first.executor_epoch, first.block_size) == ("executor-0", EPOCH, BLOCK_SIZE)
    assert (first.pools[0].num_blocks, first.pools[0].num_layers, list(first.pools[0].last_write_steps)) == (200, 4, [])
    assert not first.pools[0].HasField("attention_window")
    async with stack.session() as stream:
        await stream.run(**join(0))
        manager.restart()
        await manager.until(lambda: len(manager.registrations) == 2)
        steps = list(manager.registrations[1].pools[0].last_write_steps)
        # Five tokens went to slots 1 and 2.
        assert steps == [1, 1] + [0] * 198
        assert list((await stream.run()).sequences) == [0]


async def test_blocks_are_asked_for_once_the_scheduler_of_the_session_has_registered(stack: Stack) -> None:
    manager = stack.manager
    # The scheduler registers long before this lease ends, so no session is cut off.
    manager.has_blocks, manager.lease = True, timedelta(minutes=10)
    await renewed(manager)
    async with stack.session(manager_epoch=manager.epoch) as stream:
        await stream.run(**join(0))
        manager.restart()
        await manager.until(lambda: len(manager.refused) > 1)
        assert {request.steps_manager_epoch for request in manager.refused} == {1}
        # Its steps go on meanwhile.
        assert list((await stream.run()).sequences) == [0]
        await stream.registered(manager.epoch)
        await manager.until(lambda: manager.known)
        assert manager.registrations[-1].steps_manager_epoch == manager.epoch == 2
        assert list((await stream.run()).sequences) == [0]


async def test_a_session_that_never_named_its_manager_counts_as_that_of_another(stack: Stack) -> None:
    stack.manager.has_blocks = True
    async with stack.session() as stream:
        await stream.run(**join(0))
        stack.manager.restart()
        await stack.manager.until(lambda: bool(stack.manager.refused))
        await stream.registered(stack.manager.epoch)
        await stack.manager.until(lambda: stack.manager.known)


async def test_a_scheduler_that_does_not_reach_the_manager_loses_its_session_after_a_lease(stack: Stack) -> None:
    manager = stack.manager
    manager.has_blocks = True
    async with stack.session(manager_epoch=manager.epoch) as stream:
        await stream.run(**join(0))
        manager.restart()
        with refused("SCHEDULER_LEFT", code=grpc.StatusCode.ABORTED):
            await stream.read()
    await manager.until(lambda: manager.known)
    assert manager.registrations[-1].steps_manager_epoch == 0
    assert {request.steps_manager_epoch for request in manager.refused} == {1}
    # Its next session has no earlier blocks.
    async with stack.session(manager_epoch=1) as stream:
        assert list((await stream.run(**join(0))).sequences) == [0]


async def test_sessions_are_refused_until_the_executor_has_registered(stack: Stack) -> None:
    sessions = stack.servicer._sessions
    async with stack.session(manager_epoch=1) as stream:
        await stream.run(**join(0))
        await sessions.cut_off()
        with refused("SCHEDULER_LEFT"):
            await stream.read()
    assert sessions.manager_epoch == 0
    await sessions.cut_off()
    with refused("SCHEDULER_LEFT"):
        await opened(stack, 1)
    # The second reason still holds when the first is over.
    updating = UpdatingWeightsError("the executor is about to compute with other weights")
    sessions.suspend(updating)
    sessions.admit_again()
    with refused("UPDATING_WEIGHTS"):
        await opened(stack, 1)
    sessions.resume(updating)
    await opened(stack, 1)


async def test_the_manager_of_a_session_counts_once_no_step_of_the_session_before_runs(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that still runs writes into blocks of the manager that its scheduler knew."""
    begun, go_on = threading.Event(), threading.Event()
    launch = stack.runner.launch

    def slow(step: Step) -> LaunchedStep:
        begun.set()
        assert go_on.wait(patience(20))
        return launch(step)

    sessions = stack.servicer._sessions
    async with stack.session(manager_epoch=1) as older:
        monkeypatch.setattr(stack.runner, "launch", slow)
        await older.send(**join(0))
        assert await asyncio.to_thread(begun.wait, patience(20))
        opening = asyncio.create_task(opened(stack, 1, manager_epoch=2))
        with refused("SESSION_REPLACED"):
            await older.read()
        assert sessions.manager_epoch == 1
        go_on.set()
        await opening
        async with asyncio.timeout(patience(20)):
            while sessions.manager_epoch != 2:
                await asyncio.sleep(0.001)


async def test_an_executor_does_not_serve_while_another_one_has_its_name(stack: Stack, tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/e.sock"

    async def until(serving: bool) -> None:
        async with asyncio.timeout(patience(20)):
            while await asyncio.to_thread(is_serving, address) is not serving:
                await asyncio.sleep(0.01)

    await until(True)
    stack.manager.replace()
    await until(False)
    stack.manager.replaced = False
    await until(True)


async def test_copies_are_confirmed_also_when_the_manager_is_away_for_a_moment(stack: Stack) -> None:
    manager = stack.manager
    manager.refuse_confirmations = 2
    async with stack.session() as stream:
        await stream.run(copy_tickets=[7], **COPY)
        await manager.until(lambda: bool(manager.confirmations))
        assert (list(manager.confirmations[0].tickets), manager.confirmations[0].step) == ([7], 1)
        with refused():
            await stream.run(copy_tickets=[8], removed_sequences=[99], **COPY)
        await manager.until(lambda: len(manager.confirmations) == 2)
        assert list(manager.confirmations[1].failed_tickets) == [8]
    async with stack.session() as stream:
        with refused():
            await stream.run(copy_tickets=[9])
        await manager.until(lambda: len(manager.confirmations) == 3)
        assert list(manager.confirmations[2].failed_tickets) == [9]


@pytest.fixture
async def adapters(model_folder: Callable[[str], Path], tmp_path: Path) -> Path:
    """The folder of adapters to load at run time, with three of different content."""
    for seed, name in enumerate(("one", "two", "three")):
        save_adapter(model_folder("llama"), tmp_path / "adapters" / name, seed)
    save_adapter(model_folder("llama"), tmp_path / "outside", 9)
    (tmp_path / "adapters" / "link").symlink_to(tmp_path / "outside")
    linked = tmp_path / "adapters" / "linked file"
    linked.mkdir()
    (linked / "adapter_config.json").write_text("{}")
    (linked / "adapter_model.safetensors").symlink_to(tmp_path / "outside" / "adapter_model.safetensors")
    return tmp_path / "adapters"


async def called(call: Awaitable[Any]) -> Any:
    """Its answer. Raises RemoteError."""
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error


async def test_adapters_come_and_go_at_run_time(stack: Stack, adapters: Path) -> None:
    async def load(name: str, path: str) -> pb.Adapter:
        return (await called(stack.stub.LoadAdapter(pb.LoadAdapterRequest(name=name, path=path)))).adapter

    one, two = await load("a", "one"), await load("b", str(adapters / "two"))
    assert one.adapter_id != two.adapter_id
    assert one == pb.Adapter(name="a", adapter_id=one.adapter_id, rank=8, path="one")
    assert await load("a", str(adapters / "one")) == one
    described = await stack.stub.GetExecutor(pb.GetExecutorRequest(), timeout=patience(5))
    assert (list(described.adapters), described.max_adapters) == ([one, two], 2)
    async with stack.session() as stream:
        tokens = [(await stream.run(**join(1))).token_ids[0]]
        tokens += [
            (await stream.run(**join(2 + n, adapter_id=a.adapter_id))).token_ids[-1] for n, a in enumerate((one, two))
        ]
    assert len(set(tokens)) == 3
    with refused("ADAPTER_EXISTS", "name"):
        await load("a", "three")
    with refused("TOO_MANY_ADAPTERS"):
        await load("c", "three")
    await called(stack.stub.UnloadAdapter(pb.UnloadAdapterRequest(name="a")))
    with refused("UNKNOWN_ADAPTER", "name"):
        await called(stack.stub.UnloadAdapter(pb.UnloadAdapterRequest(name="a")))
    assert (await load("a", "three")).adapter_id not in (one.adapter_id, two.adapter_id)


async def test_an_adapter_that_is_loaded_while_it_is_forgotten_stays_with_other_weights(
    stack: Stack, adapters: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = stack.servicer._adapters
    loaded = await held.load("a", "one")
    await held.unload("a")
    prepare = held._prepare

    def forgotten_meanwhile(folder: Path) -> tuple[Adapter, object]:
        prepared = prepare(folder)
        held._forget(loaded.adapter_id)
        return prepared

    monkeypatch.setattr(held, "_prepare", forgotten_meanwhile)
    await held.load("b", "one")
    assert list(held.prepared_for(stack.runner.model)) == list(stack.runner.adapters) == [loaded.adapter_id]


@pytest.mark.parametrize(
    "path", ["", ".", "..", "../outside", "/etc", "link", "linked file", "one/../../outside", "one\0"]
)
async def test_adapters_are_loaded_from_below_their_folder_only(stack: Stack, adapters: Path, path: str) -> None:
    with refused("INVALID_FIELD", "path"):
        await called(stack.stub.LoadAdapter(pb.LoadAdapterRequest(name="a", path=path)))


@pytest.mark.parametrize("name", ["", "a,b", "a\nb", "x" * 257, "llama"])
async def test_names_of_adapters_can_be_labels_and_are_not_the_models(stack: Stack, adapters: Path, name: str) -> None:
    name = stack.runner.model.name if name == "llama" else name
    with refused("INVALID_FIELD", "name"):
        await called(stack.stub.LoadAdapter(pb.LoadAdapterRequest(name=name, path="one")))


async def test_an_executor_without_a_folder_loads_what_its_settings_name_alone(stack: Stack, adapters: Path) -> None:
    fixed = Adapters(stack.runner, folder=None, most=2, largest_rank=8)
    fixed.load_given({"a": str(adapters / "one")}, "KVKEEP_EXECUTOR_ADAPTERS")
    assert [adapter.name for adapter in fixed.loaded] == ["a"]
    for call in (fixed.load("b", "two"), fixed.unload("a")):
        with pytest.raises(AdaptersFixedError, match="KVKEEP_EXECUTOR_ADAPTER_DIR"):
            await call
    narrow = Adapters(stack.runner, folder=None, most=2, largest_rank=4)
    with pytest.raises(ModelError, match=r"KVKEEP_EXECUTOR_ADAPTERS: the adapter a cannot be loaded: .* r is 8"):
        narrow.load_given({"a": str(adapters / "one")}, "KVKEEP_EXECUTOR_ADAPTERS")
