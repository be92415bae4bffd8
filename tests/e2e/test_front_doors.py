"""A third-party gateway in front of two engines: smg as people start it, with its own APIs."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from bench.peers.routers import Connection, RouterProcess
from tests.stack import Stack
from tests.support.patience import patience
from tests.support.ports import free_address

pytestmark = pytest.mark.model

SMG = Path(sys.executable).parent / "smg"
# Without a hub: the tokenizer must come from an engine.
NO_HUB = "HF_ENDPOINT=http://127.0.0.1:9"
ENGINES = 2
PATIENCE_SECONDS = patience(60)
CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]
PARIS = "The capital of France is Paris."


@pytest.fixture(scope="module")
def engines() -> Iterator[list[Stack]]:
    """Schedulers on ports, which announce their cached blocks."""
    with ExitStack() as exits:
        yield [
            exits.enter_context(
                Stack(
                    scheduler_address=free_address(),
                    scheduler_http_address=free_address(),
                    scheduler_kv_events=1,
                    executor_max_tokens=4096,
                    executor_threads=1,
                )
            )
            for _ in range(ENGINES)
        ]


@pytest.fixture(scope="module")
def smg(engines: list[Stack], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Connection]:
    """A connection to smg, once it knows the engines and their tokenizer."""
    folder, address, prometheus = tmp_path_factory.mktemp("smg"), free_address(), free_address()
    command = ["env", NO_HUB, str(SMG), "launch", "--policy", "cache_aware", "--host", "127.0.0.1"]
    command += ["--port", address.rpartition(":")[2], "--log-dir", str(folder)]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", prometheus.rpartition(":")[2]]
    command += ["--worker-urls", *(f"grpc://{engine.scheduler}" for engine in engines)]
    log = folder / "smg.log"
    try:
        with RouterProcess(command, address, log) as router:
            router.wait()
            wait_until(lambda: sum(one["is_healthy"] for one in router.get("/workers")["workers"]) == ENGINES)
            wait_until(lambda: bool(router.get("/v1/tokenizers")["tokenizers"]))
            yield router
    except BaseException:
        print(log.read_text()[-4000:], file=sys.stderr)
        raise


def wait_until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while not is_so():
        assert time.monotonic() < end, "smg does not know the engines in time"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def model(engines: list[Stack]) -> str:
    """The name that kvkeep has for it."""
    with Connection(engines[0].http) as engine:
        return str(engine.get("/v1/models")["data"][0]["id"])


def events(text: str) -> list[dict[str, Any]]:
    """The events of a stream."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def test_a_conversation_is_answered_as_kvkeep_answers_it(smg: Connection, engines: list[Stack], model: str) -> None:
    asked = {"model": model, "messages": CAPITAL, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    with Connection(engines[0].http) as engine:
        own = engine.post("/v1/chat/completions", **asked)
    found = smg.post("/v1/chat/completions", **asked)
    [choice], [right] = found["choices"], own["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (PARIS, "stop")
    assert found["usage"]["prompt_tokens"] == own["usage"]["prompt_tokens"]
    assert found["usage"]["completion_tokens"] == own["usage"]["completion_tokens"]
    ours, theirs = (
        [(token["token"], token["logprob"]) for token in one["logprobs"]["content"]] for one in (right, choice)
    )
    for (token, logprob), (other, other_logprob) in zip(ours, theirs, strict=False):
        assert (token, logprob) == (other, pytest.approx(other_logprob, abs=1e-4))
    streamed = events(smg.read("POST", "/v1/chat/completions", json.dumps(asked | {"stream": True})))
    parts = [one["choices"][0]["delta"].get("content") or "" for one in streamed if one["choices"]]
    assert len([part for part in parts if part]) > 1
    assert "".join(parts) == PARIS


def test_the_responses_api(smg: Connection, model: str) -> None:
    asked = {"model": model, "input": CAPITAL[0]["content"], "temperature": 0}
    found = smg.post("/v1/responses", **asked)
    assert found["status"] == "completed"
    [message] = [item for item in found["output"] if item["type"] == "message"]
    assert "".join(part["text"] for part in message["content"]) == PARIS
    more = smg.post("/v1/responses", **asked | {"input": "Say it again.", "previous_response_id": found["id"]})
    assert more["usage"]["input_tokens"] > found["usage"]["input_tokens"]
    streamed = events(smg.read("POST", "/v1/responses", json.dumps(asked | {"stream": True})))
    deltas = [one["delta"] for one in streamed if one["type"] == "response.output_text.delta"]
    assert "".join(deltas) == PARIS


def test_anthropics_api(smg: Connection, model: str) -> None:
    asked = {"model": model, "max_tokens": 32, "messages": CAPITAL, "temperature": 0}
    found = smg.post("/v1/messages", **asked)
    assert "".join(part["text"] for part in found["content"]) == PARIS
    assert found["stop_reason"] == "end_turn"
    assert found["usage"]["output_tokens"] == 8
    short = smg.post("/v1/messages", **asked | {"max_tokens": 3})
    assert short["stop_reason"] == "max_tokens"
    stopped = smg.post("/v1/messages", **asked | {"stop_sequences": [" Paris"]})
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", " Paris")
    streamed = events(smg.read("POST", "/v1/messages", json.dumps(asked | {"stream": True})))
    deltas = [one["delta"]["text"] for one in streamed if one["type"] == "content_block_delta"]
    assert "".join(deltas) == PARIS


def test_answers_keep_to_a_schema_and_tools_are_called(smg: Connection, model: str) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}, "large": {"type": "boolean"}},
        "required": ["city", "large"],
        "additionalProperties": False,
    }
    asked = {"model": model, "messages": CAPITAL, "temperature": 0}
    wanted = {"type": "json_schema", "json_schema": {"name": "city", "strict": True, "schema": schema}}
    [choice] = smg.post("/v1/chat/completions", **asked, response_format=wanted)["choices"]
    assert sorted(json.loads(choice["message"]["content"])) == ["city", "large"]
    tool = {"type": "function", "function": {"name": "describe", "parameters": schema}}
    [choice] = smg.post("/v1/chat/completions", **asked, tools=[tool], tool_choice="required")["choices"]
    assert choice["finish_reason"] == "tool_calls"
    called = choice["message"]["tool_calls"][0]["function"]
    assert (called["name"], sorted(json.loads(called["arguments"]))) == ("describe", ["city", "large"])


