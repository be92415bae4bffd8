"""HTTP fields for the form of an output: how each is translated, and which are refused by name."""

from typing import Any

import pytest
from pydantic import ValidationError

from protos.kvcommon.v1 import kvcommon_pb2 as common
from protos.rpc.errors import InvalidField
from scheduler.frontend.openai import translate
from scheduler.frontend.openai.errors import from_service
from scheduler.frontend.openai.requests import ChatCompletionRequest, CompletionRequest

HELLO = [{"role": "user", "content": "hello"}]
SCHEMA = {"type": "object", "properties": {"é": {"type": "string"}}}
SCHEMA_TEXT = '{"type": "object", "properties": {"é": {"type": "string"}}}'
OBJECT = common.StructuredOutput(json_schema='{"type": "object"}')
OF_SCHEMA = common.StructuredOutput(json_schema=SCHEMA_TEXT)
OF_REGEX = common.StructuredOutput(regex="a+")
OF_CHOICE = common.StructuredOutput(choice=common.TextChoice(texts=["a", "b"]))
OF_GRAMMAR = common.StructuredOutput(grammar="start: /a/")
TAG = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f"]}
TAG_TEXT = (
    '{"type": "structural_tag", "structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}], "triggers": ["<f"]}'
)
OF_TAG = common.StructuredOutput(
    structural_tags=common.StructuralTags(
        tags=[common.StructuralTag(begin="<f>", json_schema=SCHEMA_TEXT, end="</f>")], triggers=["<f"]
    )
)
FORMS: list[tuple[dict[str, Any], common.StructuredOutput | None]] = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": None, "structured_outputs": None, "guided_json": None}, None),
    ({"response_format": {"type": "json_object"}}, OBJECT),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}}, OF_SCHEMA),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "description": "d", "strict": True, "schema": SCHEMA_TEXT},
            }
        },
        OF_SCHEMA,
    ),
    ({"response_format": {"type": "structural_tag", **TAG}}, OF_TAG),
    ({"structured_outputs": {"json": SCHEMA}}, OF_SCHEMA),
    ({"structured_outputs": {"json": SCHEMA_TEXT, "disable_any_whitespace": True}}, OF_SCHEMA),
    ({"structured_outputs": {"regex": "a+"}}, OF_REGEX),
    ({"structured_outputs": {"choice": ["a", "b"]}}, OF_CHOICE),
    ({"structured_outputs": {"grammar": "start: /a/"}}, OF_GRAMMAR),
    ({"structured_outputs": {"json_object": True}}, OBJECT),
    ({"structured_outputs": {"structural_tag": TAG}}, OF_TAG),
    ({"guided_json": SCHEMA}, OF_SCHEMA),
    ({"guided_regex": "a+"}, OF_REGEX),
    ({"guided_choice": ["a", "b"]}, OF_CHOICE),
    ({"guided_grammar": "start: /a/"}, OF_GRAMMAR),
    ({"regex": "a+"}, OF_REGEX),
    ({"ebnf": "start: /a/"}, OF_GRAMMAR),
    ({"json_schema": SCHEMA_TEXT}, OF_SCHEMA),
]


@pytest.mark.parametrize(("fields", "form"), FORMS)
def test_each_field_becomes_a_form(fields: dict[str, Any], form: common.StructuredOutput | None) -> None:
    chat = translate.chat(ChatCompletionRequest(messages=HELLO, **fields))
    [completion] = translate.completion(CompletionRequest(prompt="x", **fields))
    for message in (chat, completion):
        assert message.HasField("structured_output") == (form is not None)
        assert message.structured_output == (form or common.StructuredOutput())


