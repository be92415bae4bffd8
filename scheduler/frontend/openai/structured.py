"""The forms that an output may be forced to have, under the names of OpenAI, vLLM and SGLang."""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from protos.kvcommon.v1 import kvcommon_pb2 as common
from scheduler.frontend.openai.errors import FieldError
from scheduler.frontend.openai.extensions import Items, StrictModel, Text, is_encodable

if TYPE_CHECKING:
    from scheduler.frontend.openai.requests import GenerationFields

# JSON Schema of any object.
ANY_OBJECT = '{"type": "object"}'

# A form with the path of the field that asks for it.
Form = tuple[str, common.StructuredOutput]


def _schema_text(value: object) -> object:
    if not isinstance(value, str | dict | bool):
        raise ValueError("must be a JSON Schema: an object, or its text")
    try:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    except RecursionError as error:
        raise ValueError("is nested too deeply") from error
    if not is_encodable(text):
        raise ValueError("must not have an unpaired surrogate")
    return text


# A JSON Schema, which is converted to its text.
Schema = Annotated[
    str, BeforeValidator(_schema_text), WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "string"}]})
]
FormText = Annotated[Text, Field(json_schema_extra={"minLength": 1})]
Choice = Annotated[Items[FormText], Field(json_schema_extra={"minItems": 1})]


class JsonSchemaFormat(StrictModel):
    """A named JSON Schema. The output always follows it, with `strict` or without."""

    name: Text = ""
    description: Text | None = None
    schema_: Schema = Field(alias="schema")
    strict: bool | None = None


class StructureTag(StrictModel):
    """A structured part of a text."""

    begin: FormText
    schema_: Schema = Field(alias="schema")
    end: Text = ""


class StructuralTag(StrictModel):
    """Free text in which a structured part follows each trigger."""

    type: Literal["structural_tag"] = "structural_tag"
    structures: Annotated[Items[StructureTag], Field(json_schema_extra={"minItems": 1})]
    triggers: Choice

    def form(self) -> common.StructuredOutput:
        """As a message."""
        tags = [
            common.StructuralTag(begin=part.begin, json_schema=part.schema_, end=part.end) for part in self.structures
        ]
        return common.StructuredOutput(structural_tags=common.StructuralTags(tags=tags, triggers=self.triggers))


# Fields of a response_format, and the type to which each belongs.
_FIELDS = {"json_schema": "json_schema", "structures": "structural_tag", "triggers": "structural_tag"}


class ResponseFormat(StrictModel):
    """OpenAI's response_format, with the structural tags of other servers."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    structures: Items[StructureTag] | None = None
    triggers: Choice | None = None

    def form(self, path: str) -> Form | None:
        """None for free text. Raises FieldError for a field that is missing, or of another type."""
        for name, kind in _FIELDS.items():
            if getattr(self, name) is not None and self.type != kind:
                raise FieldError(f"{path}.{name}", f"needs type {kind}")
        match self.type:
            case "json_object":
                return path, common.StructuredOutput(json_schema=ANY_OBJECT)
            case "json_schema":
                if self.json_schema is None:
                    raise FieldError(f"{path}.json_schema", "is missing")
                return f"{path}.json_schema.schema", common.StructuredOutput(json_schema=self.json_schema.schema_)
            case "structural_tag":
                for name in ("structures", "triggers"):
                    if getattr(self, name) is None:
                        raise FieldError(f"{path}.{name}", "is missing")
                return path, StructuralTag(structures=self.structures or [], triggers=self.triggers or []).form()
        return None


def _structural_tag(value: object) -> object:
    """Parses the object's JSON text, which vLLM takes."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ValueError("must be the JSON text of a structural tag") from error


class StructuredOutputs(StrictModel):
    """vLLM's structured_outputs: exactly one form. White space in JSON is fixed, whatever the options are."""

    json_: Schema | None = Field(None, alias="json")
    regex: FormText | None = None
    choice: Choice | None = None
    grammar: FormText | None = None
    json_object: bool | None = None
    structural_tag: Annotated[StructuralTag, BeforeValidator(_structural_tag)] | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: Literal[False] | None = None

    def forms(self, path: str) -> Iterator[Form]:
        """Yields the forms that are given."""
        yield from _named(path + ".json", self.json_, "json_schema")
        yield from _named(path + ".regex", self.regex, "regex")
        yield from _named(path + ".choice", self.choice, "choice")
        yield from _named(path + ".grammar", self.grammar, "grammar")
        if self.json_object:
            yield path + ".json_object", common.StructuredOutput(json_schema=ANY_OBJECT)
        if self.structural_tag is not None:
            yield path + ".structural_tag", self.structural_tag.form()


def form_of(request: "GenerationFields") -> Form | None:
    """Returns the form that a request asks for, if any. Raises FieldError for several or incomplete forms."""
    forms = list(_forms(request))
    if len(forms) > 1:
        raise FieldError(forms[1][0], f"cannot be given together with {forms[0][0]}")
    if request.structured_outputs is not None and not list(request.structured_outputs.forms("")):
        raise FieldError("structured_outputs", "must have one form: json, regex, choice, grammar or another")
    return forms[0] if forms else None


def _forms(request: "GenerationFields") -> Iterator[Form]:
    if request.response_format is not None and (form := request.response_format.form("response_format")):
        yield form
    if request.structured_outputs is not None:
        yield from request.structured_outputs.forms("structured_outputs")
    yield from _named("guided_json", request.guided_json, "json_schema")
    yield from _named("guided_regex", request.guided_regex, "regex")
    yield from _named("guided_choice", request.guided_choice, "choice")
    yield from _named("guided_grammar", request.guided_grammar, "grammar")
    yield from _named("regex", request.regex, "regex")
    yield from _named("ebnf", request.ebnf, "grammar")
    yield from _named("json_schema", request.json_schema, "json_schema")


def _named(path: str, value: str | list[str] | None, kind: str) -> Iterator[Form]:
    """Yields the form of a field if the field is given."""
    if isinstance(value, list):
        yield path, common.StructuredOutput(choice=common.TextChoice(texts=value))
    elif value is not None:
        form = common.StructuredOutput()
        setattr(form, kind, value)
        yield path, form
