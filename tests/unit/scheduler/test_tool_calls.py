"""Calls and reasoning in an output's text: every form, text that only looks like a call, any split into pieces."""

import json
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.frontend.chat_output import OutputForms, OutputParser, OutputPiece
from scheduler.frontend.tool_calls.forms import FORMS, form_of
from scheduler.request import ToolUse
from tests.support.patience import speed_factor

NAMES = frozenset({"f", "g", "get_weather"})
ANY, NAMED = ToolUse(NAMES, is_required=True), ToolUse(NAMES, is_required=True, name="f")

Calls = list[tuple[str, str]]


def read(
    form: str, text: str, pieces: list[str] | None = None, use: ToolUse | None = None, **options: bool
) -> tuple[str, str, Calls]:
    """Reasoning, content, and each call's name and arguments."""
    parser = OutputParser(
        OutputForms(form, options.get("thinks", False)),
        use or ToolUse(NAMES, single=options.get("single", False)),
        is_thinking=options.get("is_thinking", False),
    )
    whole = OutputPiece()
    pieces = [text] if pieces is None else pieces
    for number, piece in enumerate(pieces, 1):
        added = parser.push(piece, last=number == len(pieces))
        whole.reasoning += added.reasoning
        whole.add([added.content])
        whole.add(added.calls)
    assert [call.index for call in whole.calls] == list(range(len(whole.calls)))
    return whole.reasoning, whole.content, [(call.name, call.arguments) for call in whole.calls]


