"""Adapters: a request names one as its model, and gets its output and its blocks only, whatever comes and goes."""

import asyncio
import json
from pathlib import Path

import openai
import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from protos.generation.v1 import generation_pb2 as pb
from protos.rpc.errors import ServiceError
from protos.rpc.guard import Guard
from protos.rpc.identity import Role
from tests.support.generation import Output, generate, generate_samples, greedy_request
from tests.support.keyring import Keyring
from tests.support.patience import patience
from tests.support.scheduler.fake_executor import FakeExecutor
from tests.support.scheduler.http import LEAST, ask, client, parent, serve
from tests.support.scheduler.stack import Stack, StackFactory, prompt_of, refusal, run


async def load(stack: Stack, name: str, path: str | None = None) -> int:
    """Loads an adapter; returns its identity."""
    request = pb.LoadAdapterRequest(name=name, path=path or f"folder of {name}")
    return (await stack.scheduler.service.admin.LoadAdapter(request)).adapter.adapter_id


async def unload(stack: Stack, name: str) -> int:
    """Unloads an adapter; returns how many samples still use it."""
    return (await stack.scheduler.service.admin.UnloadAdapter(pb.UnloadAdapterRequest(name=name))).running_requests


async def listed(stack: Stack) -> dict[str, tuple[int, bool]]:
    answer = await stack.scheduler.service.admin.ListAdapters(pb.ListAdaptersRequest(), None)
    return {one.adapter.name: (one.running_requests, one.leaving) for one in answer.adapters}


def asking(name: str, prompt: list[int], count: int = 8, **fields: object) -> pb.StreamGenerateRequest:
    return greedy_request(prompt, count, model=name, **fields)


async def test_the_same_prompt_under_adapters_and_alone_shares_no_blocks(stack: Stack) -> None:
    prompt, names = prompt_of(21), ["sql", "chat", ""]
    identities = {name: await load(stack, name) if name else 0 for name in names}
    outputs = await run(stack, *[asking(name, prompt) for name in names])
    expected = [stack.executor.expected(prompt, 8, adapter_id=identities[name]) for name in names]
    assert [output.token_ids for output in outputs] == expected
    assert len({tuple(output.token_ids) for output in outputs}) == 3
    assert [output.usage.cached_tokens for output in outputs] == [0, 0, 0]
    again = await run(stack, *[asking(name, prompt) for name in names])
    assert [output.token_ids for output in again] == expected
    assert [output.usage.cached_tokens for output in again] == [20, 20, 20]


async def test_samples_and_preempted_requests_keep_their_adapter(run_stack: StackFactory) -> None:
    async with run_stack(FakeExecutor(max_tokens=120)) as stack:
        names = ["sql", "chat", "", "sql"]
        identities = {name: await load(stack, name) if name else 0 for name in dict.fromkeys(names)}
        prompts = [prompt_of(20, seed) for seed in range(4)]
        outputs = await asyncio.gather(
            *[generate(stack.stub, asking(name, prompt, 40)) for name, prompt in zip(names, prompts, strict=True)]
        )
        assert [output.token_ids for output in outputs] == [
            stack.executor.expected(prompt, 40, adapter_id=identities[name])
            for name, prompt in zip(names, prompts, strict=True)
        ]
        assert sum(output.usage.preemptions for output in outputs) > 0
        samples = await generate_samples(stack.stub, asking("chat", prompts[0], 8, n=3))
        expected = stack.executor.expected(prompts[0], 8, adapter_id=identities["chat"])
        assert [sample.token_ids for sample in samples] == [expected] * 3


async def test_an_unknown_adapter_is_an_unknown_model(stack: Stack) -> None:
    await load(stack, "sql")
    error = await refusal(generate(stack.stub, asking("other", prompt_of(3))))
    assert (error.reason, list(error.fields)) == ("MODEL_NOT_FOUND", ["model"])
    assert error.message == "the models here are 'fake' and 'sql'"


async def test_an_adapter_that_is_unloaded_finishes_what_runs_and_takes_nothing_new(stack: Stack) -> None:
    first = await load(stack, "sql")
    prompt = prompt_of(20)
    stack.executor.gate.clear()
    running = asyncio.ensure_future(generate(stack.stub, asking("sql", prompt, 30)))
    async with asyncio.timeout(patience(20)):
        while (await listed(stack))["sql"] != (1, False):
            await asyncio.sleep(0.001)
    assert await unload(stack, "sql") == 1
    assert await listed(stack) == {"sql": (1, True)}
    assert (await refusal(generate(stack.stub, asking("sql", prompt)))).reason == "MODEL_NOT_FOUND"
    for call in (load(stack, "sql", "another folder"), unload(stack, "sql")):
        with pytest.raises(ServiceError) as caught:
            await call
        assert caught.value.reason in ("ADAPTER_LEAVES", "UNKNOWN_ADAPTER")
    stack.executor.gate.set()
    assert (await running).token_ids == stack.executor.expected(prompt, 30, adapter_id=first)
    async with asyncio.timeout(patience(20)):
        # The scheduler hears of it a moment after the executor has done it.
        while stack.executor.adapters or await listed(stack):
            await asyncio.sleep(0.001)
    assert await listed(stack) == {}
    second = await load(stack, "sql", "another folder")
    output = await generate(stack.stub, asking("sql", prompt))
    assert output.token_ids == stack.executor.expected(prompt, 8, adapter_id=second)
    assert output.usage.cached_tokens == 0, "blocks are found by the adapter's content and not by its name"


