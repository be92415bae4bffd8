"""The HTTP API between two fakes: its work before a request runs, and its answers when the request cannot run."""

import asyncio
import contextlib
import json
import tracemalloc
from pathlib import Path

import openai
import pytest
from prometheus_client import CollectorRegistry

from protos.rpc import files
from protos.rpc.addresses import AddressError
from protos.rpc.guard import Guard
from protos.rpc.http_server import HttpServer
from protos.rpc.identity import Role
from scheduler.frontend.openai.app import create_app
from scheduler.frontend.openai.response_builder import CompletionResponseBuilder
from tests.support.keyring import Keyring
from tests.support.scheduler.http import HELLO, LEAST, ask, client, first_event, serve, starting_service
from tests.support.scheduler.stack import Stack, StackFactory


async def test_an_unknown_caller_gets_only_health_and_version(stack: Stack, keyring: Keyring) -> None:
    keyring.add(Role.CALLER)
    (token,) = keyring.tokens.values()
    async with serve(stack.scheduler.service, guard=Guard(keyring.file, None)) as address:
        for method, path, body in (
            ("GET", "/v1/models", None),
            ("GET", "/v1/models/fake", None),
            ("POST", "/v1/completions", json.dumps(LEAST)),
            ("POST", "/v1/chat/completions", "{}"),
            ("POST", "/tokenize", '{"prompt": "x"}'),
            ("POST", "/detokenize", '{"tokens": [1]}'),
        ):
            answer = await ask(address, method, path, body)
            assert (answer.status, answer.error["type"]) == (401, "authentication_error"), path
        assert stack.manager.admitted_ids == []
        for path in ("/health", "/version", "/metrics"):
            assert (await ask(address, "GET", path)).status == 200
        async with client(address, "stranger") as stranger, client(address, token) as friend:
            with pytest.raises(openai.AuthenticationError):
                await stranger.completions.create(model="fake", **LEAST)
            assert (await friend.completions.create(model="fake", **LEAST)).choices[0].text


