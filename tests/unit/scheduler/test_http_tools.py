"""Tools and reasoning over HTTP, through OpenAI's client: an executor that says given texts stands for the model."""

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pydantic
import pytest

from scheduler.frontend.openai.requests import ChatCompletionRequest
from tests.support.scheduler.fake_executor import FakeExecutor
from tests.support.scheduler.fleet import run_fleet
from tests.support.scheduler.http import HELLO, ask, client, serve
from tests.support.scheduler.real_manager import RealManager
from tests.support.scheduler.stack import Stack, StackFactory

TEMPLATE = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>{% endif %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function.arguments.city }}"
    "{{ call.function | tojson }}</tool_call>{% endfor %}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "description": "Tells the weather.", "parameters": PARAMETERS},
}
TIME: dict[str, Any] = {"type": "function", "function": {"name": "time"}}
KOELN, ROME = '{"city": "Köln"}', '{"city": "Rome"}'
ONE = f'Let me see.\n<tool_call>\n{{"name": "weather", "arguments": {KOELN}}}\n</tool_call>'
TWO = f'{ONE}\n<tool_call>{{"name": "weather", "arguments": {ROME}}}</tool_call>'
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": KOELN}}
HISTORY: list[dict[str, Any]] = [
    HELLO,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "name": "weather", "content": "sun"},
]


@contextlib.asynccontextmanager
async def talking(
    run_stack: StackFactory,
    text: str = "",
    template: str = TEMPLATE,
    special_tokens: tuple[str, ...] = (),
    **settings: object,
) -> AsyncIterator[tuple[Stack, openai.AsyncOpenAI]]:
    """A stack whose model says a text, and a client of it."""
    executor = FakeExecutor(max_tokens=2000, max_positions=2000, special_tokens=special_tokens)
    executor.chat_template = template
    if text:
        executor.say(text)
    async with (
        run_stack(executor=executor, manager=RealManager(executor), **settings) as stack,
        serve(stack.scheduler.service, max_prompt_bytes=1 << 20) as address,
        client(address) as caller,
    ):
        yield stack, caller


async def create(caller: openai.AsyncOpenAI, **fields: Any) -> Any:
    return await caller.chat.completions.create(**{"model": "", "messages": [HELLO], "tools": [WEATHER, TIME]} | fields)


async def streamed(caller: openai.AsyncOpenAI, **fields: Any) -> list[dict[str, Any]]:
    """Each sample as its deltas give it."""
    samples: dict[int, dict[str, Any]] = {}
    async for chunk in await create(caller, stream=True, **fields):
        for choice in chunk.choices:
            said = samples.setdefault(choice.index, {"content": "", "reasoning": "", "calls": [], "pieces": 0})
            assert said.get("finish_reason") is None
            said["finish_reason"] = choice.finish_reason
            said["content"] += choice.delta.content or ""
            extra = choice.delta.model_extra or {}
            assert extra.get("reasoning") == extra.get("reasoning_content")
            said["reasoning"] += extra.get("reasoning", "")
            for call in choice.delta.tool_calls or ():
                if call.index == len(said["calls"]):
                    assert call.id
                    assert call.type == "function"
                    said["calls"].append([call.id, call.function.name, ""])
                else:
                    assert (call.id, call.type, call.function.name) == (None, None, None)
                    assert call.index == len(said["calls"]) - 1
                said["calls"][-1][2] += call.function.arguments
                said["pieces"] += 1
    return [samples[index] for index in sorted(samples)]


def calls_of(choice: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]


async def prompt(caller: openai.AsyncOpenAI, **fields: Any) -> str:
    """The rendered prompt, as /tokenize and /detokenize show it."""
    root = str(caller.base_url).removesuffix("/v1/")
    tokens = await caller.post(f"{root}/tokenize", cast_to=dict, body={"messages": [HELLO]} | fields)
    text = await caller.post(f"{root}/detokenize", cast_to=dict, body={"tokens": tokens["tokens"]})
    return str(text["prompt"])


async def test_calls_are_found_in_an_answer(run_stack: StackFactory) -> None:
    async with talking(run_stack, TWO) as (_, caller):
        answer = await create(caller)
        [choice] = answer.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Let me see."
        assert calls_of(choice) == [("weather", KOELN), ("weather", ROME)]
        ids = [call.id for call in choice.message.tool_calls]
        assert len(set(ids)) == 2
        assert all(call_id.startswith("call_") for call_id in ids)
        # The answer can be sent back.
        history = [
            HELLO,
            choice.message.model_dump(),
            *({"role": "tool", "tool_call_id": one, "content": "sun"} for one in ids),
        ]
        assert calls_of((await create(caller, messages=history)).choices[0]) == calls_of(choice)