async def test_another_adapter_under_a_name_is_refused_and_the_same_one_is_there_already(stack: Stack) -> None:
    first = await load(stack, "sql")
    assert await load(stack, "sql") == first
    with pytest.raises(ServiceError) as caught:
        await load(stack, "sql", "another folder")
    assert (caught.value.reason, list(caught.value.fields)) == ("ADAPTER_EXISTS", ["name"])
    assert await unload(stack, "sql") == 0
    with pytest.raises(ServiceError) as caught:
        await unload(stack, "sql")
    assert caught.value.reason == "UNKNOWN_ADAPTER"


async def started(stack: Stack, requests: list[pb.StreamGenerateRequest]) -> list[asyncio.Task[Output]]:
    """Requests of which each has computed something."""
    futures = [asyncio.create_task(generate(stack.stub, request, patience(30))) for request in requests]
    await stack.executor.stepped(len(stack.executor.steps) + 5)
    return futures


async def test_requests_go_on_with_their_adapter_when_the_executor_starts_again(stack: Stack) -> None:
    identities = {"sql": await load(stack, "sql"), "": 0, "chat": await load(stack, "chat")}
    stack.executor.step_seconds = 0.002
    prompt = prompt_of(20)
    futures = await started(stack, [asking(name, prompt, 60) for name in identities])
    stack.executor.restart()
    stack.manager.register()
    for future, identity in zip(futures, identities.values(), strict=True):
        assert (await future).token_ids == stack.executor.expected(prompt, 60, adapter_id=identity)
    assert sorted(stack.executor.adapters) == ["chat", "sql"]


@pytest.mark.parametrize("change", ["another content", "no loading"])
async def test_requests_end_when_an_executor_that_starts_again_does_not_have_their_adapter(
    stack: Stack, change: str
) -> None:
    await load(stack, "sql")
    stack.executor.step_seconds = 0.002
    prompt = prompt_of(20)
    with_adapter, alone = await started(stack, [asking("sql", prompt, 60), asking("", prompt, 60)])
    if change == "another content":
        stack.executor.contents["folder of sql"] = 4711
    else:
        stack.executor.loads_adapters = False
    stack.executor.restart()
    stack.manager.register()
    assert (await refusal(with_adapter)).reason == "ADAPTER_LOST"
    assert (await alone).token_ids == stack.executor.expected(prompt, 60)
    assert list(await listed(stack)) == (["sql"] if change == "another content" else [])
    if change == "another content":
        output = await generate(stack.stub, asking("sql", prompt))
        assert output.token_ids == stack.executor.expected(prompt, 8, adapter_id=4711)
        assert output.usage.cached_tokens == 0


async def test_adapters_over_http(stack: Stack, address: str) -> None:
    async def post(path: str, **body: object) -> tuple[int, str]:
        answer = await ask(address, "POST", path, json.dumps(body))
        return answer.status, answer.body

    assert (await post("/v1/load_lora_adapter", lora_name="sql", lora_path="a")) == (
        200, "Success: the adapter 'sql' is loaded.",
    )  # fmt: skip
    async with client(address) as caller:
        models = [(model.id, parent(model)) async for model in caller.models.list()]
        assert models == [("fake", None), ("sql", "fake")]
        assert parent(await caller.models.retrieve("sql")) == "fake"
        answer = await caller.completions.create(model="sql", **LEAST)
        alone = await caller.completions.create(model="fake", **LEAST)
        assert (answer.model, alone.model) == ("sql", "fake")
        assert answer.choices[0].text != alone.choices[0].text
        status, _ = await post("/v1/unload_lora_adapter", lora_name="sql")
        assert status == 200
        with pytest.raises(openai.NotFoundError) as caught:
            await caller.completions.create(model="sql", **LEAST)
        assert caught.value.code == "model_not_found"


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "code"),
    [
        ("load", {"lora_name": "x"}, 400, "lora_path", "invalid_field"),
        ("load", {"lora_name": "x", "lora_path": "y", "load_inplace": True}, 400, "load_inplace", "invalid_field"),
        ("load", {"lora_name": "sql", "lora_path": "y"}, 409, "lora_name", "adapter_exists"),
        ("unload", {"lora_name": "x"}, 404, "lora_name", "unknown_adapter"),
        ("unload", {"lora_name": "x", "name": "x"}, 400, "name", "invalid_field"),
    ],
)
async def test_bad_bodies_over_http(
    stack: Stack, address: str, path: str, body: dict, status: int, param: str, code: str
) -> None:
    await load(stack, "sql")
    answer = await ask(address, "POST", f"/v1/{path}_lora_adapter", json.dumps(body))
    assert (answer.status, answer.error["param"], answer.error["code"]) == (status, param, code)