# Form, text, content, calls.
FOUND: list[tuple[str, str, str, Calls]] = [
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": [1, -2.5e3, true, null, "x"]}}\n</tool_call>', "",
     [("f", '{"a": [1, -2.5e3, true, null, "x"]}')]),
    ("hermes", 'Let me see.\n<tool_call>{"name":"f","arguments":{}}</tool_call>\n<tool_call>{"name":"g"}</tool_call>\n',
     "Let me see.", [("f", "{}"), ("g", "{}")]),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call> Done. ', " Done. ", [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"i": [{"name": 1}], "name": "g", "arguments": {"<tool_call>": "</tool_call>"}}</tool_call>',
     "", [("g", '{"<tool_call>": "</tool_call>"}')]),
    # A closing tag may be missing, and a line break may be no escape.
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "x\ny"}}', "", [("f", '{"a": "x\\ny"}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\\u00e9\\n\\"日本"}}</tool_call>', "",
     [("f", '{"a": "\\u00e9\\n\\"日本"}')]),
    # Several calls in one pair of tags.
    ("hermes", 'So: <tool_call>\n{"name": "f", "arguments": {"a": 1}}\n{"name": "g", "arguments": {}}\n</tool_call>',
     "So:", [("f", '{"a": 1}'), ("g", "{}")]),
    ("hermes", '<tool_call>{"name": "f"}, {"name": "g"}</tool_call><tool_call>{"name": "f"}</tool_call>', "",
     [("f", "{}"), ("g", "{}"), ("f", "{}")]),
    # Arguments that are null, and an object in a string.
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"parameters": null, "name": "f"}</tool_call>', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"\\\\u00e9\\\\\\"\\"} "}</tool_call>', "",
     [("f", '{"a": "\\u00e9\\""}')]),
    ("hermes", '<tool_call>{"arguments": " {}", "name": "f"}</tool_call>', "", [("f", "{}")]),
    # Unpaired surrogates.
    ("hermes",
     r'<tool_call>{"name": "f", "arguments": {"a": "\ud83d\uDE00 \ud83d \ude00\ud83d\ud83d\ude00\ud83d\u0041"}}', "",
     [("f", r'{"a": "\ud83d\uDE00 \ufffd \ufffd\ufffd\ud83d\ude00\ufffd\u0041"}')]),
    ("llama3_json", '{"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
    ("llama3_json", ' <|python_tag|>{"type": 1, "name": "f", "parameters": {}}; {"name": "g", "parameters": {}}',
     "", [("f", "{}"), ("g", "{}")]),
    ("llama3_json", '{"name": "f", "parameters": {}}\nand so on', "\nand so on", [("f", "{}")]),
    ("pythonic", '[f(a=1, b="x)]", c=[-1, {"z": (True, none)}])]'.replace("none", "null"), "",
     [("f", '{"a": 1, "b": "x)]", "c": [-1, {"z": [true, null]}]}')]),
    ("pythonic", "<|python_start|>[get_weather(city='Köln', raw='it\\'s\\d'), g()]<|python_end|>", "",
     [("get_weather", '{"city": "Köln", "raw": "it\'s\\\\d"}'), ("g", "{}")]),
    ("pythonic", "[f(a=1), g(), ]", "", [("f", '{"a": 1}'), ("g", "{}")]),
    # Parameters named like keywords of Python, and a line break that is no escape.
    ("pythonic", "[f(from='Rome', class = {'in': 'if=1'}, x_2=[1], _y='a\nb')]", "",
     [("f", '{"from": "Rome", "class": {"in": "if=1"}, "x_2": [1], "_y": "a\\nb"}')]),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]', "",
     [("f", '{"a": 1}'), ("g", "{}")]),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}},]', "", [("f", '{"a": 1}')]),
    ("mistral", 'One moment. [TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]Ab3[ARGS]{}', "One moment.",
     [("f", '{"a": 1}'), ("g", "{}")]),
    ("mistral", '[TOOL_CALLS]f{"a": {"b": []}}', "", [("f", '{"a": {"b": []}}')]),
    ("mistral", '[TOOL_CALLS]{"name": "f", "arguments": {}}', "", [("f", "{}")]),
]  # fmt: skip
# Text that looks like calls. All of it is content.
LIKE_CALLS: list[tuple[str, str]] = [
    *((form, "plain text, [brackets] {braces}\n") for form in FORMS),
    *((form, "") for form in FORMS),
    *((form, " \n") for form in FORMS),
    ("hermes", "a <tool_cal"),
    ("hermes", "a <tool_call>"),
    ("hermes", '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": "a"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": "[1]"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{} {}"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": nil}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": 1, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f"'),
    ("hermes", '<tool_call>{"name": "f",}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "x": 01}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "x": nan}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {"a": "\\x"}, "name": "f"}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": ' + '{"a":' * 70 + "1" + "}" * 70 + ', "name": "f"}'),
    ("hermes", '<tool_call>{"name": "f", "x": ' + "1" * 5000 + "}"),
    ("hermes", "<tool_call>[f()]</tool_call>"),
    ("llama3_json", '{"name": "Bob", "parameters": {}}'),
    ("llama3_json", '{"city": "Rome"}'),
    ("llama3_json", '<|python_tag|>print({"name": "f"})'),
    ("llama3_json", 'Call {"name": "f", "parameters": {}}'),
    ("pythonic", "[1, 2]"),
    ("pythonic", "[unknown(a=1)]"),
    ("pythonic", "[f(1)]"),
    ("pythonic", "[f(**x)]"),
    ("pythonic", "[f(a=x)]"),
    ("pythonic", "[f(a=1e999)]"),
    ("pythonic", "[f(a=1, a=2)]"),
    ("pythonic", "[f(a={1: 2})]"),
    ("pythonic", "[f(a=b'x')]"),
    ("pythonic", "[f(a=']"),
    ("pythonic", "[f(a=(1]"),
    ("pythonic", "[f(a=" + "(" * 100),
    ("pythonic", "[f(a='\\ud800')]"),
    ("pythonic", "[f (a=1)]"),
    ("mistral", "[TOOL_CALLS] hello"),
    ("mistral", "[TOOL_CALLS]unknown{}"),
    ("mistral", "[TOOL_CALLS]f[ARGS]"),
    ("mistral", "[TOOL_CALLS] []"),
    ("mistral", "see [TOOL_CALL]f{}"),
]


@pytest.mark.parametrize(("form", "text", "content", "calls"), FOUND)
def test_calls_are_found_in_every_form(form: str, text: str, content: str, calls: Calls) -> None:
    assert read(form, text) == ("", content, calls)
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls)
    assert read(form, text, list(text)) == ("", content, calls)


@pytest.mark.parametrize(("form", "text"), LIKE_CALLS)
def test_text_that_only_looks_like_a_call_is_content(form: str, text: str) -> None:
    assert read(form, text) == ("", text, [])
    assert read(form, text, list(text)) == ("", text, [])


@pytest.mark.parametrize("form", ["none", ""])
def test_calls_are_looked_for_only_in_a_known_form_and_with_tools(form: str) -> None:
    text = FOUND[0][1]
    assert read(form, text) == ("", text, [])
    assert read("hermes", text, use=ToolUse()) == ("", text, [])


