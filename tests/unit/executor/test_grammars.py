"""Forms of outputs: the tokens that a grammar allows, forms that cannot be compiled, and restrictions on tokens."""

import datetime
import json
import random
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor.core.grammars import MAX_GRAMMARS, Grammars, Matcher
from executor.core.restrictions import Restrictions, unpacked
from executor.errors import GrammarError
from executor.step import Grammar, GrammarKind, Sampling
from tests.support.heavy_grammar import FOLLOWED, HEAVY
from tests.support.scheduler.tokenizers import EOS, byte_level_tokenizer

TOKENIZER = byte_level_tokenizer()
VOCAB = TOKENIZER.get_vocab_size()
# Another id that ends outputs, as models for conversations have.
OTHER_EOS = 7
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yy"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(TOKENIZER.to_str().encode(), VOCAB, [EOS, OTHER_EOS])


def of(kind: str, text: object) -> Grammar:
    return Grammar(GrammarKind(kind), text if isinstance(text, str) else json.dumps(text))


def allowed(matcher: Matcher, drafts: Sequence[int] = ()) -> list[set[int]]:
    """The allowed ids after the output and after each draft."""
    masks = np.full((1 + len(drafts), -(-VOCAB // 32)), 0xFFFFFFFF, dtype=np.uint32)
    matcher.fill(masks, drafts)
    return [set(np.flatnonzero(unpacked(mask, VOCAB)).tolist()) for mask in masks]


def test_a_grammar_that_becomes_too_complex_says_at_which_row(grammars: Grammars) -> None:
    matcher, [letter] = grammars.matcher(of("grammar", HEAVY)), TOKENIZER.encode("a").ids

    def fill(drafts: Sequence[int]) -> tuple[int | None, list[int]]:
        """The failed row, and how many tokens may come in each row."""
        masks = np.full((1 + len(drafts), -(-VOCAB // 32)), 0xFFFFFFFF, dtype=np.uint32)
        return matcher.fill(masks, drafts), [int(unpacked(mask, VOCAB).sum()) for mask in masks]

    matcher.take([letter] * (FOLLOWED - 2))
    assert fill([letter, letter, letter]) == (2, [3, 1, 0, 0])
    # The drafts were wrong: the output goes on.
    assert fill([]) == (None, [3])
    matcher.take([letter])
    assert fill([letter + 1, letter]) == (None, [1, 0, 0])
    matcher.take([letter])
    assert fill([letter]) == fill([letter]) == (0, [0, 0])
    matcher.take([EOS])
    assert fill([]) == (None, [0])


def written(matcher: Matcher, luck: random.Random, most: int = 200) -> tuple[str, bool]:
    """A random text that the grammar allows, and whether it ended."""
    token_ids: list[int] = []
    while len(token_ids) < most:
        token_id = luck.choice(sorted(allowed(matcher)[0]))
        matcher.take([token_id])
        if token_id in (EOS, OTHER_EOS):
            return TOKENIZER.decode(token_ids, skip_special_tokens=False), True
        token_ids.append(token_id)
    return "", False


FORMS: dict[str, tuple[Grammar, object]] = {
    "JSON Schema": (of("json_schema", SCHEMA), lambda text: set(json.loads(text)) == {"a", "b"}),
    "regex": (of("regex", "[a-c]{2,4}(x|yz)?"), lambda text: re.fullmatch("[a-c]{2,4}(x|yz)?", text)),
    "choice": (of("choice", ["left", 'ri"ght', "straight on"]), lambda text: text in ("left", 'ri"ght', "straight on")),
    "Lark": (of("grammar", 'start: "a" b+\nb: "b" | "c"'), lambda text: text[0] == "a" and set(text[1:]) <= {*"bc"}),
    "GBNF": (of("grammar", 'root ::= "a" [bc]+'), lambda text: text[0] == "a" and set(text[1:]) <= {*"bc"}),
    "structural tags": (
        of("structural_tags", [["<f", "<f=g>", '{"type": "boolean"}', "</f>"]]),
        lambda text: text.count("<f=g>true</f>") + text.count("<f=g>false</f>") == text.count("<f"),
    ),
}


@pytest.mark.parametrize(("grammar", "fits"), FORMS.values(), ids=FORMS)
def test_every_text_that_a_grammar_ends_has_its_form(grammars: Grammars, grammar: Grammar, fits: object) -> None:
    luck, ended = random.Random(4), 0
    for _ in range(20):
        text, whole = written(grammars.matcher(grammar), luck)
        ended += whole
        assert not whole or fits(text), text  # type: ignore[operator]
    assert ended > 3


def test_json_has_single_spaces_behind_commas_and_colons(grammars: Grammars) -> None:
    matcher, text = grammars.matcher(of("json_schema", SCHEMA)), '{"a": 1, "b": "yy"}'
    matcher.take(TOKENIZER.encode(text).ids)
    assert allowed(matcher) == [{EOS, OTHER_EOS}]


def test_the_schema_true_writes_json_like_an_empty_schema(grammars: Grammars) -> None:
    matcher = grammars.matcher(of("json_schema", "true"))
    matcher.take(TOKENIZER.encode('{"a": ').ids)
    assert TOKENIZER.token_to_id("Ġ") not in allowed(matcher)[0]


@pytest.mark.parametrize("names", [True, {}, {"type": "string"}])
def test_keywords_that_forbid_nothing_are_no_obstacle(grammars: Grammars, names: object) -> None:
    nothing = {
        "propertyNames": names,
        "dependentRequired": {"a": []},
        "dependentSchemas": {"a": {}, "b": True},
        "dependencies": {},
        "not": False,
        "unevaluatedProperties": True,
        "unevaluatedItems": {},
    }
    matcher = grammars.matcher(
        of("json_schema", {"type": "object", "additionalProperties": {"type": "null"}} | nothing)
    )
    matcher.take(TOKENIZER.encode('{"b": null}').ids)
    assert allowed(matcher) == [{EOS, OTHER_EOS}]


@pytest.mark.parametrize(
    "schema", [{"not": True}, {"unevaluatedProperties": False}, {"dependentSchemas": {"a": False}}, {"not": {}}]
)
def test_keywords_that_forbid_something_are_refused(grammars: Grammars, schema: dict[str, object]) -> None:
    with pytest.raises(GrammarError):
        grammars.matcher(of("json_schema", {"type": "object"} | schema))


@pytest.mark.parametrize("is_open", [{}, {"additionalProperties": True}, {"additionalProperties": {}}])
def test_a_property_has_its_schema_however_its_name_is_spelled(grammars: Grammars, is_open: dict[str, object]) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]} | is_open

    def ends(text: str) -> bool:
        matcher = grammars.matcher(of("json_schema", schema))
        matcher.take(TOKENIZER.encode(text).ids)
        return allowed(matcher) == [{EOS, OTHER_EOS}]

    assert ends('{"a": 1}')
    assert ends('{"a": 1, "b": "x"}')
    assert not ends('{"a": 1, "\\u0061": "x"}')


@pytest.mark.parametrize("start", ["start", "?start", "!start", "// A rule\n?start"])
def test_a_lark_grammar_may_begin_with_a_modifier(grammars: Grammars, start: str) -> None:
    matcher = grammars.matcher(of("grammar", f'{start}: "a" b\n?b: "b"'))
    matcher.take(TOKENIZER.encode("ab").ids)
    assert allowed(matcher) == [{EOS, OTHER_EOS}]


@pytest.mark.parametrize(
    "format_", ["password", "binary", "byte", "int64", "path", "iri", "json-pointer", "uri-reference", "unknown"]
)
def test_a_format_that_is_not_known_is_an_annotation(grammars: Grammars, format_: str) -> None:
    secret = {"type": "string", "format": format_, "maxLength": 2}
    for schema in (
        secret,
        {"anyOf": [secret]},
        {"$ref": "#/$defs/s", "$defs": {"s": secret}},
        {"allOf": [{"format": format_}, secret]},
    ):
        matcher = grammars.matcher(of("json_schema", schema))
        matcher.take(TOKENIZER.encode('"é!').ids)
        assert allowed(matcher) == [{TOKENIZER.token_to_id('"')}]


@pytest.mark.parametrize(
    "format_", ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"]
)
def test_a_format_that_is_known_is_kept(grammars: Grammars, format_: str) -> None:
    free, kept = (
        grammars.matcher(of("json_schema", schema))
        for schema in ({"type": "string"}, {"type": "string", "format": format_})
    )
    for matcher in (free, kept):
        matcher.take(TOKENIZER.encode('"').ids)
    assert allowed(kept)[0] < allowed(free)[0]


@pytest.mark.parametrize(
    ("format_", "read", "good", "bad"),
    [
        (
            "date",
            datetime.date.fromisoformat,
            ["0001-01-31", "2026-12-01", "2028-02-29", "2000-02-29"],
            ["0000-02-01", "2026-13-01", "2026-02-29", "1900-02-29", "2026-02-30", "2026-04-31"],
        ),
        (
            "time",
            datetime.time.fromisoformat,
            ["20:09:27Z", "10:10:30.123456789-10:10"],
            ["23:59:60Z", "10:10:30.0123456789Z", "20:09:27z", "10:10"],
        ),
        (
            "date-time",
            datetime.datetime.fromisoformat,
            ["2026-12-01T20:09:27Z", "0999-01-01T00:00:00+01:00"],
            [
                "0000-01-01T00:00:00Z",
                "2026-12-01T23:59:60Z",
                "2026-12-01t20:09:27Z",
                "2100-02-29T00:00:00Z",
                "2026-12-01",
            ],
        ),
    ],
)
def test_times_are_those_that_programs_hold(
    grammars: Grammars, format_: str, read: Callable[[str], object], good: list[str], bad: list[str]
) -> None:
    def takes(schema: dict[str, object], text: str) -> bool:
        matcher = grammars.matcher(of("json_schema", schema))
        for token_id in TOKENIZER.encode(json.dumps(text)).ids:
            if token_id not in allowed(matcher)[0]:
                return False
            matcher.take([token_id])
        return EOS in allowed(matcher)[0]

    schema = {"type": "string", "format": format_}
    assert [takes(schema, text) for text in (*good, *bad)] == [True] * len(good) + [False] * len(bad)
    for text in good:
        read(text)
    luck = random.Random(format_)
    for _ in range(20):
        text, ended = written(grammars.matcher(of("json_schema", schema)), luck)
        assert ended
        read(json.loads(text))
    # Patterns and values of the schema hold beside the format.
    narrow = schema | {"pattern": f"^{good[0][:4]}"}
    assert [takes(narrow, text) for text in good] == [True] + [False] * (len(good) - 1)
    assert takes(schema | {"enum": [bad[0]]}, bad[0])
    for wrong in ({"format": ["date"]}, {"format": format_, "allOf": 5}, {"format": format_, "allOf": None}):
        with pytest.raises(GrammarError):
            grammars.matcher(of("json_schema", {"type": "string"} | wrong))


@pytest.mark.parametrize("number", [2**53 + 1, -(2**53) - 1, 12345678901234567890123, 10**400])
@pytest.mark.parametrize("keyword", ["const", "minimum", "exclusiveMaximum"])
def test_numbers_that_would_be_rounded_are_refused_by_keyword(grammars: Grammars, keyword: str, number: int) -> None:
    nested = {"type": "object", "properties": {"a": {"enum": [{"id": [number]}]}}}
    for named, schema in ((keyword, {"type": "integer", keyword: number}), ("enum", nested)):
        with pytest.raises(GrammarError, match=rf"^{named} has a whole number"):
            grammars.matcher(of("json_schema", schema))
    grammars.matcher(of("json_schema", {"type": "integer", "maximum": 2**53, "minimum": -(2**60)}))


def test_names_of_properties_and_given_values_are_no_keywords(grammars: Grammars) -> None:
    value = {"format": "password", "uniqueItems": False, "x-guidance": 1}
    schema = {
        "type": "object",
        "properties": {"format": {"const": value}, "uniqueItems": {"type": "array", "uniqueItems": False}},
        "required": ["format", "uniqueItems"],
        "additionalProperties": False,
    }
    matcher = grammars.matcher(of("json_schema", schema))
    matcher.take(TOKENIZER.encode(json.dumps({"format": value, "uniqueItems": [1, 1]})).ids)
    assert allowed(matcher) == [{EOS, OTHER_EOS}]


def test_further_items_are_those_behind_the_items_of_the_same_schema(grammars: Grammars) -> None:
    schema = {
        "allOf": [{"items": [{"type": "integer"}, {"type": "string"}]}],
        "items": [{"type": "integer"}],
        "additionalItems": {"type": "boolean"},
    }
    matcher = grammars.matcher(of("json_schema", schema))
    matcher.take(TOKENIZER.encode("[1, ").ids)
    assert TOKENIZER.token_to_id('"') not in allowed(matcher)[0]


def test_special_tokens_are_triggers_and_parts_of_tags_and_else_free() -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens(["<call>", "</call>", "<think>", "<end>", "<call_2>"])
    size = tokenizer.get_vocab_size()
    end = tokenizer.token_to_id("<end>")
    known = Grammars(tokenizer.to_str().encode(), size, [EOS, end])
    tags = [
        ["<call>", f'<call>{{"name": "{name}", "arguments": ', '{"type": "boolean"}', "}</call>"] for name in ("f", "g")
    ]

    def may_follow(text: str, *tokens: str) -> list[bool]:
        matcher = known.matcher(of("structural_tags", tags))
        masks = np.zeros((1, -(-size // 32)), dtype=np.uint32)
        matcher.take(tokenizer.encode(text).ids)
        matcher.fill(masks, ())
        allowed = unpacked(masks[0], size)
        return [bool(allowed[tokenizer.token_to_id(token)]) for token in tokens]

    everything = ("<call>", "</call>", "<think>", "<call_2>", "a", "<", "<end>", "<eos>")
    for free in ("", "so <think>I</call>", '<call>{"name": "f", "arguments": true}</call>\n and'):
        assert may_follow(free, *everything) == [True] * len(everything)
    for begun in ("<call>", "so <call>", '<call>{"name": "f", "arguments": true}</call><call>'):
        assert may_follow(begun, "{", *everything) == [True] + [False] * len(everything)
    for name in ("f", "g"):
        assert may_follow(f'<call>{{"name": "{name}", "arguments": ', "t", "1", '"') == [True, False, False]
    assert may_follow('<call>{"name": "', "f", "g", "h") == [True, True, False]
    assert may_follow('<call>{"name": "f", "arguments": true}', "</call>", "<", "a") == [True, False, False]
    # The same text with different tokens.
    matcher = known.matcher(of("structural_tags", tags))
    matcher.take([token for letter in "so <call>" for token in tokenizer.encode(letter).ids])
    masks = np.zeros((1, -(-size // 32)), dtype=np.uint32)
    matcher.fill(masks, ())
    assert np.flatnonzero(unpacked(masks[0], size)).tolist() == [tokenizer.token_to_id("{")]


def test_a_mask_behind_drafts_is_that_behind_their_tokens(grammars: Grammars) -> None:
    luck, grammar = random.Random(7), of("json_schema", SCHEMA)
    text = TOKENIZER.encode('{"a": 123, "b": "x"}').ids
    for _ in range(20):
        matcher, given_ids = grammars.matcher(grammar), text[: luck.randint(0, len(text))]
        matcher.take(given_ids)
        drafts = text[len(given_ids) :][: luck.randint(0, 6)]
        wrong = luck.randint(0, len(drafts))
        if luck.random() < 0.5 and wrong < len(drafts):
            drafts[wrong] = TOKENIZER.encode("q").ids[0]
        masks = allowed(matcher, drafts)
        for index, mask in enumerate(masks):
            alone = grammars.matcher(grammar)
            alone.take(given_ids + drafts[:index])
            possible = all(draft in before for draft, before in zip(drafts[:index], masks, strict=False))
            assert mask == (allowed(alone)[0] if possible else set())
        # The drafts leave no trace.
        assert allowed(matcher)[0] == masks[0]


def test_nothing_comes_behind_the_end(grammars: Grammars) -> None:
    matcher = grammars.matcher(of("regex", "a+"))
    matcher.take(TOKENIZER.encode("a").ids)
    assert {EOS, OTHER_EOS} < allowed(matcher)[0]
    assert allowed(matcher, [OTHER_EOS])[1] == set()
    matcher.take([OTHER_EOS, 5])
    assert allowed(matcher) == [set()]


BAD: dict[str, tuple[Grammar, str]] = {
    "a keyword that is not done": (of("json_schema", {"if": {}}), "Unimplemented keys"),
    "a type that is none": (of("json_schema", {"type": "strin"}), "strin"),
    "a reference to nowhere": (of("json_schema", {"$ref": "#/x"}), "/x"),
    "no JSON": (of("json_schema", "{"), "column"),
    "options of the compiler": (of("json_schema", {"x-guidance": {"lenient": True}, "not": {}}), "x-guidance"),
    "options in a tag": (of("structural_tags", [["<", "<f>", '{"x-guidance": {}}', ""]]), "x-guidance"),
    "unique items": (of("json_schema", {"uniqueItems": True}), "uniqueItems"),
    "regex": (of("regex", "(a"), "unclosed group"),
    "look-ahead": (of("regex", "(?=a)b"), "look-around"),
    "Lark": (of("grammar", "start: foo"), 'unknown name: "foo"'),
    "too complex": (of("regex", "a{1000000}"), "too many"),
    "no tags": (of("structural_tags", []), "there must be a tag"),
    "a tag without a beginning": (of("structural_tags", [["", "", "{}", ""]]), "no trigger may be empty"),
    "a schema of a tag": (of("structural_tags", [["<", "<f>", '{"type": 3}', ""]]), ""),
}


@pytest.mark.parametrize(("grammar", "cause"), BAD.values(), ids=BAD)
def test_what_cannot_be_compiled_says_why(grammars: Grammars, grammar: Grammar, cause: str) -> None:
    for _ in range(2):
        with pytest.raises(GrammarError) as refused:
            grammars.matcher(grammar)
        assert cause in refused.value.message
        assert "\n" not in refused.value.message


PLACES: dict[str, tuple[dict[str, object], str]] = {
    "the document": ({"not": {}}, ""),
    "properties and items": (
        {"properties": {"a": {"type": "string"}, "b": {"items": {"not": {}}}}},
        "/properties/b/items",
    ),
    "names of a pointer": ({"properties": {"a/b~c": {"pattern": "(?=a)"}}}, "/properties/a~1b~0c"),
    "an alternative": ({"anyOf": [{"type": "null"}, {"anyOf": [{"type": "foo"}]}]}, "/anyOf/1/anyOf/0"),
    "a definition": ({"$defs": {"x": {"not": {}}}, "properties": {"a": {"$ref": "#/$defs/x"}}}, "/$defs/x"),
    "a reference": ({"$defs": {"x": {}}, "items": {"$ref": "#/$defs/y"}}, "/items"),
    "a number": ({"properties": {"a": {"items": {"const": 2**60 + 1}}}}, "/properties/a/items"),
    "a name like a keyword": ({"properties": {"not": {"enum": [{"not": {}}], "if": {}}}}, "/properties/not"),
}


@pytest.mark.parametrize(("schema", "place"), PLACES.values(), ids=PLACES)
def test_an_error_of_a_schema_says_at_which_place(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch, schema: dict[str, object], place: str
) -> None:
    # Also on a busy machine.
    monkeypatch.setattr("executor.core.grammars._TRY_SECONDS", 1_000.0)
    with pytest.raises(GrammarError) as refused:
        grammars.matcher(of("json_schema", schema))
    said, _, shown = refused.value.message.partition(", at #")
    assert said
    assert shown == place


def test_the_search_for_a_place_ends(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    schema = {"properties": {"a": {"type": "string"}, "b": {"items": {"not": {}}}}}
    monkeypatch.setattr("executor.core.grammars._TRY_SECONDS", 1_000.0)
    monkeypatch.setattr("executor.core.grammars._MOST_TRIED", 2)
    with pytest.raises(GrammarError, match=r'"not"\], at #/properties/b$'):
        grammars.matcher(of("json_schema", schema))
    monkeypatch.setattr("executor.core.grammars._TRY_SECONDS", -1)
    with pytest.raises(GrammarError, match=r'"not"\]$'):
        grammars.matcher(of("json_schema", schema))


def test_least_numbers_of_properties_are_refused_where_a_name_that_comes_twice_would_count(grammars: Grammars) -> None:
    some = {"properties": {name: {} for name in "abc"}, "required": ["a", "b", "c"]}
    closed = some | {"additionalProperties": False}
    for good in ({"minProperties": 1}, {"minProperties": 4} | some, {"minProperties": 3} | closed):
        grammars.matcher(of("json_schema", {"type": "object"} | good))
    for bad in (
        {"minProperties": 2},
        {"minProperties": 3, "required": ["a", "a"]},
        {"minProperties": 2, "patternProperties": {"^a": {}}, "additionalProperties": False},
    ):
        with pytest.raises(GrammarError, match=r"^minProperties must be at most one more"):
            grammars.matcher(of("json_schema", {"type": "object"} | bad))


# What docs/api.md says is refused.
REFUSED: list[dict[str, object]] = [
    {"not": {"type": "string"}},
    {"if": {"type": "string"}},
    {"type": "array", "contains": {}},
    {"type": "object", "propertyNames": {"pattern": "a"}},
    {"type": "array", "uniqueItems": True},
    {"type": "object", "dependentRequired": {"a": ["b"]}},
    {"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}},
    {"type": "object", "dependencies": {"a": ["b"]}},
    {"type": "object", "unevaluatedProperties": False},
    {"type": "array", "unevaluatedItems": False},
    {"$dynamicRef": "#a"},
    {"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]},
    {"type": "object", "minProperties": 2},
    *({"type": "string", "pattern": pattern} for pattern in ("(?=a)b", "(?!a)b", "(?<=a)b", r"(a)\1", r"\ba")),
    {"$ref": "https://example.com/schema.json"},
    {"type": "any"},
]


@pytest.mark.parametrize("schema", REFUSED, ids=json.dumps)
def test_what_a_schema_cannot_ask_for_is_refused_also_within_it(grammars: Grammars, schema: dict[str, object]) -> None:
    for whole in (schema, {"type": "object", "properties": {"a": schema}, "required": ["a"]}):
        with pytest.raises(GrammarError):
            grammars.matcher(of("json_schema", whole))


def test_a_model_without_a_tokenizer_or_an_end_compiles_nothing() -> None:
    for tokenizer, eos, missing in ((b"", [0], "tokenizer"), (TOKENIZER.to_str().encode(), [], "end-of-sequence")):
        with pytest.raises(GrammarError, match=missing):
            Grammars(tokenizer, VOCAB, eos).matcher(of("regex", "a"))


def test_grammars_are_compiled_once_and_those_used_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = Grammars(TOKENIZER.to_str().encode(), VOCAB, [EOS])
    compiled: list[Grammar] = []
    compile_ = grammars._compile

    def note(grammar: Grammar) -> object:
        compiled.append(grammar)
        return compile_(grammar)

    monkeypatch.setattr(grammars, "_compile", note)
    first = of("regex", "a+")
    threads = [threading.Thread(target=grammars.matcher, args=(first,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert compiled == [first]
    for number in range(MAX_GRAMMARS):
        grammars.matcher(of("regex", f"b{{{number + 1}}}"))
        grammars.matcher(first)
    assert compiled.count(first) == 1
    grammars.matcher(of("regex", "b{1}"))
    assert compiled.count(of("regex", "b{1}")) == 2


# Restrictions beside a grammar


TOKEN = st.integers(0, 19)


@given(
    output=st.lists(TOKEN, max_size=12),
    drafts=st.lists(TOKEN, max_size=4),
    runs=st.lists(st.lists(TOKEN, min_size=1, max_size=3).map(tuple), max_size=6).map(tuple),
    chosen=st.lists(TOKEN, max_size=8).map(tuple),
    min_tokens=st.integers(0, 16),
    stop=st.frozensets(TOKEN, max_size=3),
    split=st.integers(0, 12),
)
def test_forbidden_runs_and_chosen_tokens_and_the_least_length_are_kept(
    output: list[int],
    drafts: list[int],
    runs: tuple[tuple[int, ...], ...],
    chosen: tuple[int, ...],
    min_tokens: int,
    stop: frozenset[int],
    split: int,
) -> None:
    sampling = Sampling(
        bad_token_ids=runs, allowed_token_ids=chosen, min_tokens=min_tokens, stop_token_ids=stop, logit_bias={3: 1.0}
    )
    restrictions = Restrictions(sampling, None, 1, (), output[:split])
    restrictions.take(output[split:])
    for index, row in enumerate(restrictions.rows(drafts)):
        text = output + drafts[:index]
        fits = {
            token
            for token in range(32)
            if (not chosen or token in chosen or token in stop)
            and not (len(text) < min_tokens and token in stop)
            and not any([*text, token][-len(run) :] == list(run) for run in runs)
        }
        assert row is not None
        assert row.bias == ((3, 1.0),)
        found = set(range(32)) if row.allowed is None else set(np.flatnonzero(unpacked(row.allowed, 32)).tolist())
        # If no token is left, the output ends.
        assert found == (fits or stop or set(range(32)))


def test_an_ignored_end_is_one_where_the_grammar_allows_nothing_else(grammars: Grammars) -> None:
    def first(text: str, **fields: object) -> set[int]:
        sampling = replace(Sampling(stop_token_ids=frozenset({EOS, OTHER_EOS})), **fields)
        matcher = grammars.matcher(of("regex", "ab?"))
        restrictions = Restrictions(sampling, matcher, grammars.words, ignored, TOKENIZER.encode(text).ids)
        [row] = restrictions.rows()
        assert row is not None
        assert row.allowed is not None
        return set(np.flatnonzero(unpacked(row.allowed, VOCAB)).tolist())

    ids = {letter: TOKENIZER.encode(letter).ids[0] for letter in "ab"}
    ignored: tuple[int, ...] = ()
    assert first("a") == {ids["b"], EOS, OTHER_EOS}
    ignored = (EOS, OTHER_EOS)
    assert first("a") == {ids["b"]}
    assert first("ab") == {EOS, OTHER_EOS}
    # The grammar takes precedence over forbidden tokens.
    ignored = ()
    assert first("a", min_tokens=4) == {ids["b"]}
    assert first("ab", min_tokens=4) == {EOS, OTHER_EOS}
    assert first("", bad_token_ids=((ids["a"],),)) == {ids["a"]}


def test_nothing_restricts_a_row_any_more_behind_the_least_length() -> None:
    restrictions = Restrictions(Sampling(min_tokens=2, stop_token_ids=frozenset({1})), None, 1)
    assert [row is None for row in restrictions.rows([5, 6, 7])] == [False, False, True, True]
    restrictions.take([5, 6])
    assert restrictions.rows() == [None]