async def test_only_an_executor_that_allows_it_loads_at_run_time(stack: Stack, address: str) -> None:
    stack.executor.loads_adapters = False
    for path, body in (("load", {"lora_name": "x", "lora_path": "y"}), ("unload", {"lora_name": "x"})):
        answer = await ask(address, "POST", f"/v1/{path}_lora_adapter", json.dumps(body))
        assert answer.status in (400, 404)
    assert (await ask(address, "POST", "/v1/load_lora_adapter", '{"lora_name": "x", "lora_path": "y"}')).error[
        "code"
    ] == "adapters_fixed"


async def test_an_adapter_in_use_stays_where_the_executor_does_not_unload_it(stack: Stack, address: str) -> None:
    await load(stack, "sql")
    # The scheduler loads adapters again when it opens its session, which it has when a request has ended.
    assert (await generate(stack.stub, asking("sql", prompt_of(8)))).token_ids
    await stack.manager.released()
    stack.executor.loads_adapters = False
    stack.executor.gate.clear()
    running = asyncio.ensure_future(generate(stack.stub, asking("sql", prompt_of(8), 20)))
    await stack.manager.admitted(1)
    answer = await ask(address, "POST", "/v1/unload_lora_adapter", '{"lora_name": "sql"}')
    assert (answer.status, answer.error["code"]) == (400, "adapters_fixed")
    stack.executor.gate.set()
    await running
    assert (await generate(stack.stub, asking("sql", prompt_of(8)))).token_ids
    assert list(await listed(stack)) == ["sql"]


async def test_only_operators_of_all_tenants_load_and_unload(stack: Stack, keyring: Keyring, tmp_path: Path) -> None:
    roles = ((Role.CALLER, ""), (Role.VIEWER, ""), (Role.OPERATOR, "acme"), (Role.OPERATOR, ""))
    for role, tenant in roles:
        keyring.add(role, tenant)
    async with serve(stack.scheduler.service, guard=Guard(keyring.file, tmp_path / "audit")) as address:
        for token, expected in zip(keyring.tokens.values(), (403, 403, 403, 200), strict=True):
            headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}
            for path, body in (("load", {"lora_name": "x", "lora_path": "y"}), ("unload", {"lora_name": "x"})):
                answer = await ask(address, "POST", f"/v1/{path}_lora_adapter", json.dumps(body), headers)
                assert answer.status == expected, (path, token)
        again = await ask(address, "POST", "/v1/unload_lora_adapter", '{"lora_name": "x"}', headers)
        assert again.status == 404
        nobody = await ask(address, "POST", "/v1/unload_lora_adapter", '{"lora_name": "x"}')
        assert nobody.status == 401
    audited = [json.loads(line) for line in (tmp_path / "audit").read_text().splitlines()]
    assert {line["method"].rpartition("/")[2] for line in audited} == {"LoadAdapter", "UnloadAdapter"}
    # What the operator has done, too, and not only what others were refused.
    done = [line for line in audited if line["event"] == "audit"]
    assert [(line["method"].rpartition("/")[2], line["request"], line["outcome"]) for line in done] == [
        ("LoadAdapter", {"name": "x", "path": "y"}, "OK"),
        ("UnloadAdapter", {"name": "x"}, "OK"),
        ("UnloadAdapter", {"name": "x"}, "NOT_FOUND"),
    ]


async def test_endpoint_pickers_read_which_adapters_run_and_wait(run_stack: StackFactory) -> None:
    async with run_stack(vllm_metrics=True, max_running=2) as stack:
        for name in ("a", "b", "c"):
            await load(stack, name)
        stack.executor.gate.clear()
        futures = []
        for names, running, waiting in (("ba", "a,b", ""), ("c", "a,b", "c")):
            futures += [asyncio.ensure_future(generate(stack.stub, asking(name, prompt_of(8), 60))) for name in names]
            async with asyncio.timeout(patience(20)):
                while adapter_labels(stack) != {
                    "max_lora": "4", "running_lora_adapters": running, "waiting_lora_adapters": waiting,
                }:  # fmt: skip
                    await asyncio.sleep(0.001)
        stack.executor.gate.set()
        await asyncio.gather(*futures)


def adapter_labels(stack: Stack) -> dict[str, str]:
    text = generate_latest(stack.registry).decode()
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    [labels] = [sample.labels for sample in samples if sample.name == "vllm:lora_requests_info"]
    return labels