async def test_a_call_alone_has_no_content(run_stack: StackFactory) -> None:
    async with talking(run_stack, ONE.removeprefix("Let me see.\n")) as (_, caller):
        message = (await create(caller)).choices[0].message
        assert (message.content, len(message.tool_calls)) == (None, 1)


async def test_calls_are_streamed_in_pieces(run_stack: StackFactory) -> None:
    async with talking(run_stack, TWO) as (stack, caller):
        stack.executor.step_seconds = 0.002
        whole, many = (await create(caller)).choices[0], await streamed(caller, n=2)
        assert len(many) == 2
        for said in many:
            assert (said["content"], said["finish_reason"]) == ("Let me see.", "tool_calls")
            assert [(name, arguments) for _, name, arguments in said["calls"]] == calls_of(whole)
            assert said["pieces"] > 6
        assert len({call_id for said in many for call_id, _, _ in said["calls"]}) == 4


async def test_openais_client_parses_calls_of_a_stream_itself(run_stack: StackFactory) -> None:
    class weather(pydantic.BaseModel):  # noqa: N801
        city: str

    # Such a tool is strict, and this template has no line breaks in its tags.
    text = TWO.replace("<tool_call>\n", "<tool_call>").replace("\n</tool_call>", "</tool_call>")
    async with talking(run_stack, text) as (_, caller):
        asked = {"model": "", "messages": [HELLO], "tools": [openai.pydantic_function_tool(weather)]}
        async with caller.chat.completions.stream(**asked) as stream:
            events = [event.type async for event in stream]
            final = await stream.get_final_completion()
        assert events.count("tool_calls.function.arguments.done") == 2
        for completion in (final, await caller.chat.completions.parse(**asked)):
            parsed = [call.function.parsed_arguments for call in completion.choices[0].message.tool_calls]
            assert parsed == [weather(city="Köln"), weather(city="Rome")]


@pytest.mark.parametrize("stream", [False, True])
async def test_one_call_ends_the_output_where_only_one_is_wanted(run_stack: StackFactory, stream: bool) -> None:
    async with talking(run_stack, f"{TWO} and so on, and on, and on") as (stack, caller):
        if stream:
            [said] = await streamed(caller, parallel_tool_calls=False)
            found = (said["content"], len(said["calls"]), said["finish_reason"])
        else:
            answer = await create(caller, parallel_tool_calls=False)
            [choice] = answer.choices
            found = (choice.message.content, len(choice.message.tool_calls), choice.finish_reason)
            # Its closing tag is not even generated.
            assert answer.usage.completion_tokens < len(stack.executor.tokenizer.encode(ONE).ids)
        assert found == ("Let me see.", 1, "tool_calls")


@pytest.mark.parametrize(
    "broken", ['{"name": "weather", "arguments": {"city": 1e}}', '{"name": "weather", "arguments": {']
)
async def test_a_call_that_breaks_off_is_no_reason_to_carry_out_calls(run_stack: StackFactory, broken: str) -> None:
    async with talking(run_stack, f"{ONE}\n<tool_call>{broken}</tool_call>") as (_, caller):
        assert (await create(caller)).choices[0].finish_reason == "stop"
        [said] = await streamed(caller)
        assert (said["finish_reason"], len(said["calls"])) == ("stop", 2)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "other"}}, "auto"])
async def test_parameters_that_no_grammar_has_are_named(
    run_stack: StackFactory, monkeypatch: pytest.MonkeyPatch, choice: Any
) -> None:
    # Also on a busy machine.
    monkeypatch.setattr("executor.core.grammars._TRY_SECONDS", 1_000.0)
    bad = {"type": "object", "properties": {"a": {"items": {"not": {}}}}}
    other = {"type": "function", "function": {"name": "other", "parameters": bad, "strict": True}}
    async with talking(run_stack, ONE) as (_, caller):
        with pytest.raises(openai.BadRequestError) as caught:
            await create(caller, tools=[WEATHER, other], tool_choice=choice)
        assert caught.value.param == "tools[1].function.parameters"
        assert '["not"], at #/properties/a/items' in caught.value.message
        # Nothing forces these parameters.
        await create(caller, tools=[WEATHER, other], tool_choice={"type": "function", "function": {"name": "weather"}})


