"""Routes about the server, under the names that probes and clients of other servers have for them."""

from __future__ import annotations

import asyncio
import json

import pytest

from protos.rpc.guard import Guard
from protos.rpc.identity import Role
from tests.support.keyring import Keyring
from tests.support.patience import patience
from tests.support.scheduler.http import LEAST, ask, first_event, serve, starting_service
from tests.support.scheduler.stack import Stack
from tests.support.scheduler.tokenizers import CHAT_TEMPLATE


async def test_a_ping_is_a_probe_of_health(address: str) -> None:
    for method in ("GET", "POST"):
        assert (await ask(address, method, "/ping")).status == 200
    async with serve(starting_service()) as starting:
        for method in ("GET", "POST"):
            answer = await ask(starting, method, "/ping")
            assert (answer.status, answer.error["code"]) == (503, "not_ready")


async def test_the_load_counts_what_runs_and_waits(stack: Stack, address: str) -> None:
    async def load() -> int:
        answer = json.loads((await ask(address, "GET", "/load")).body)
        assert list(answer) == ["server_load"]
        return int(answer["server_load"])

    assert await load() == 0
    stack.executor.step_seconds = 0.05
    reader, writer = await asyncio.open_connection(*address.split(":"))
    await first_event(reader, writer)
    assert await load() == 1
    writer.close()
    async with asyncio.timeout(patience(10)):
        while await load():
            pass


async def test_the_server_describes_itself_in_the_words_of_others(address: str) -> None:
    for path in ("/server_info", "/get_server_info"):
        info = json.loads((await ask(address, "GET", path)).body)
        assert (info["model_path"], info["served_model_name"], info["context_length"]) == ("fake", "fake", 400)
        assert (info["max_running_requests"], info["max_queued_requests"], info["page_size"]) == (64, 256, 4)
        assert info["internal_states"][0]["running_requests"] == 0
        assert info["vllm_config"]["model_config"]["max_model_len"] == 400
        assert info["version"]

    for path in ("/model_info", "/get_model_info"):
        model = json.loads((await ask(address, "GET", path)).body)
        assert (model["model_path"], model["is_generation"]) == ("fake", True)


async def test_clients_that_render_conversations_get_template_and_tokens(address: str) -> None:
    info = json.loads((await ask(address, "GET", "/tokenizer_info")).body)
    assert (info["chat_template"], info["eos_token"], info["bos_token"]) == (CHAT_TEMPLATE, "<eos>", None)
    # As lm-eval does.
    body = json.dumps({"prompt": info["eos_token"], "add_special_tokens": False})
    assert json.loads((await ask(address, "POST", "/tokenize", body)).body)["tokens"] == [0]


async def test_only_known_callers_get_more_than_probes(stack: Stack, keyring: Keyring) -> None:
    keyring.add(Role.VIEWER)
    (token,) = keyring.tokens.values()
    async with serve(stack.scheduler.service, guard=Guard(keyring.file, None)) as address:
        for path in ("/load", "/model_info", "/server_info", "/get_server_info", "/tokenizer_info"):
            assert (await ask(address, "GET", path)).status == 401
            answer = await ask(address, "GET", path, headers={"Authorization": f"Bearer {token}"})
            assert answer.status == 200
        assert (await ask(address, "GET", "/ping")).status == 200


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/v1/embeddings", "there is no /v1/embeddings here: /openapi.json lists what there is"),
        ("/chat/completions", "did you mean /v1/chat/completions?"),
        ("/v1/v1/models", "did you mean /v1/models?"),
        ("/v1/model", "did you mean /v1/models?"),
        ("/helth?x=%C3%A9", "there is no /helth here: did you mean /health?"),
        ("/%C3%A9%0A", "there is no /%C3%A9%0A here"),
        (f"/{'x' * 1000}", f"there is no /{'x' * 127} here"),
    ],
)
async def test_an_unknown_path_is_named_with_one_that_is_close(address: str, path: str, words: str) -> None:
    answer = await ask(address, "GET", path)
    assert (answer.status, answer.error["code"]) == (404, "not_found")
    assert words in answer.error["message"]


async def test_a_wrong_method_is_told_the_right_ones(address: str) -> None:
    for method, path, allowed in (
        ("POST", "/v1/models", "GET, HEAD"),
        ("GET", "/v1/completions", "POST"),
        ("DELETE", "/ping", "GET, POST"),
        ("PUT", "/v1/models/fake", "GET"),
    ):
        answer = await ask(address, method, path, json.dumps(LEAST))
        assert (answer.status, answer.headers["Allow"]) == (405, allowed)
        assert answer.error["message"] == f"this path takes {allowed.replace(', ', ' and ')} only"
