"""Tools on the real stack, with the default model and a chat template that reads them."""

from __future__ import annotations

import json
import warnings
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio
from transformers import AutoTokenizer

from tests.stack import Stack

pytestmark = pytest.mark.model

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
HISTORY: list[dict[str, Any]] = []
for city in ("Paris", "Rome", "Berlin"):
    call = {"id": city, "type": "function", "function": {"name": "weather", "arguments": json.dumps({"city": city})}}
    HISTORY += [
        {"role": "user", "content": f"What is the weather in {city}?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": city, "content": "It is sunny."},
        {"role": "assistant", "content": f"It is sunny in {city}."},
    ]
HISTORY.append({"role": "user", "content": "What is the weather in Madrid?"})


@pytest_asyncio.fixture
async def caller(tooled: Stack) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"http://{tooled.http}/v1", api_key="none", max_retries=0) as caller:
        yield caller


async def test_the_prompt_is_that_of_transformers(
    caller: openai.AsyncOpenAI, tooled: Stack, tooled_model: Path
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tokenizer = AutoTokenizer.from_pretrained(tooled_model)
    parsed = json.loads(json.dumps(HISTORY))
    for message in parsed:
        for one in message.get("tool_calls", ()):
            one["function"]["arguments"] = json.loads(one["function"]["arguments"])
    expected = tokenizer.apply_chat_template(
        parsed, tools=[WEATHER], add_generation_prompt=True, tokenize=True, return_dict=False
    )
    body = {"messages": HISTORY, "tools": [WEATHER]}
    found = await caller.post(f"http://{tooled.http}/tokenize", cast_to=dict, body=body)
    assert found["tokens"] == expected


async def test_the_model_calls_a_tool_as_it_has_done_before(caller: openai.AsyncOpenAI) -> None:
    asked: dict[str, Any] = {"model": "", "messages": HISTORY, "tools": [WEATHER], "temperature": 0, "max_tokens": 60}
    [choice] = (await caller.chat.completions.create(**asked)).choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    [call] = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Madrid"})
    arguments, reasons = "", []
    async for chunk in await caller.chat.completions.create(**asked, stream=True):
        for delta in chunk.choices[0].delta.tool_calls or ():
            arguments += delta.function.arguments
        reasons.append(chunk.choices[0].finish_reason)
    assert (arguments, reasons[-1]) == (call.function.arguments, "tool_calls")
    # The next turn finds the prompt and the call in the cache.
    answered = [
        *HISTORY,
        choice.message.model_dump(exclude_none=True) | {"content": ""},
        {"role": "tool", "tool_call_id": call.id, "content": "It is sunny."},
    ]
    answer = await caller.chat.completions.create(**asked | {"messages": answered})
    assert "sunny" in (answer.choices[0].message.content or "")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert (answer.usage.prompt_tokens_details.cached_tokens or 0) > 200


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}], ids=["any", "one"]
)
async def test_a_call_is_forced_whatever_the_model_would_say(caller: openai.AsyncOpenAI, choice: Any) -> None:
    schema = WEATHER["function"]["parameters"] | {"additionalProperties": False}
    schema["properties"] = {"city": {"type": "string", "pattern": "^[A-Z][a-z]{2,12}$"}}
    tool = {"type": "function", "function": WEATHER["function"] | {"parameters": schema}}
    asked: dict[str, Any] = {"model": "", "tools": [tool], "tool_choice": choice, "max_tokens": 200, "n": 4, "seed": 1}
    asked["messages"] = [{"role": "user", "content": "Write a poem about the sea."}]
    answer = await caller.chat.completions.create(**asked, parallel_tool_calls=False)
    for sample in answer.choices:
        assert (sample.finish_reason, sample.message.content) == ("tool_calls", None)
        [call] = sample.message.tool_calls or ()
        arguments = json.loads(call.function.arguments)
        assert (call.function.name, list(arguments)) == ("weather", ["city"])
        assert arguments["city"].isalpha()