def test_a_prompt_goes_where_it_is_cached(smg: Connection, engines: list[Stack], model: str) -> None:
    """smg has not seen these prompts: only events can tell it which engine has computed them.

    Nothing says when it has heard of them, so that it gets more and more time. All of a round must go where they are
    cached, as one alone may go there by chance; each round has new ones, as a miss caches a prompt elsewhere, too.
    """
    turtle = "once upon a time there was " + "a very old and patient turtle who read books " * 8
    missing: list[int] = []
    for turn, pause in enumerate((0.5, 2, 8, 30)):
        prompts = []
        for number, home in enumerate((1, 0, 1, 1, 0, 0)):
            messages = [{"role": "user", "content": f"{turn}.{number}: {turtle}"}]
            prompts.append({"model": model, "messages": messages, "max_tokens": 2, "temperature": 0})
            with Connection(engines[home].http) as engine:
                own = engine.post("/v1/chat/completions", **prompts[-1])
            assert own["usage"]["prompt_tokens_details"]["cached_tokens"] < 60
        # For the events to arrive.
        time.sleep(pause)
        usages = [smg.post("/v1/chat/completions", **prompt)["usage"] for prompt in prompts]
        missing = [usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
        if max(missing) < 16:
            return
    pytest.fail(f"prompts went where so many of their tokens were not cached: {missing}")


def test_what_an_engine_refuses_is_said(smg: Connection, model: str) -> None:
    body = {"model": model, "messages": CAPITAL, "temperature": 0, "max_completion_tokens": 1_000_000}
    with pytest.raises(Exception, match=r"sampling_params\.max_tokens"):
        smg.post("/v1/chat/completions", **body)