async def test_roles_and_tenants_hold_as_over_grpc(stack: Stack, keyring: Keyring, tmp_path: Path) -> None:
    for role, tenant in ((Role.CALLER, "acme"), (Role.CALLER, "other"), (Role.VIEWER, "")):
        keyring.add(role, tenant)
    acme, other, viewer = keyring.tokens.values()
    async with (
        serve(stack.scheduler.service, guard=Guard(keyring.file, tmp_path / "audit")) as address,
        client(address, acme) as first,
        client(address, other) as second,
        client(address, viewer) as watcher,
    ):
        assert [model.id async for model in watcher.models.list()] == ["fake"]
        with pytest.raises(openai.PermissionDeniedError):
            await watcher.completions.create(model="fake", **LEAST)
        denied = json.loads((tmp_path / "audit").read_text().splitlines()[-1])
        assert (denied["role"], denied["outcome"]) == ("viewer", "PERMISSION_DENIED")
        for caller in (first, second):
            await caller.completions.create(model="fake", extra_body={"cache_salt": "x"}, **LEAST)
        assert [(one.salt, one.tenant_id) for one in stack.manager.admissions] == [
            ("acme/x", "acme"),
            ("other/x", "other"),
        ]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_salt_that_the_token_does_not_have_is_refused_and_written_down(
    stack: Stack, keyring: Keyring, tmp_path: Path, stream: bool
) -> None:
    keyring.add(Role.CALLER, "acme", salts=("own",))
    (token,) = keyring.tokens.values()
    guard = Guard(keyring.file, tmp_path / "audit")
    async with serve(stack.scheduler.service, guard=guard) as address, client(address, token) as caller:
        with pytest.raises(openai.PermissionDeniedError) as caught:
            await caller.completions.create(model="fake", stream=stream, extra_body={"cache_salt": "x"}, **LEAST)
        assert caught.value.param == "cache_salt"
        (line,) = (tmp_path / "audit").read_text().splitlines()
        denied = json.loads(line)
        assert (denied["tenant"], denied["outcome"]) == ("acme", "PERMISSION_DENIED")
        assert denied["method"] == "generation.v1.GenerationService/StreamGenerate"
        assert denied["peer"].startswith("127.0.0.1:")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_ends_with_its_token(
    stack: Stack, keyring: Keyring, tmp_path: Path, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_LOOK_SECONDS", 0.0)
    monkeypatch.setattr("protos.rpc.guard.LOOK_SECONDS", 0.01)
    keyring.add(Role.CALLER)
    (token,) = keyring.tokens.values()
    guard = Guard(keyring.file, tmp_path / "audit")
    async with serve(stack.scheduler.service, guard=guard) as address, client(address, token) as caller:
        stack.executor.step_seconds = 0.02
        long = LEAST | {"max_tokens": 300}
        call = asyncio.create_task(caller.completions.create(model="fake", stream=stream, **long))
        while not stack.manager.live:
            await asyncio.sleep(0.01)
        keyring.file.write_text("")
        with pytest.raises(openai.APIError) as caught:
            [event async for event in await call]
        assert isinstance(caught.value.body, dict)
        assert caught.value.body["type"] == "authentication_error"
        assert json.loads((tmp_path / "audit").read_text())["outcome"] == "UNAUTHENTICATED"
        while stack.manager.live:
            await asyncio.sleep(0.01)
        assert stack.metric("output_tokens_total") < 200


async def test_a_head_request_gets_the_head(address: str) -> None:
    for path in ("/health", "/v1/models"):
        whole, head = [await ask(address, method, path) for method in ("GET", "HEAD")]
        assert (head.status, head.body, head.headers["content-length"]) == (
            200, "", whole.headers["content-length"],
        )  # fmt: skip


async def test_bodies_that_are_no_requests_are_refused(stack: Stack, address: str) -> None:
    path = "/v1/completions"
    for body, said in {
        "": "JSON object",
        "[]": "JSON object",
        '"x"': "JSON object",
        "{": "not JSON",
        "\xff": "the body cannot be taken: the text is not UTF-8",
        "[" * 20_000: "nested too deeply",
        '{"prompt": "\\ud800"}': "surrogate",
        '{"prompt": "x", "temperature": NaN}': "temperature must be a finite number",
        '{"prompt": "x", "n": 1' + "0" * 4000 + "}": "n must be less than",
        '{"prompt": "x", "n": 1' + "0" * 5000 + "}": "a number has too many digits",
        json.dumps({f"x{index}": 1 for index in range(300)}): "the body has more than 256 fields",
        '{"prompt": "x", "kv_hints": {"actions": [{"action_id": "a", "action_type": "b", "payload": '
        + '{"a":' * 110 + "1" + "}" * 111 + "]}}": "kv_hints.actions[0].payload.a.a",
        '{"prompt": "x", "kv_hints": {"actions": [{"action_id": "a", "action_type": "b", "payload": '
        '{"\\ud800": 1}}]}}': "kv_hints.actions[0].payload must not have an unpaired surrogate in",
        '{"prompt": "x", "kv_hints": {"actions": [{"action_id": "a", "action_type": "b", "payload": '
        '{"p": [1e999]}}]}}': "kv_hints.actions[0].payload.p[0] must be a finite number",
        '{"prompt": "x", "\\ud800": 1}': "unpaired surrogate in the name of its field 1",
        '{"prompt": ["x", "\\ud800"]}': "prompt[1] must not have an unpaired surrogate",
    }.items():  # fmt: skip
        answer = await ask(address, "POST", path, body.encode("latin-1"))
        assert answer.status == 400, body[:50]
        assert said in answer.error["message"], body[:50]
    # What a page of another site can send without asking.
    plain = await ask(address, "POST", path, json.dumps(LEAST), {"Content-Type": "text/plain"})
    assert (plain.status, plain.error["code"]) == (400, "invalid_body")
    assert stack.manager.admitted_ids == []
    assert (await ask(address, "GET", path)).error["code"] == "method_not_allowed"
    assert (await ask(address, "GET", "/v2")).status == 404


async def test_a_body_that_is_too_long_is_not_read(run_stack: StackFactory) -> None:
    async with run_stack() as stack, serve(stack.scheduler.service, max_prompt_bytes=10) as address:
        fits, beyond = 66_000, 67_000
        whole = await ask(address, "POST", "/v1/completions", b" " * beyond)
        assert (whole.status, whole.error["code"]) == (413, "request_entity_too_large")
        parts = await ask(address, "POST", "/v1/completions", (b" " * 1000 for _ in range(beyond // 1000)))
        assert parts.status == 413
        assert "not JSON" in (await ask(address, "POST", "/v1/completions", b" " * (fits - 1000))).error["message"]


async def test_a_defect_in_a_stream_is_its_last_event(
    run_stack: StackFactory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with run_stack() as stack, serve(stack.scheduler.service) as address:
        stack.executor.step_seconds = 0.02
        reader, writer = await asyncio.open_connection(*address.split(":"))
        with contextlib.closing(writer):
            await first_event(reader, writer)
            monkeypatch.setattr(CompletionResponseBuilder, "chunk", lambda *_, **__: 1 / 0)
            rest = (await reader.read()).decode()
    assert '"code":"unexpected"' in rest.split("data: ")[-1]
    assert "[DONE]" not in rest
    assert "ZeroDivisionError" in caplog.text


async def test_a_stream_ends_with_an_error_when_the_process_does_not_wait_for_it(run_stack: StackFactory) -> None:
    async with run_stack() as stack:
        app = create_app(stack.scheduler.service, max_prompt_bytes=1000, registry=CollectorRegistry())
        server = HttpServer(app, "127.0.0.1:0")
        await server.start()
        stack.executor.step_seconds = 0.02
        reader, writer = await asyncio.open_connection(*server.address.split(":"))
        with contextlib.closing(writer):
            await first_event(reader, writer)
            await server.stop(hurried=True)
            rest = (await reader.read()).decode()
    assert '"code":"draining"' in rest.split("data: ")[-1]
    assert "[DONE]" not in rest


async def test_a_foreign_host_name_is_not_answered() -> None:
    async with serve(starting_service(), own_names=True) as address:
        for host, status in {
            address: 200, "localhost": 200, "LOCALHOST:1": 200, "[::1]:8000": 200,
            "evil.example": 400, "localhost.evil.example:80": 400, "[evil": 400, "": 400,
        }.items():  # fmt: skip
            answer = await ask(address, "GET", "/version", headers={"Host": host})
            assert answer.status == status, host
            assert status == 200 or "Host header" in answer.body


@pytest.mark.parametrize("stream", [False, True])
async def test_several_prompts_are_answered_by_their_numbers(caller: openai.AsyncOpenAI, stream: bool) -> None:
    prompts = [[1, 2, 3], [4] * 9, [5, 6]]
    asked = LEAST | {"prompt": prompts, "n": 2, "stream": stream}
    if stream:
        asked["stream_options"] = {"include_usage": True}
    answers = [await caller.completions.create(model="fake", **asked)]
    events = [event async for event in answers[0]] if stream else answers
    texts = [""] * 6
    for event in events:
        for choice in event.choices:
            texts[choice.index] += choice.text
    alone = [await caller.completions.create(model="fake", **LEAST | {"prompt": prompt}) for prompt in prompts]
    assert texts == [one.choices[0].text for one in alone for _ in range(2)]
    usage = events[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (14, 18)


@pytest.mark.parametrize("stream", [False, True])
async def test_more_samples_of_all_prompts_than_may_wait_are_refused_before_any_begins(
    run_stack: StackFactory, stream: bool
) -> None:
    async with run_stack(max_waiting=16) as stack, serve(stack.scheduler.service) as address:
        body = LEAST | {"prompt": [[1]] * 9, "n": 2, "stream": stream, "model": "fake"}
        refused = await ask(address, "POST", "/v1/completions", json.dumps(body))
        assert refused.status == 400
        error = json.loads(refused.body)["error"]
        assert (error["param"], "9 prompts with 2 samples each" in error["message"]) == ("prompt", True)
        assert stack.executor.steps == []
        body["prompt"] = [[1]] * 8
        assert (await ask(address, "POST", "/v1/completions", json.dumps(body))).status == 200


@pytest.mark.parametrize("include_usage", [False, True])
async def test_each_event_has_the_usage_so_far_where_it_is_asked_for(
    run_stack: StackFactory, include_usage: bool
) -> None:
    options = {"continuous_usage_stats": True, "include_usage": include_usage}
    async with run_stack() as stack, serve(stack.scheduler.service) as address, client(address) as caller:
        stack.executor.step_seconds = 0.01
        asked = LEAST | {"prompt": [[1, 2, 3], [4] * 9], "max_tokens": 5, "stream": True, "stream_options": options}
        events = [event async for event in await caller.completions.create(model="fake", **asked)]
    usages = [event.usage for event in events]
    counts = [usage.completion_tokens for usage in usages]
    assert counts == sorted(counts)
    assert 0 < counts[0] < counts[-1] == 10
    assert {usage.prompt_tokens for usage in usages} <= {3, 9, 12}
    assert (usages[-1].prompt_tokens, usages[-1].total_tokens) == (12, 22)
    assert (events[-1].choices == []) == include_usage


async def test_tokens_come_with_their_names_where_they_are_asked_for(address: str) -> None:
    for asked in (False, True):
        body = json.dumps({"prompt": "the cat", "return_token_strs": asked})
        answer = json.loads((await ask(address, "POST", "/tokenize", body)).body)
        assert ("token_strs" in answer) == asked
    assert len(answer["token_strs"]) == answer["count"]
    assert "cat" in "".join(answer["token_strs"])


@pytest.mark.parametrize(
    ("path", "said"), [("/v1/completions", {"prompt": [[1, 2]] * 2}), ("/v1/chat/completions", {"messages": [HELLO]})]
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_number_of_samples_that_is_refused_takes_no_memory(
    address: str, path: str, said: dict[str, object], stream: bool
) -> None:
    body = said | {"n": 200_000, "stream": stream}
    tracemalloc.start()
    try:
        answer = await ask(address, "POST", path, json.dumps(body))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (answer.status, answer.error["param"]) == (400, "n")
    assert peak_bytes < 4 << 20


@pytest.mark.parametrize("stream", [False, True])
async def test_a_refused_prompt_of_several_ends_all_and_is_named(stack: Stack, address: str, stream: bool) -> None:
    body = LEAST | {"prompt": [[1, 2], [3] * 400, [4]], "max_tokens": 300, "stream": stream}
    answer = await ask(address, "POST", "/v1/completions", json.dumps(body))
    assert (answer.status, answer.error["param"]) == (400, "prompt[1]")
    assert answer.error["code"] == "context_length_exceeded"
    await stack.manager.unused()


async def test_an_address_that_is_taken_is_named() -> None:
    async with serve(starting_service()) as address:
        with pytest.raises(AddressError, match=f"{address}: already in use .KVKEEP_X chooses another"):
            await HttpServer(create_app(starting_service(), max_prompt_bytes=1), address, setting="KVKEEP_X").start()
    with pytest.raises(AddressError, match="without TLS"):
        await HttpServer(create_app(starting_service(), max_prompt_bytes=1), "0.0.0.0:0").start()


def test_the_description_names_every_route_and_only_answers_that_there_are() -> None:
    app = create_app(starting_service(), max_prompt_bytes=1000)
    described = app.openapi()
    assert sorted(described["paths"]) == [
        "/abort_request", "/detokenize", "/health", "/load", "/metrics", "/model_info", "/ping", "/server_info",
        "/tokenize", "/tokenizer_info", "/v1/chat/completions", "/v1/completions", "/v1/load_lora_adapter",
        "/v1/models", "/v1/models/{model}", "/v1/unload_lora_adapter", "/version",
    ]  # fmt: skip
    for path in described["paths"].values():
        for method in path.values():
            assert set(method["responses"]) == {"200", "4XX", "5XX"}
    policy = described["components"]["schemas"]["EvictionPolicy"]["properties"]
    assert "norm_sum" in policy["kind"]["enum"]


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        ("/v1/completions", {"prompt": "x", "grammar": "a"}, "grammar", "is not a field"),
        ("/v1/completions", {"prompt": "x", "max_new_tokens": 3}, "max_new_tokens", "did you mean max_tokens?"),
        ("/v1/chat/completions", {"messages": [HELLO | {"name": "al"}]}, "messages[0].name", "is not read by the"),
        ("/v1/chat/completions", {"messages": [HELLO, HELLO | {"reasoning_content": "a"}]},
         "messages[1].reasoning_content", "is not read by the model's chat template"),
        ("/tokenize", {"messages": [HELLO | {"reasoning_content": "a"}]}, "messages[0].reasoning_content", "not read"),
        ("/v1/completions", {"prompt": "x", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1"),
        ("/v1/completions", {"prompt": "x", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "at least -1"),
        ("/v1/completions", {"prompt": "x", "suffix": "y"}, "suffix", "is not supported"),
        ("/detokenize", {"tokens": [1], "skip_special_tokens": "x"}, "skip_special_tokens", "must be a valid bool"),
        ("/tokenize", {"messages": [HELLO], "documents": [{}]}, "documents", "is not supported"),
        ("/tokenize", {"messages": [HELLO], "chat_template_kwargs": {"tools": []}},
         "chat_template_kwargs.tools", "is set by the server"),
        ("/v1/chat/completions",
         {"messages": [HELLO], "add_generation_prompt": True, "continue_final_message": True},
         "continue_final_message", "cannot be given together with add_generation_prompt"),
    ],
)  # fmt: skip
async def test_no_unknown_field_is_dropped_silently(
    address: str, path: str, body: dict[str, object], param: str, words: str
) -> None:
    answer = await ask(address, "POST", path, json.dumps(body))
    assert (answer.status, answer.error["param"]) == (400, param)
    assert words in answer.error["message"]
    assert answer.error["message"].startswith(param)


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/chat/completions", {"prompt": "x"}, "messages is missing: prompt belongs to /v1/completions"),
        ("/v1/completions", {"messages": [HELLO]}, "prompt is missing: messages belongs to /v1/chat/completions"),
        ("/v1/completions", {}, "prompt is missing"),
        ("/v1/chat/completions", {"messages": "hi"}, "messages must be a list of objects with role and content"),
        ("/v1/chat/completions", {"messages": ["hi"]}, "messages[0] must be an object with role and content"),
        ("/tokenize", {"messages": ["hi"]}, "messages[0] must be an object with role and content"),
        ("/v1/chat/completions", {"messages": [HELLO | {"content": 5}]},
         "messages[0].content must be a text or a list of parts"),
        ("/v1/chat/completions", {"messages": [HELLO | {"content": {"text": "x"}}]},
         "messages[0].content must be a text or a list of parts"),
        ("/v1/chat/completions", {"messages": [HELLO | {"content": ["x"]}]},
         "messages[0].content[0] must be an object with type and text"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "text": "hi"}]},
         "messages[0].text is not a field: did you mean content?"),
        ("/v1/completions", {"prompt": "x", "stop": 5}, "stop must be a text or a list of texts"),
        ("/v1/completions", {"prompt": "x", "stream_options": 5}, "stream_options must be an object"),
        ("/v1/completions", {"prompt": "x", "max_tokens": -1}, "max_tokens must be at least 0"),
        ("/v1/chat/completions", {"messages": [HELLO], "max_completion_tokens": -1},
         "max_completion_tokens must be at least 0"),
    ],
)  # fmt: skip
async def test_a_mistake_of_a_beginner_is_told_with_its_remedy(
    address: str, path: str, body: dict[str, object], message: str
) -> None:
    answer = await ask(address, "POST", path, json.dumps(body))
    assert (answer.status, answer.error["message"]) == (400, message)
    assert answer.error["param"] == message.partition(" ")[0]
