"""The schema that forces calls: it takes exactly the calls that the tools' own schemas take."""

import json
from typing import Any

import jsonschema
import pytest

from executor.core.grammars import Grammars
from executor.step import Grammar, GrammarKind
from protos.generation.v1 import generation_pb2 as pb
from scheduler.frontend.tool_calls.definitions import Tool, read_tools
from scheduler.frontend.tool_calls.schema import forced_calls_schema
from tests.support.scheduler.tokenizers import EOS, printable_tokenizer

# It refers to itself and to its definitions.
TREE = {
    "type": "object",
    "properties": {
        "value": {"$ref": "#/$defs/value"},
        "left": {"$ref": "#"},
        "default": {"$ref": "#/$defs/value"},
        "$ref": {"enum": [{"$ref": "#/x"}]},
    },
    "required": ["value"],
    "additionalProperties": False,
    "$defs": {"value": {"type": "integer"}},
}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def tools(**parameters: dict[str, Any] | None) -> list[Tool]:
    texts = [
        json.dumps(
            {"type": "function", "function": {"name": name} | ({} if schema is None else {"parameters": schema})}
        )
        for name, schema in parameters.items()
    ]
    return read_tools(pb.ChatInput(tools=texts))


def takes(schema: str, value: object) -> bool:
    return jsonschema.Draft202012Validator(json.loads(schema)).is_valid(value)


def test_the_schema_of_one_tool_is_that_of_its_parameters() -> None:
    known = tools(tree=TREE, city=CITY, none=None, bare={"properties": {"a": {"type": "string"}}})
    assert json.loads(forced_calls_schema(known, "city", single=False)) == CITY
    assert takes(forced_calls_schema(known, "tree", single=True), {"value": 1, "left": {"value": 2}})
    assert not takes(forced_calls_schema(known, "tree", single=True), {"value": 1, "left": {"value": "x"}})
    assert takes(forced_calls_schema(known, "none", single=False), {})
    assert not takes(forced_calls_schema(known, "none", single=False), {"a": 1})
    # Arguments are an object, whatever the schema leaves open.
    for name in ("none", "bare"):
        assert not takes(forced_calls_schema(known, name, single=False), ["x"])


def test_references_of_parameters_with_an_id_stay_theirs() -> None:
    place = "https://example.com/point"
    point: dict[str, Any] = {
        "$id": place,
        "properties": {"x": {"$ref": "#/$defs/x"}, "y": {"$ref": f"{place}#/$defs/x"}, "next": {"$ref": place}},
        "$defs": {"x": {"type": "integer"}},
    }
    schema = forced_calls_schema(tools(point=point), "", single=True)
    assert takes(schema, [{"name": "point", "parameters": {"x": 1, "y": 2, "next": {"x": 3}}}])
    for wrong in ({"x": "1"}, {"y": "1"}, {"next": {"x": "1"}}):
        assert not takes(schema, [{"name": "point", "parameters": wrong}])
    grammars = Grammars(printable_tokenizer().to_str().encode(), printable_tokenizer().get_vocab_size(), [EOS])
    grammars.matcher(Grammar(GrammarKind.JSON_SCHEMA, schema))


@pytest.mark.parametrize("single", [False, True])
def test_the_schema_of_all_tools_takes_calls_of_each(single: bool) -> None:
    schema = forced_calls_schema(tools(tree=TREE, city=CITY, none=None), "", single=single)
    jsonschema.Draft202012Validator.check_schema(json.loads(schema))
    tree = {"name": "tree", "parameters": {"value": 1, "left": {"value": 2, "default": 3, "$ref": {"$ref": "#/x"}}}}
    city, none = {"name": "city", "parameters": {"city": "Rome"}}, {"name": "none", "parameters": {}}
    for call in (tree, city, none):
        assert takes(schema, [call])
    assert takes(schema, [tree, city, none]) is not single
    for wrong in (
        [],
        tree,
        [{"name": "city", "parameters": tree["parameters"]}],
        [{"name": "other", "parameters": {}}],
        [{"name": "city"}],
        [city | {"more": 1}],
        [{"name": "tree", "parameters": {"value": 1, "left": {"value": "x"}}}],
        [{"name": "tree", "parameters": {"value": 1, "default": "x"}}],
        [{"name": "tree", "parameters": {"value": 1, "$ref": {"$ref": "#/$defs/tree/x"}}}],
    ):
        assert not takes(schema, wrong), wrong