async def test_a_schema_of_a_structural_tag_is_named(run_stack: StackFactory) -> None:
    tags = [{"begin": f"<{name}>", "schema": schema, "end": ""} for name, schema in (("a", {}), ("b", {"not": {}}))]
    form = {"type": "structural_tag", "structures": tags, "triggers": ["<"]}
    async with talking(run_stack) as (_, caller):
        with pytest.raises(openai.BadRequestError) as caught:
            await create(caller, tools=None, response_format=form)
        assert caught.value.param == "response_format.structures[1].schema"


async def test_an_output_that_is_cut_within_a_call_says_so(run_stack: StackFactory) -> None:
    async with talking(run_stack, ONE) as (stack, caller):
        length = len(stack.executor.tokenizer.encode(ONE.removesuffix('ln"}}\n</tool_call>')).ids)
        [choice] = (await create(caller, max_tokens=length)).choices
        assert choice.finish_reason == "length"
        [(name, arguments)] = calls_of(choice)
        assert (name, KOELN.startswith(arguments), len(arguments) > 10) == ("weather", True, True)
        [said] = await streamed(caller, max_tokens=length)
        assert (said["finish_reason"], said["calls"][0][2]) == ("length", arguments)


async def test_without_tools_or_with_the_choice_none_text_stays_text(run_stack: StackFactory) -> None:
    async with talking(run_stack, ONE) as (_, caller):
        for fields in ({"tools": None}, {"tools": []}, {"tool_choice": "none"}):
            [choice] = (await create(caller, **fields)).choices
            assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (ONE, None, "stop")
            [said] = await streamed(caller, **fields)
            assert (said["content"], said["calls"], said["finish_reason"]) == (ONE, [], "stop")
        plain = await prompt(caller)
        assert await prompt(caller, tools=[WEATHER], tool_choice="none") == plain
        assert "<tools>" in await prompt(caller, tools=[WEATHER], tool_choice="auto")


async def test_the_prompt_has_tools_and_calls_as_templates_expect_them(run_stack: StackFactory) -> None:
    async with talking(run_stack) as (_, caller):
        strict = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
        described = await prompt(caller, tools=[strict, TIME], messages=HISTORY)
    head, _, rest = described.partition("</tools>")
    decoder, found = json.JSONDecoder(), []
    text = head.removeprefix("<tools>")
    while text:
        tool, end = decoder.raw_decode(text)
        found.append(tool)
        text = text[end:]
    bare = {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "properties": {}}}}
    assert found == [WEATHER, bare]
    called = '<tool_call>Köln{"name": "weather", "arguments": {"city": "Köln"}}</tool_call>'
    assert rest == f"<user>hello<eos>\n<assistant>{called}<eos>\n<tool>sun<eos>\n<assistant>"


async def test_an_answer_has_the_name_of_its_function(run_stack: StackFactory) -> None:
    template = "{{ tools }}{% for m in messages %}{{ m.content }}{{ m.tool_calls }}{{ m.name }};{% endfor %}"
    nameless = {name: value for name, value in HISTORY[2].items() if name != "name"}
    async with talking(run_stack, template=template) as (_, caller):
        for said, shown in (
            (nameless, "sunweather;"),
            (nameless | {"name": "own"}, "sunown;"),
            (nameless | {"tool_call_id": "other"}, "sun;"),
        ):
            assert (await prompt(caller, messages=[*HISTORY[:2], said])).endswith(f";{shown}")


async def test_a_breakpoint_is_found_behind_tools_and_calls(run_stack: StackFactory) -> None:
    async with talking(run_stack) as (stack, caller):
        answered = HISTORY[2] | {"cache_control": {"type": "ephemeral"}}
        whole = await prompt(caller, tools=[WEATHER], messages=[*HISTORY[:2], answered])
        answer = await create(caller, messages=[*HISTORY[:2], answered], tools=[WEATHER], max_tokens=1)
        assert answer.model_extra["retention"][0]["outcome"] == "granted"
        [admission] = stack.manager.admissions
        [kept] = admission.retention.ranges
        text = stack.executor.tokenizer.decode(list(admission.token_ids[: kept.end]), skip_special_tokens=False)
        assert text == whole.removesuffix("<eos>\n<assistant>")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("choice", "text", "calls"),
    [
        ("required", f'[{{"name": "weather", "parameters": {KOELN}}}, {{"name": "time", "parameters": {{}}}}]',
         [("weather", KOELN), ("time", "{}")]),
        ({"type": "function", "function": {"name": "weather"}}, KOELN, [("weather", KOELN)]),
    ],
    ids=["any", "named"],
)  # fmt: skip
async def test_required_calls_are_the_whole_output(
    run_stack: StackFactory, choice: Any, text: str, calls: list[tuple[str, str]], stream: bool
) -> None:
    # The form of the model does not matter, nor whether it is known.
    async with talking(run_stack, text, TEMPLATE.replace("<tool_call>", "")) as (_, caller):
        if stream:
            [said] = await streamed(caller, tool_choice=choice)
            found = [(name, arguments) for _, name, arguments in said["calls"]], said["content"], said["finish_reason"]
        else:
            [answered] = (await create(caller, tool_choice=choice)).choices
            found = calls_of(answered), answered.message.content or "", answered.finish_reason
        assert found == (calls, "", "tool_calls")