def test_a_call_that_ends_too_soon_keeps_what_there_is_of_it() -> None:
    assert read("hermes", '<tool_call>{"name": "f", "arguments": {"a": "x') == ("", "", [("f", '{"a": "x')])
    assert read("mistral", '[TOOL_CALLS]f{"a": ') == ("", "", [("f", '{"a": ')])
    # Half an escape is neither argument nor content.
    for cut in ("\\", "\\u", "\\u00", "\\ud83d", "\\ud83d\\", "\\ud83d\\ude"):
        assert read("hermes", f'<tool_call>{{"name": "f", "arguments": {{"a": "x{cut}')[1] == ""
    # Text that was sent as arguments stays so; the rest is content.
    broken = '<tool_call>{"name": "f", "arguments": {"a": 1} x}</tool_call>'
    assert read("hermes", broken) == ("", "x}</tool_call>", [("f", '{"a": 1}')])
    assert read("pythonic", "[f(), g(1)] or") == ("", ", g(1)] or", [("f", "{}")])


@pytest.mark.parametrize("form", FORMS)
def test_nothing_follows_a_single_call(form: str) -> None:
    for found, text, content, calls in FOUND:
        if found == form:
            before = content if text.startswith(content) else ""
            assert read(form, text, single=True) == ("", before, calls[:1])


def test_arguments_come_as_soon_as_they_are_known_to_be_arguments() -> None:
    parser = OutputParser(OutputForms("hermes", False), ToolUse(NAMES), is_thinking=False)
    text = '<tool_call>{"name": "f", "arguments": {"text": "one two"}}</tool_call>'
    pieces = [parser.push(character).calls for character in text]
    sent = [call for calls in pieces for call in calls]
    assert [call.name for call in sent] == ["f", *[""] * (len(sent) - 1)]
    assert len(sent) > 15
    assert parser.num_complete == 1


@pytest.mark.parametrize(
    ("use", "text", "content", "calls"),
    [
        (ANY, '[{"name": "f", "parameters": {"a": 1}}, {"name": "g", "parameters": {}}]', "",
         [("f", '{"a": 1}'), ("g", "{}")]),
        (ANY, '[{"name": "f", "parameters": {"a": 1', "", [("f", '{"a": 1')]),
        (ANY, "no call", "no call", []),
        (NAMED, ' {"a": [1]}\n', "", [("f", '{"a": [1]}')]),
        (NAMED, '{"a": ', "", [("f", '{"a": ')]),
        (NAMED, "no call", "no call", []),
    ],
)  # fmt: skip
def test_required_calls_are_the_whole_output_whatever_the_models_form(
    use: ToolUse, text: str, content: str, calls: Calls
) -> None:
    for form in ("none", "", "hermes", "mistral"):
        for thinks in (False, True):
            assert read(form, text, use=use, thinks=thinks, is_thinking=thinks) == ("", content, calls)
            assert read(form, text, list(text), use=use, thinks=thinks) == ("", content, calls)


@pytest.mark.parametrize(
    ("text", "is_thinking", "reasoning", "content"),
    [
        ("<think>\n2+2\n\nis</think>\n\n4 ", False, "2+2\n\nis", "4 "),
        ("2+2 </think>4", True, "2+2", "4"),
        ("<think>2+2</think>4", True, "2+2", "4"),
        ("\n<think> 2+2", False, "2+2", ""),
        ("2+2", True, "2+2", ""),
        ("<think></think>4", False, "", "4"),
        ("4 <think>no</think>", False, "", "4 <think>no</think>"),
        (" <thin", False, "", " <thin"),
        ("2+2</thin", True, "2+2</thin", ""),
        ("</think>4", False, "", "</think>4"),
    ],
)
def test_reasoning_is_what_stands_in_tags_at_the_beginning(
    text: str, is_thinking: bool, reasoning: str, content: str
) -> None:
    for pieces in ([text], list(text)):
        found = read("none", text, pieces, use=ToolUse(), thinks=True, is_thinking=is_thinking)
        assert found == (reasoning, content, [])
    assert read("none", text, use=ToolUse()) == ("", text, [])


@pytest.mark.parametrize(("form", "text", "content", "calls"), FOUND)
def test_calls_are_found_behind_reasoning_and_not_in_it(form: str, text: str, content: str, calls: Calls) -> None:
    thought = f"I could say {text} now"
    whole = f"<think>{thought}</think>\n\n{text}"
    assert read(form, whole, thinks=True) == (thought, content.lstrip() if text[0] == " " else content, calls)
    assert read(form, whole, list(whole), thinks=True) == read(form, whole, thinks=True)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=6),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=4), values, max_size=3),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(st.sampled_from(["a", "b", "city"]), JSON, max_size=3)
CALLS = st.lists(st.tuples(st.sampled_from(sorted(NAMES)), ARGUMENTS), min_size=1, max_size=3)
Said = list[tuple[str, dict[str, Any]]]


