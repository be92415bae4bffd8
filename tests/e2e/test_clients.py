"""LangChain and LiteLLM on the real stack, as programs use them: answers, streams, tools, and models of pydantic."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import litellm
import pydantic
import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI

from tests.stack import Stack
from tests.support.patience import patience

# These libraries warn of their own code.
pytestmark = [pytest.mark.model, pytest.mark.filterwarnings("ignore")]

QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."
MESSAGES = [{"role": "user", "content": QUESTION}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


class Capital(pydantic.BaseModel):
    """An answer."""

    model_config = pydantic.ConfigDict(extra="forbid")

    city: str = pydantic.Field(max_length=20)
    inhabitants: int = pydantic.Field(ge=0, le=100_000_000)


@tool
def weather(city: str) -> str:
    """Tells the weather."""
    return f"It is sunny in {city}."


def langchain(stack: Stack) -> ChatOpenAI:
    return ChatOpenAI(
        base_url=f"http://{stack.http}/v1", api_key="none", model="", temperature=0, max_retries=0, max_tokens=60
    )


@pytest.fixture
def chat(served: Stack) -> ChatOpenAI:
    return langchain(served)


@pytest.fixture
def chat_with_tools(tooled: Stack) -> ChatOpenAI:
    return langchain(tooled)


def test_langchain_answers_streams_and_counts(chat: ChatOpenAI) -> None:
    answer = chat.invoke(QUESTION)
    assert answer.content == ANSWER
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] == 8
    whole: Any = None
    for chunk in chat.stream(QUESTION, stream_usage=True):
        whole = chunk if whole is None else whole + chunk
    assert whole.content == ANSWER
    assert whole.usage_metadata["output_tokens"] == 8
    assert whole.response_metadata["finish_reason"] == "stop"
    batch = chat.batch([QUESTION, [("system", "You are terse."), ("human", QUESTION)]])
    assert batch[0].content == ANSWER
    assert batch[1].content


def test_langchain_calls_tools_and_goes_on_with_their_results(chat_with_tools: ChatOpenAI) -> None:
    caller = chat_with_tools.bind_tools([weather], tool_choice="required", parallel_tool_calls=False, strict=True)
    answer = caller.invoke("How is the weather in Paris?")
    assert isinstance(answer, AIMessage)
    [call] = answer.tool_calls
    assert (call["name"], list(call["args"])) == ("weather", ["city"])
    pieces: Any = None
    for chunk in caller.stream("How is the weather in Paris?"):
        pieces = chunk if pieces is None else pieces + chunk
    assert [one["args"] for one in pieces.tool_calls] == [call["args"]]
    result = ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"])
    assert chat_with_tools.bind_tools([weather]).invoke([HumanMessage("How is it?"), answer, result]).content


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_answers_with_a_model_of_pydantic(chat_with_tools: ChatOpenAI, method: str) -> None:
    structured = chat_with_tools.with_structured_output(Capital, method=method)  # type: ignore[arg-type]
    assert isinstance(structured.invoke(QUESTION), Capital)


def test_langchain_completes_text(served: Stack) -> None:
    model = OpenAI(base_url=f"http://{served.http}/v1", api_key="none", model="", temperature=0, max_tokens=4)
    whole = model.invoke("One, two, three,")
    assert whole
    assert "".join(model.stream("One, two, three,")) == whole


def litellms(stack: Stack) -> dict[str, Any]:
    """What every call of LiteLLM is given."""
    with urllib.request.urlopen(f"http://{stack.http}/v1/models", timeout=patience(10)) as answer:
        model, *_ = json.load(answer)["data"]
    return {
        "model": f"openai/{model['id']}",
        "api_base": f"http://{stack.http}/v1",
        "api_key": "none",
        "temperature": 0,
        "max_tokens": 60,
        "num_retries": 0,
    }


@pytest.fixture
def asked(served: Stack) -> dict[str, Any]:
    return litellms(served)


def test_litellm_answers_streams_and_counts(asked: dict[str, Any]) -> None:
    answer = litellm.completion(messages=MESSAGES, **asked)
    assert answer.choices[0].message.content == ANSWER
    assert answer.usage.completion_tokens == 8
    chunks = list(litellm.completion(messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **asked))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == ANSWER
    whole = litellm.stream_chunk_builder(chunks)
    assert whole is not None
    assert whole.usage.completion_tokens == 8
    text = litellm.text_completion(prompt="One, two, three,", **asked | {"max_tokens": 4})
    assert text.choices[0].text


def test_litellm_calls_tools_and_goes_on_with_their_results(tooled: Stack) -> None:
    asked = litellms(tooled)
    tools = {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "weather"}}}
    answer = litellm.completion(messages=MESSAGES, **tools, **asked)
    assert answer.choices[0].finish_reason in ("tool_calls", "stop")
    [call] = answer.choices[0].message.tool_calls
    assert list(json.loads(call.function.arguments)) == ["city"]
    said = [
        *MESSAGES,
        answer.choices[0].message.model_dump(),
        {"role": "tool", "tool_call_id": call.id, "content": "x"},
    ]
    # As its agents send it.
    again = litellm.completion(messages=said, tools=[WEATHER], reasoning_effort="low", drop_params=True, **asked)
    assert again.choices[0].message.content


def test_litellm_answers_with_a_model_of_pydantic(asked: dict[str, Any]) -> None:
    answer = litellm.completion(messages=MESSAGES, response_format=Capital, **asked)
    assert Capital.model_validate_json(answer.choices[0].message.content)


def test_an_error_names_the_field_in_both(chat: ChatOpenAI, asked: dict[str, Any]) -> None:
    with pytest.raises(Exception, match="temperature must be"):
        chat.bind(temperature=-1).invoke(QUESTION)
    with pytest.raises(litellm.exceptions.BadRequestError, match="temperature must be"):
        litellm.completion(messages=MESSAGES, **asked | {"temperature": -1})