async def test_special_tokens_that_mark_calls_are_read(run_stack: StackFactory) -> None:
    special = ("[TOOL_CALLS]", "[ARGS]")
    text = f"[TOOL_CALLS]weather[ARGS]{KOELN}[TOOL_CALLS]time[ARGS]{{}}"
    template = TEMPLATE.replace("<tool_call>", "[TOOL_CALLS]")
    async with talking(run_stack, text, template, special) as (_, caller):
        [choice] = (await create(caller)).choices
        assert calls_of(choice) == [("weather", KOELN), ("time", "{}")]
        assert {len(call.id) for call in choice.message.tool_calls} == {9}
        # As ever without tools.
        assert (await create(caller, tools=None)).choices[0].message.content == f"weather{KOELN}time{{}}"


THINKING = TEMPLATE + "{% if false %}</think>{% endif %}"
THOUGHT = "<think>\nThe city is Köln.\n</think>\n\n"


@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize("special", [(), ("<think>", "</think>")], ids=["text", "special tokens"])
async def test_reasoning_comes_apart_from_content_and_calls(
    run_stack: StackFactory, special: tuple[str, ...], opened: bool
) -> None:
    template = f"{THINKING}<think>\n" if opened else THINKING
    async with talking(run_stack, template=template, special_tokens=special) as (stack, caller):
        for text, content, calls in (("It rains.", "It rains.", 0), (ONE, "Let me see.", 1), ("", None, 0)):
            stack.executor.say((THOUGHT.removeprefix("<think>\n") if opened else THOUGHT) + text)
            [choice] = (await create(caller)).choices
            extra = choice.message.model_extra
            assert extra["reasoning"] == extra["reasoning_content"] == "The city is Köln."
            assert (choice.message.content, len(choice.message.tool_calls or ())) == (content, calls)
            [said] = await streamed(caller)
            assert (said["reasoning"], said["content"]) == ("The city is Köln.", content or "")
            assert len(said["calls"]) == calls
            [plain] = (await create(caller, tools=None)).choices
            assert plain.message.model_extra["reasoning"] == "The city is Köln."
            assert plain.message.content == (text or None)
        [choice] = (await create(caller, extra_body={"include_reasoning": False})).choices
        assert "reasoning" not in choice.message.model_extra


async def test_an_output_that_is_forced_has_neither_reasoning_nor_calls(run_stack: StackFactory) -> None:
    schema = {"type": "object", "properties": {"name": {"const": "weather"}}, "required": ["name"]}
    form = {"type": "json_schema", "json_schema": {"schema": schema | {"additionalProperties": False}}}
    async with talking(run_stack, template=f"{THINKING}<think>\n", tool_call_parser="llama3_json") as (_, caller):
        [choice] = (await create(caller, response_format=form)).choices
        assert json.loads(choice.message.content) == {"name": "weather"}
        assert "reasoning" not in (choice.message.model_extra or {})
        [said] = await streamed(caller, response_format=form)
        assert (json.loads(said["content"]), said["reasoning"], said["calls"]) == ({"name": "weather"}, "", [])


async def test_reasoning_of_an_answer_may_be_repeated_where_the_template_drops_it(run_stack: StackFactory) -> None:
    async with talking(run_stack, template=THINKING) as (stack, caller):
        stack.executor.say(THOUGHT + "It rains.")
        said = (await create(caller)).choices[0].message.model_dump(exclude_none=True)
        assert said["reasoning_content"]
        assert (await create(caller, messages=[HELLO, said, HELLO])).choices