def _object(name: str, arguments: dict[str, Any], field: str = "arguments") -> str:
    return json.dumps({"name": name, field: arguments}, ensure_ascii=False)


def _python(name: str, arguments: dict[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


WRITE: dict[str, Callable[[Said], str]] = {
    "hermes": lambda calls: "\n".join(f"<tool_call>\n{_object(*call)}\n</tool_call>" for call in calls),
    "llama3_json": lambda calls: "; ".join(_object(*call, "parameters") for call in calls),
    "pythonic": lambda calls: f"[{', '.join(_python(*call) for call in calls)}]",
    "mistral": lambda calls: "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(said)}" for name, said in calls),
}


@pytest.mark.parametrize("form", FORMS)
@given(CALLS, st.randoms())
def test_every_call_is_found_however_the_text_is_split(form: str, calls: Said, rng: random.Random) -> None:
    text = WRITE[form](calls)
    _, content, found = read(form, text, split(text, rng))
    assert content == ""
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls


PIECES = [
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<think>", "</think>",
    '{"name": "f"', ', "arguments": {', '"a": ', "1", '"x"', '"', "}", "}}", "{", "[", "]", "(", ")", "f(", "f", "a=",
    ",", ";", ":", "\\", "'", " ", "\n", "g", "text", "é", "-", "true", '{"name": "g", "parameters": {}}',
]  # fmt: skip


@pytest.mark.parametrize("form", [*FORMS, "any", "named"])
@given(st.lists(st.sampled_from(PIECES), max_size=14).map("".join), st.randoms(), st.booleans(), st.booleans())
@settings(max_examples=300)
def test_any_split_of_any_text_gives_the_same(
    form: str, text: str, rng: random.Random, thinks: bool, is_thinking: bool
) -> None:
    use = {"any": ANY, "named": NAMED}.get(form)
    whole = read(form, text, use=use, thinks=thinks, is_thinking=is_thinking)
    for pieces in (list(text), split(text, rng)):
        assert read(form, text, pieces or [""], use=use, thinks=thinks, is_thinking=is_thinking) == whole
    if not whole[2] and not thinks:
        assert whole[1] == text


def split(text: str, rng: random.Random) -> list[str]:
    places = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(6)))
    return [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]


@pytest.mark.parametrize(
    ("form", "unit"),
    [
        ("hermes", "<tool_call>"),
        ("hermes", '<tool_call>{"arguments": {"a": "'),
        ("hermes", '{"name": "f"}'),
        ("llama3_json", '{"name": '),
        ("pythonic", "[f(a='"),
        ("mistral", "[TOOL_CALLS]["),
        ("mistral", "[TOOL_CALLS]f"),
    ],
)
def test_no_output_takes_long_to_read(form: str, unit: str) -> None:
    text = unit * (60_000 // len(unit))
    began = time.thread_time()
    parser = OutputParser(OutputForms(form, True), ToolUse(NAMES), is_thinking=False)
    for at in range(0, len(text), 5):
        parser.push(text[at : at + 5])
    parser.push("", last=True)
    # On the event loop; it is spread over 12,000 tokens.
    assert time.thread_time() - began < 3 * speed_factor()


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{{ message.content }}", ""),
        ("return a json object within <tool_call></tool_call> XML tags", "hermes"),
        ("<tool_call>\n<function=example_function_name>\n<parameter=example>", ""),
        ("<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>", ""),
        ("{{ '[TOOL_CALLS] [' }}", "mistral"),
        ('Respond in the format {"name": function name, "parameters": dictionary of argument name}', "llama3_json"),
        ("{{- '<|python_tag|>' + message.content }}", "llama3_json"),
        ("you MUST put it in the format of [func_name1(params_name1=params_value1), func_name2(params)]", "pythonic"),
    ],
)
def test_the_form_is_what_the_template_shows(template: str, form: str) -> None:
    assert form_of(template) == form
    assert OutputForms.of(template) == OutputForms(form, False)
    assert OutputForms.of(template, calls="none", reasoning="think_tags") == OutputForms("none", True)
    assert OutputForms.of(f"{template}</think>").thinks
    assert not OutputForms.of(f"{template}</think>", reasoning="none").thinks


def test_ids_of_calls_are_new_and_as_the_models_template_takes_them() -> None:
    for form in ("hermes", "mistral"):
        ids = {OutputForms(form, False).new_call_id() for _ in range(100)}
        assert len(ids) == 100
        assert {len(call_id) for call_id in ids} == ({9} if form == "mistral" else {29})