def test_a_structural_tag_may_be_a_text() -> None:
    request = ChatCompletionRequest(messages=HELLO, structured_outputs={"structural_tag": TAG_TEXT})  # type: ignore[arg-type]
    [tag] = translate.chat(request).structured_output.structural_tags.tags
    assert (tag.begin, tag.json_schema, tag.end) == ("<f>", "{}", "</f>")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema is missing"),
    ({"response_format": {"type": "structural_tag", "triggers": ["x"]}}, "response_format.structures is missing"),
    ({"structured_outputs": {}}, "structured_outputs must have one form"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs must have one form"),
    (
        {"structured_outputs": {"regex": "a", "choice": ["b"]}},
        "structured_outputs.choice cannot be given together with structured_outputs.regex",
    ),
    ({"regex": "a", "ebnf": "b"}, "ebnf cannot be given together with regex"),
    (
        {"response_format": {"type": "json_object"}, "guided_json": {}},
        "guided_json cannot be given together with response_format",
    ),
    ({"logit_bias": {"x": 1}}, "logit_bias.x must be named by a token id"),
    ({"logit_bias": {"-5": 1}}, "logit_bias.-5 must be named by a token id"),
    ({"logit_bias": {"9" * 12: 1}}, "logit_bias.999999999999 must be named by a token id"),
]
INVALID: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "yaml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}, "response_format.json_schema.schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}}, "must be a JSON Schema"),
    ({"structured_outputs": {"jason": {}}}, "structured_outputs.jason"),
    ({"structured_outputs": {"choice": "a"}}, "structured_outputs.choice"),
    ({"structured_outputs": {"structural_tag": "{"}}, "must be the JSON text of a structural tag"),
    ({"guided_json": "\ud800"}, "unpaired surrogate"),
    ({"guided_choice": ["a", "\ud800"]}, "unpaired surrogate"),
    ({"logit_bias": {"5": "x"}}, "logit_bias.5"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"bad_words": "x"}, "bad_words"),
    ({"allowed_token_ids": [-1]}, r"allowed_token_ids.0"),
]


@pytest.mark.parametrize(("fields", "words"), REFUSED)
def test_what_no_message_has_is_refused_by_name(fields: dict[str, Any], words: str) -> None:
    request = CompletionRequest(prompt="x", **fields)
    with pytest.raises(InvalidField) as caught:
        translate.completion(request)
    error = from_service(caught.value, ()).body["error"]
    assert error["message"].startswith(words)
    assert words.startswith(str(error["param"]))


@pytest.mark.parametrize(("fields", "words"), INVALID)
def test_a_wrong_type_is_refused_by_name(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        CompletionRequest(prompt="x", **fields)


NAMED = [
    ({"response_format": {"type": "json_object"}}, "json_schema", "response_format"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}}},
        "json_schema",
        "response_format.json_schema.schema",
    ),
    ({"structured_outputs": {"regex": "a"}}, "regex", "structured_outputs.regex"),
    ({"guided_choice": ["a"]}, "choice", "guided_choice"),
    ({"ebnf": "a"}, "grammar", "ebnf"),
    ({"response_format": {"type": "structural_tag", **TAG}}, "structural_tags", "response_format"),
    (
        {"structured_outputs": {"structural_tag": TAG}},
        "structural_tags.tags[0].begin",
        "structured_outputs.structural_tag.structures[0].begin",
    ),
]


@pytest.mark.parametrize(("fields", "ours", "theirs"), NAMED)
def test_an_error_of_the_compiler_names_the_field_of_the_request(
    fields: dict[str, Any], ours: str, theirs: str
) -> None:
    request = CompletionRequest(prompt="x", **fields)
    error = from_service(InvalidField(f"structured_output.{ours}", "cannot be used: x"), translate.names(request))
    assert error.body["error"]["param"] == theirs
    assert error.body["error"]["message"] == f"{theirs} cannot be used: x"


@pytest.mark.parametrize("form", ["json_schema", "structural_tags"])
def test_an_error_about_the_form_of_calls_names_the_tools(form: str) -> None:
    names = translate.names(ChatCompletionRequest(messages=HELLO))
    error = from_service(InvalidField(f"structured_output.{form}", "cannot be used: x"), names).body["error"]
    assert error["param"] == "tools"