async def test_calls_without_arguments_may_be_repeated(run_stack: StackFactory) -> None:
    called = {"id": "call_1", "type": "function", "function": {"name": "time", "arguments": ""}}
    history = [HELLO, HISTORY[1] | {"tool_calls": [called]}, HISTORY[2] | {"name": "time"}]
    async with talking(run_stack, "hello", TEMPLATE.replace(".arguments.city", ".name")) as (_, caller):
        assert (await create(caller, messages=history)).choices[0].message.content == "hello"


async def test_the_settings_choose_the_forms(run_stack: StackFactory, tmp_path: Path) -> None:
    text = f'<think>no</think>{{"name": "weather", "parameters": {KOELN}}}'
    async with talking(run_stack, text, tool_call_parser="llama3_json", reasoning_parser="think_tags") as (_, caller):
        message = (await create(caller)).choices[0].message
        assert (message.model_extra["reasoning"], message.content, len(message.tool_calls)) == ("no", None, 1)


async def test_calls_stay_text_where_the_settings_say_so(run_stack: StackFactory) -> None:
    settings = {"tool_call_parser": "none", "reasoning_parser": "none"}
    async with talking(run_stack, THOUGHT + ONE, THINKING, **settings) as (_, caller):
        [choice] = (await create(caller)).choices
        assert (choice.message.content, choice.finish_reason) == (THOUGHT + ONE, "stop")


async def test_a_router_finds_calls_as_an_engine_does(tmp_path: Path) -> None:
    executor = FakeExecutor(max_tokens=2000, max_positions=2000)
    executor.chat_template = THINKING
    executor.say(THOUGHT + TWO)
    async with (
        run_fleet(tmp_path, 1, executors=[executor]) as fleet,
        serve(fleet.router.service) as address,
        client(address) as caller,
    ):
        [choice] = (await create(caller)).choices
        assert calls_of(choice) == [("weather", KOELN), ("weather", ROME)]
        [said] = await streamed(caller, parallel_tool_calls=False)
        assert (said["reasoning"], len(said["calls"]), said["finish_reason"]) == ("The city is Köln.", 1, "tool_calls")


def named(tool: object, **fields: object) -> dict[str, Any]:
    """Tools of which one has other fields of its function."""
    return {"tools": [WEATHER, {"type": "function", "function": {"name": tool} | fields}]}


def called(**fields: object) -> dict[str, Any]:
    """A history with other fields of its call."""
    return {"messages": [HELLO, HISTORY[1] | {"tool_calls": [CALL, CALL | fields]}, HISTORY[2]]}


def with_arguments(arguments: object) -> dict[str, Any]:
    return called(function={"name": "weather", "arguments": arguments})


def choosing(**choice: object) -> dict[str, Any]:
    return {"tool_choice": choice}


def nested(levels: int) -> Any:
    return {"a": nested(levels - 1)} if levels else 1


F, A = "tools[1].function", "messages[1].tool_calls[1]"
# Field, and a part of the error.
BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": "x"}, "tools", "list"),
    ({"tools": ["x"]}, "tools[0]", "must be an object"),
    ({"tools": [WEATHER | {"type": "custom"}]}, "tools[0].type", 'must be "function"'),
    ({"tools": [{"function": {"name": "f"}}]}, "tools[0].type", 'must be "function"'),
    ({"tools": [{"type": "function"}]}, "tools[0].function.name", "must be 1 to 64"),
    ({"tools": [{"type": "function", "function": "f"}]}, "tools[0].function", "must be an object"),
    ({"tools": [WEATHER | {"cache": 1}]}, "tools[0].cache", "is not a field"),
    ({"tools": [{"type": "function", "function": {"name": f"f{n}"}} for n in range(129)]}, "tools", "at most 128"),
    ({"tools": [WEATHER, WEATHER]}, f"{F}.name", "is the name of another tool"),
    (named(""), f"{F}.name", "must be 1 to 64"),
    (named("a b"), f"{F}.name", "must be 1 to 64"),
    (named("é"), f"{F}.name", "must be 1 to 64"),
    (named("f\n"), f"{F}.name", "must be 1 to 64"),
    (named("f" * 65), f"{F}.name", "must be 1 to 64"),
    (named(5), f"{F}.name", "must be 1 to 64"),
    (named("f", description=5), f"{F}.description", "must be a text"),
    (named("f", description="x" * 300_000), "tools", "have more than 262144 bytes"),
    (named("f", parameters=[]), f"{F}.parameters", "must be an object"),
    (named("f", parameters={"type": "array"}), f"{F}.parameters.type", 'must be "object"'),
    (named("f", parameters=nested(63)), f"{F}.parameters{'.a' * 63}", "is nested more than 64 levels deep"),
    (named("f", parameters=nested(200)), f"{F}.parameters{'.a' * 63}", "is nested more than 64 levels deep"),
    (named("f", strict="yes"), f"{F}.strict", "must be true or false"),
    (named("f", paramters={}), f"{F}.paramters", "is not a field"),
    ({"tool_choice": "some"}, "tool_choice", "must be one of none, auto, required"),
    ({"tool_choice": 5}, "tool_choice", "object"),
    ({"tool_choice": "required", "tools": None}, "tool_choice", "needs tools"),
    ({"tool_choice": "required", "tools": []}, "tool_choice", "needs tools"),
    (choosing(type="allowed_tools"), "tool_choice.type", "function"),
    (choosing(type="function"), "tool_choice.function.name", "is missing"),
    (choosing(type="function", function={}), "tool_choice.function.name", "is missing"),
    (choosing(type="function", function={"name": ""}), "tool_choice.function.name", "is missing"),
    (choosing(type="function", function={"name": "f"}), "tool_choice.function.name", "is the name of none of the"),
    (choosing(type="function", function={"name": "time", "x": 1}), "tool_choice.function.x", "is not a field"),
    (choosing(type="auto", function={"name": "time"}), "tool_choice.function", "is only for a choice of the type"),
    (choosing(type="function", function={"name": "time"}) | {"tools": None}, "tool_choice", "needs tools"),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls", "boolean"),
    ({"include_reasoning": "no"}, "include_reasoning", "boolean"),
    ({"separate_reasoning": False}, "separate_reasoning", "is not supported"),
    ({"functions": [{"name": "f"}]}, "functions", "is not supported"),
    ({"function_call": "auto"}, "function_call", "is not supported"),
    (called(id=""), f"{A}.id", "is missing"),
    (called(id=None), f"{A}.id", "string"),
    (called(id="x" * 257), f"{A}.id", "has more than 256 bytes"),
    (called(type="custom"), f"{A}.type", "function"),
    (called(function=None), f"{A}.function", "object"),
    (called(function={"name": "f"}), f"{A}.function.arguments", "is missing"),
    (called(function={"name": "a b", "arguments": "{}"}), f"{A}.function.name", "must be 1 to 64"),
    (called(function={"name": "f", "arguments": "{}", "x": 1}), f"{A}.function.x", "is not a field"),
    (called(custom={}), f"{A}.custom", "is not a field"),
    *((with_arguments(text), f"{A}.function.arguments", "must be JSON text of an object")
      for text in ("x", "[]", "1", "null", '{"a": 1', '{"a": NaN}', '{"a": 1e999}', '{"a": "\\ud800"}', "{" * 5000,
                   '{"a": 1' + "0" * 5000 + "}")),
    (with_arguments({}), f"{A}.function.arguments", "string"),
    (with_arguments(json.dumps(nested(65))), f"{A}.function.arguments", "is nested more than 64 levels deep"),
    (with_arguments('{"a": [' + "0," * 300_000 + "0]}"), "messages", "arguments with more than"),
    ({"messages": [HELLO | {"tool_calls": [CALL]}]}, "messages[0].tool_calls", "are only for messages of the"),
    ({"messages": [HISTORY[1] | {"tool_calls": [CALL] * 129}]}, "messages[0].tool_calls", "has more than 128"),
    ({"messages": [HELLO | {"tool_call_id": "c"}]}, "messages[0].tool_call_id", "is only for messages of the"),
    ({"messages": [{"role": "tool", "content": "sun"}]}, "messages[0].tool_call_id", "is missing"),
    ({"messages": [{"role": "tool", "tool_call_id": "c"}]}, "messages[0].content", "is missing"),
    ({"messages": [HISTORY[2] | {"tool_call_id": "c" * 257}]}, "messages[0].tool_call_id", "has more than 256 bytes"),
    ({"messages": [HISTORY[1] | {"function_call": {}}]}, "messages[0].function_call", "is not supported"),
]  # fmt: skip


async def test_every_wrong_field_of_tools_is_named_and_nothing_runs(run_stack: StackFactory) -> None:
    least = {"messages": [HELLO], "tools": [WEATHER, TIME]}
    async with talking(run_stack) as (stack, caller):
        for fields, param, words in BAD:
            for stream in (False, True):
                body = json.dumps(least | fields | {"stream": stream})
                answer = await ask(caller.base_url.netloc.decode(), "POST", "/v1/chat/completions", body)
                assert (answer.status, answer.error["param"]) == (400, param), (param, answer.body[:300])
                assert words in answer.error["message"], (param, answer.error["message"])
        assert stack.manager.admitted_ids == []


async def test_numbers_and_texts_that_no_prompt_holds_are_refused_with_their_place(run_stack: StackFactory) -> None:
    async with talking(run_stack) as (_, caller):
        for value, words in (("1e999", "must be a finite number"), ('"\\ud800"', "unpaired surrogate")):
            tool = '{"type": "function", "function": {"name": "f", "parameters": {"x": [0, ' + value + "]}}}"
            body = f'{{"messages": [{{"role": "user", "content": "x"}}], "tools": [{tool}]}}'
            answer = await ask(caller.base_url.netloc.decode(), "POST", "/v1/chat/completions", body)
            assert (answer.status, answer.error["param"]) == (400, "tools[0].function.parameters.x[1]")
            assert words in answer.error["message"]


@pytest.mark.parametrize(
    ("template", "fields", "param", "words"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", {}, "tools", "are not read by the model's chat"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", {"tool_choice": "required"}, "tools", "are not read"),
        ("{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}", {}, "tools", "does not show in which form"),
        ("{{ tools }}<tool_call>{% for m in messages %}{{ m.content }}{% endfor %}", {"messages": HISTORY},
         "messages[1].tool_calls", "is not read by the model's chat template"),
        ("{% if tools %}{{ tools + 1 }}<tool_call>{% endif %}{{ messages[0].content }}", {}, "messages", "do not fit"),
    ],
)  # fmt: skip
async def test_what_the_template_does_not_read_is_refused(
    run_stack: StackFactory, template: str, fields: dict[str, Any], param: str, words: str
) -> None:
    async with talking(run_stack, "hello", template) as (_, caller):
        with pytest.raises(openai.BadRequestError) as caught:
            await create(caller, **fields)
        assert (caught.value.param, words in caught.value.message) == (param, True)
        assert (await create(caller, tool_choice="none")).choices[0].message.content == "hello"


async def test_one_call_cannot_be_wanted_where_calls_are_not_looked_for(run_stack: StackFactory) -> None:
    async with talking(run_stack, "hello", tool_call_parser="none") as (_, caller):
        with pytest.raises(openai.BadRequestError) as caught:
            await create(caller, parallel_tool_calls=False)
        assert caught.value.param == "parallel_tool_calls"
        assert (await create(caller)).choices[0].message.content == "hello"


def test_the_description_has_tools() -> None:
    described = ChatCompletionRequest.model_json_schema()["properties"]
    assert described["tools"]["anyOf"][0]["items"]["properties"]["type"] == {"const": "function"}
    assert {"none", "auto", "required"} == set(described["tool_choice"]["anyOf"][0]["enum"])


@pytest.mark.parametrize("stream", [False, True])
async def test_a_required_output_is_forced(run_stack: StackFactory, stream: bool) -> None:
    """Whatever the model would say: here it says nothing in particular."""
    schema = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
    tool = {"type": "function", "function": {"name": "weather", "parameters": schema | {"additionalProperties": False}}}
    async with talking(run_stack) as (stack, caller):
        for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
            for seed in range(4):
                asked = {"tools": [tool], "tool_choice": choice, "parallel_tool_calls": False, "seed": seed}
                if stream:
                    [said] = await streamed(caller, **asked)
                    [(_, name, arguments)], reason = said["calls"], said["finish_reason"]
                else:
                    [answer] = (await create(caller, **asked)).choices
                    [(name, arguments)], reason = calls_of(answer), answer.finish_reason
                assert (name, reason) == ("weather", "tool_calls")
                assert json.loads(arguments)["city"] in ("Rome", "Oslo")
        assert all(form.json_schema for form in stack.executor.compiled)


async def test_what_cannot_be_forced_is_named(run_stack: StackFactory) -> None:
    impossible = {"type": "object", "properties": {"x": {"type": "string", "pattern": "(?=a)"}}, "required": ["x"]}
    tool = {"type": "function", "function": {"name": "weather", "parameters": impossible}}
    async with talking(run_stack) as (_, caller):
        for fields, param in (
            ({"tools": [tool], "tool_choice": "required"}, "tools[0].function.parameters"),
            ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format"),
        ):
            with pytest.raises(openai.BadRequestError) as caught:
                await create(caller, **fields)
            assert caught.value.param == param


CITIES: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
STRICT: dict[str, Any] = {"type": "function", "function": {"name": "weather", "parameters": CITIES, "strict": True}}
LISTED = TEMPLATE.replace("<tool_call>", "[TOOL_CALLS] ")
# A template, special tokens, and a call in its form with arguments that do not fit.
FREE_CALLS: dict[str, tuple[str, tuple[str, ...], str]] = {
    "hermes": (TEMPLATE, (), '<tool_call>{"name": "weather", "arguments": {"town": 5}}</tool_call>'),
    "hermes with line breaks": (
        TEMPLATE.replace("<tool_call>", "<tool_call>\n"),
        (),
        '<tool_call>\n{"name": "weather", "arguments": {"town": 5}}\n</tool_call>',
    ),
    "hermes with special tokens": (
        TEMPLATE,
        ("<tool_call>", "</tool_call>"),
        '<tool_call>{"name": "weather", "arguments": {"town": 5}}</tool_call>',
    ),
    "mistral, listed": (LISTED, ("[TOOL_CALLS]",), '[TOOL_CALLS] [{"name": "weather", "arguments": {"town": 5}}]'),
    "mistral, by name": (
        LISTED + "{# [ARGS] #}",
        ("[TOOL_CALLS]", "[ARGS]"),
        '[TOOL_CALLS]weather[ARGS]{"town": 5}',
    ),
}


@pytest.mark.parametrize(("template", "special", "call"), FREE_CALLS.values(), ids=FREE_CALLS)
async def test_a_strict_tool_gets_arguments_that_fit(
    run_stack: StackFactory, template: str, special: tuple[str, ...], call: str
) -> None:
    loose = {"type": "function", "function": STRICT["function"] | {"strict": False}}
    async with talking(run_stack, f"So. {call}", template, special) as (stack, caller):
        [choice] = (await create(caller, tools=[loose, TIME])).choices
        assert calls_of(choice) == [("weather", '{"town": 5}')]
        for fields in ({"tools": [STRICT, TIME]}, {"tools": [TIME, STRICT], "parallel_tool_calls": False}):
            [choice] = (await create(caller, **fields)).choices
            assert choice.message.content.startswith("So.")
            name, arguments = calls_of(choice)[0]
            assert (name, json.loads(arguments)["city"] in ("Rome", "Oslo")) == ("weather", True)
        # Other text, and calls of other tools, are as free as ever.
        for text in ("So it is.", "So. " + call.replace("weather", "time")):
            stack.executor.say(text)
            [free], [bound] = [(await create(caller, tools=[one, TIME])).choices for one in (loose, STRICT)]
            assert (bound.message.content, calls_of(bound)) == (free.message.content, calls_of(free))


async def test_a_strict_tool_is_refused_where_its_arguments_cannot_be_made_to_fit(run_stack: StackFactory) -> None:
    impossible = {"type": "object", "properties": {"x": {"type": "string", "pattern": "(?=a)"}}, "required": ["x"]}
    tool = {"name": "weather", "parameters": impossible}
    strict = {"type": "function", "function": tool | {"strict": True}}
    async with talking(run_stack, "hello") as (_, caller):
        with pytest.raises(openai.BadRequestError) as caught:
            await create(caller, tools=[strict, TIME])
        assert caught.value.param == "tools[0].function.parameters"
        assert "look-ahead" in caught.value.message
        loose = {"type": "function", "function": tool}
        for fields in ({"tools": [loose]}, {"tools": [strict], "tool_choice": "none"}):
            assert (await create(caller, **fields)).choices[0].message.content == "hello"


async def test_a_form_of_the_request_counts_for_more_than_a_strict_tool(run_stack: StackFactory) -> None:
    form = {"type": "json_schema", "json_schema": {"schema": {"enum": [5]}}}
    async with talking(run_stack, ONE) as (_, caller):
        assert (await create(caller, tools=[STRICT], response_format=form)).choices[0].message.content == "5"


async def test_in_forms_that_nothing_marks_a_strict_tool_is_as_any_other(run_stack: StackFactory) -> None:
    text = '{"name": "weather", "parameters": {"town": 5}}'
    async with talking(run_stack, text, tool_call_parser="llama3_json") as (stack, caller):
        [choice] = (await create(caller, tools=[STRICT])).choices
        assert calls_of(choice) == [("weather", '{"town": 5}')]
        assert stack.executor.compiled == []
