"""Compiled forms of outputs: which tokens may come next so that a text follows a grammar.

The grammars are compiled by the `llguidance` library, which walks a trie of the vocabulary with a lexer and an Earley
parser. A mask has one bit per token, packed in little-endian 32-bit words.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np
import structlog
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from executor.errors import GrammarError
from executor.step import Grammar, GrammarKind
from protos.kvcommon.json_schema import place_of_fault, rewritten

log = structlog.get_logger()

# Most compiled grammars that are kept.
MAX_GRAMMARS = 256
# Most Earley items of one mask, and of one position. The whole batch waits for a mask. The mask of a very ambiguous
# grammar takes up to 150 ms, and several times as long with the library's own limits. A schema with 450 optional
# properties stays within these limits.
_MAX_ITEMS, _MAX_ROW = 5_000, 1_000
# JSON as models write it on one line; a model that may choose white space could write nothing but white space forever.
_JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# The key of a schema with the library's options.
_OPTIONS = "x-guidance"
# Formats of texts that the library enforces.
_FORMATS = frozenset(["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"])
# RFC 3339 has a year 0, leap seconds, lowercase letters and fractions of any length. Most languages' types hold
# none of them.
_YEAR = r"(000[1-9]|00[1-9]\d|0[1-9]\d\d|[1-9]\d{3})"
_SECONDS = r"\d\d:\d\d:[0-5]\d(\.\d{1,9})?(Z|[+-])"
# The library allows 29 February in every year.
_LEAP_YEAR = r"(\d\d(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
_DATE = rf"({_YEAR}-(0[13-9]-\d\d|1\d-\d\d|02-([01]\d|2[0-8]))|{_LEAP_YEAR}-02-29)"
_HELD = {"date": f"^{_DATE}$", "time": f"^{_SECONDS}", "date-time": f"^{_DATE}T{_SECONDS}"}
# Advice of the library that names an option which callers do not have.
_ADVICE = "Enable 'coerce_one_of' option to approximate oneOf with anyOf"
# Keywords with numbers, which the library reads as 64-bit floats.
_NUMBERS = ("const", "enum", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
# The first rule of a grammar of Lark, with a modifier that says how to build a tree.
_LARK_START = re.compile(r"^[?!]start(?=\s*:)", re.MULTILINE)
# Most characters of a compiler's message, and of the place of a fault, that an error shows.
_MAX_CAUSE, _MAX_PLACE = 500, 200
# Most schemas that are compiled to find the place of a fault, and most seconds.
_MOST_TRIED, _TRY_SECONDS = 256, 1.0


class Matcher:
    """Follows one output through its grammar."""

    def __init__(self, compiled: LLMatcher, eos_token_ids: frozenset[int]) -> None:
        """compiled: before its first token; it is copied, not advanced."""
        self._compiled = compiled
        self._matcher = compiled.deep_copy()
        self._eos_token_ids = eos_token_ids
        self._taken: list[int] = []
        # Whether an end-of-sequence token has ended the output.
        self.ended = False

    def take(self, token_ids: Sequence[int]) -> None:
        """Advances by further tokens of the output."""
        for token_id in token_ids:
            self.ended = self.ended or token_id in self._eos_token_ids
            if not self.ended:
                self._taken.append(token_id)
                self._matcher.consume_token(token_id)

    def fill(self, masks: np.ndarray, drafts: Sequence[int]) -> int | None:
        """Computes which tokens may come after the output, and after each draft as if the drafts up to it were taken.

        masks: [1 + D, W] uint32, overwritten. After a draft that the grammar forbids, no token may come. Returns the
        row from which on no token may come because the grammar became too complex to be followed; None without one.
        """
        taken = 0
        masks[:] = 0
        if self.ended:
            return None
        for row, mask in enumerate(masks):
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            if self._matcher.is_error():
                # The library would allow an end here.
                mask[:] = 0
                if row:
                    # The drafts may be wrong, and the library cannot roll back an error.
                    self._matcher = self._compiled.deep_copy()
                    self._matcher.consume_tokens(self._taken)
                return row
            if row == len(drafts) or drafts[row] in self._eos_token_ids:
                break
            # Unlike other calls, this one leaves the matcher usable if the grammar forbids the token.
            if not self._matcher.try_consume_tokens([drafts[row]]) and not self._matcher.is_error():
                break
            taken += 1
        if taken:
            self._matcher.rollback(taken)
        return None


class Grammars:
    """Compiles grammars for one tokenizer, and keeps the most recently used ones. Thread-safe."""

    def __init__(self, tokenizer_json: bytes, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """tokenizer_json: of the `tokenizers` library, empty for a model without one.

        Reads the vocabulary, which takes 0.3 seconds for 49,152 tokens and holds the GIL.
        """
        self.words = -(-vocab_size // 32)
        self.eos_token_ids = frozenset(eos_token_ids)
        self._tokenizer: LLTokenizer | None = None
        self._special: Mapping[str, int] = {}
        # Why no grammar can be compiled; empty if grammars can be compiled.
        self._obstacle = ""
        if not tokenizer_json or not self.eos_token_ids:
            missing = "end-of-sequence token" if tokenizer_json else "tokenizer"
            self._obstacle = f"the model has no {missing}, which the form of an output needs"
        else:
            self._read_vocabulary(tokenizer_json, vocab_size)
        self._compiled: OrderedDict[Grammar, Future[LLMatcher]] = OrderedDict()
        self._lock = threading.Lock()

    def lacks(self, grammar: Grammar) -> bool:
        """Returns whether a grammar is not compiled yet, or is still being compiled."""
        with self._lock:
            found = self._compiled.get(grammar)
            return found is None or not found.done()

    def matcher(self, grammar: Grammar) -> Matcher:
        """Returns a matcher for a new output; compiles the grammar if it is not kept. Raises GrammarError."""
        with self._lock:
            found = self._compiled.get(grammar)
            if found is None:
                future: Future[LLMatcher] = Future()
                self._compiled[grammar] = future
                if len(self._compiled) > MAX_GRAMMARS:
                    self._compiled.popitem(last=False)
            else:
                self._compiled.move_to_end(grammar)
        if found is None:
            try:
                future.set_result(self._compile(grammar))
            except BaseException as error:
                # Another thread may wait for the result.
                future.set_exception(error)
                with self._lock:
                    self._compiled.pop(grammar, None)
                raise
            found = future
        return Matcher(found.result(), self.eos_token_ids)

    def _compile(self, grammar: Grammar) -> LLMatcher:
        """Raises GrammarError, for a JSON Schema with the place of the fault."""
        try:
            return self._compiled_anew(grammar)
        except GrammarError as error:
            place = self._place_of_fault(grammar, error.message)
            raise GrammarError(f"{error.message}, at {place}" if place else error.message) from error

    def _place_of_fault(self, grammar: Grammar, message: str) -> str:
        """Returns the JSON pointer of the innermost schema with which compiling fails with the message; "" if none."""
        until = time.monotonic() + _TRY_SECONDS

        def is_faulty(schema: object) -> bool:
            if time.monotonic() > until:
                return False
            try:
                self._compiled_anew(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)))
            except GrammarError as error:
                return error.message == message
            return False

        if grammar.kind is not GrammarKind.JSON_SCHEMA:
            return ""
        try:
            schema = json.loads(grammar.text)
            place = place_of_fault(schema, is_faulty, _MOST_TRIED) if isinstance(schema, dict) else "#"
        except (ValueError, RecursionError):
            return ""
        return "" if place == "#" else place[:_MAX_PLACE]

    def _compiled_anew(self, grammar: Grammar) -> LLMatcher:
        if self._tokenizer is None:
            raise GrammarError(self._obstacle)
        matcher = LLMatcher(
            self._tokenizer,
            _library_grammar(grammar, self._special),
            log_level=0,
            limits=LLParserLimits(verbose_errors=False, step_max_items=_MAX_ITEMS, max_items_in_row=_MAX_ROW),
        )
        if matcher.is_error():
            raise GrammarError(_cause(matcher.get_error()))
        # The first masks build what later masks reuse, and may find that the grammar is too complex.
        tried = matcher.deep_copy()
        bits = np.unpackbits(np.frombuffer(tried.compute_bitmask(), np.uint8), bitorder="little")
        tried.consume_tokens(bits.nonzero()[0][:1].tolist())
        tried.compute_bitmask()
        if tried.is_error():
            raise GrammarError(_cause(tried.get_error()))
        return matcher

    def _read_vocabulary(self, tokenizer_json: bytes, vocab_size: int) -> None:
        try:
            tokenizer = LLTokenizer(tokenizer_json.decode(), n_vocab=vocab_size, eos_token=sorted(self.eos_token_ids))
        except ValueError as error:
            self._obstacle = f"the library for forms of outputs cannot read the model's tokenizer: {_cause(str(error))}"
            log.warning("outputs can have no form", cause=self._obstacle)
            return
        # The library's special tokens, except end-of-sequence tokens: ids by text.
        added = json.loads(tokenizer_json).get("added_tokens") or ()
        found = {token["content"]: int(token["id"]) for token in added}
        self._special = {
            text: token
            for text, token in found.items()
            if token not in self.eos_token_ids and token < vocab_size and tokenizer.is_special_token(token)
        }
        self._tokenizer = tokenizer


def _library_grammar(grammar: Grammar, special: Mapping[str, int]) -> str:
    """Returns the grammar in the library's form. special: ids of special tokens by their texts. Raises GrammarError."""
    try:
        match grammar.kind:
            case GrammarKind.JSON_SCHEMA:
                return grammar_from("json_schema", json.dumps(_prepared(json.loads(grammar.text))))
            case GrammarKind.STRUCTURAL_TAGS:
                return _of_tags([_Tag(*tag) for tag in json.loads(grammar.text)], special)
            case GrammarKind.GRAMMAR:
                # The library tells Lark from GBNF by a rule named start, and has no modifiers of that rule.
                return grammar_from("grammar", _LARK_START.sub("start", grammar.text))
            case _:
                return grammar_from(grammar.kind.value, grammar.text)
    except (ValueError, RecursionError) as error:
        raise GrammarError(_cause(str(error))) from error


class _Tag(NamedTuple):
    """A part of free text that has a form. trigger: the beginning of `begin`."""

    trigger: str
    begin: str
    schema: str
    end: str


def _of_tags(tags: Sequence[_Tag], special: Mapping[str, int]) -> str:
    """Returns the grammar of free text in which the rest of a tag follows each trigger. Raises GrammarError."""
    triggers = list(dict.fromkeys(tag.trigger for tag in tags))
    if not tags or not all(triggers):
        raise GrammarError("there must be a tag, and no trigger may be empty")
    free = ",".join(str(token) for text, token in special.items() if not any(one in text for one in triggers))
    lines = [
        "%llguidance {}",
        f"start: ({' | '.join(f'tag_{number}' for number in range(len(tags)))})* text",
        f"text: (TEXT{f' | <[{free}]>' if free else ''})*",
        r"TEXT: /(.|\n)+/",
        r"BEFORE: /(.|\n)*/",
    ]
    for number, trigger in enumerate(triggers):
        token = f"<[{special[trigger]}]> | " if trigger in special else ""
        lines.append(f"trigger_{number}: text ({token}written_{number})")
        lines.append(f"written_{number}[lazy]: BEFORE {json.dumps(trigger)}")
    for number, tag in enumerate(tags):
        begin, end = (_literal(text, special) for text in (tag.begin.removeprefix(tag.trigger), tag.end))
        schema = json.dumps(_prepared(json.loads(tag.schema)))
        lines.append(f"tag_{number}: trigger_{triggers.index(tag.trigger)} {begin} %json {schema} {end}")
    return "\n".join(lines)


def _literal(text: str, special: Mapping[str, int]) -> str:
    """Returns a text in the syntax of the library's grammars, with special tokens as tokens."""
    found = sorted((token for token in special if token in text), key=len, reverse=True)
    parts = re.split(f"({'|'.join(map(re.escape, found))})", text) if found else [text]
    return " ".join(f"<[{special[part]}]>" if part in special else json.dumps(part) for part in parts if part)


def _prepared(schema: Any) -> Any:
    """Returns a JSON Schema as the library takes it, with its options. Raises GrammarError."""
    if schema is True:
        # The library writes it with options of its own.
        schema = {}
    if not isinstance(schema, dict):
        return schema
    # With these options, the library would ignore unknown keywords, or allow different white space.
    if _OPTIONS in schema:
        raise GrammarError(f"{_OPTIONS} is not for callers: leave it out")
    return {_OPTIONS: _JSON_OPTIONS} | rewritten(schema, _readable)


def _readable(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema without meaningless keywords that the library refuses, in an order that it reads correctly.

    Raises GrammarError for numbers that the library would round, and for counts that it would not keep.
    """
    kept = {keyword: value for keyword, value in schema.items() if not _is_meaningless(keyword, value)}
    known, others = kept.get("format"), kept.get("allOf", [])
    if isinstance(known, str) and known in _HELD and isinstance(others, list) and not kept.keys() & {"const", "enum"}:
        # A pattern of the schema stays beside this pattern.
        kept["allOf"] = [*others, {"pattern": _HELD[known]}]
    for keyword in _NUMBERS:
        if _is_rounded(kept.get(keyword)):
            raise GrammarError(f"{keyword} has a whole number that a 64-bit float cannot hold: leave it out")
    least, required = kept.get("minProperties"), kept.get("required")
    distinct = len(set(map(str, required))) if isinstance(required, list) else 0
    is_open = kept.get("additionalProperties", True) is not False or kept.get("patternProperties")
    if isinstance(least, int) and least > distinct + 1 and is_open:
        # The library would count a name each time that it is written.
        raise GrammarError("minProperties must be at most one more than the required names if any others may come")
    further = kept.get("additionalProperties", True)
    if "properties" in kept and not kept.get("patternProperties") and (further is True or further == {}):
        # The library compares names as they are written. Without this, an escaped name would be another name.
        kept |= {"patternProperties": {"": {}}, "additionalProperties": False}
    # After allOf, the library would count the items that other schemas describe.
    if "additionalItems" in kept and "allOf" in kept:
        kept["allOf"] = kept.pop("allOf")
    return kept


def _is_meaningless(keyword: str, value: object) -> bool:
    """Returns whether a keyword of a schema forbids nothing, as its value shows at first sight."""
    match keyword:
        case "format":
            # In the drafts of JSON Schema, every format is an annotation; unknown formats have to be ignored.
            return isinstance(value, str) and value not in _FORMATS
        case "uniqueItems" | "not":
            return value is False
        case "unevaluatedProperties" | "unevaluatedItems":
            return value is True or value == {}
        case "propertyNames":
            return value is True or value in ({}, {"type": "string"})
        case "dependentRequired" | "dependentSchemas" | "dependencies":
            return isinstance(value, dict) and all(one is True or one in ([], {}) for one in value.values())
    return False


def _is_rounded(value: Any) -> bool:
    """Returns whether a whole number in a value changes as a 64-bit float."""
    if isinstance(value, dict):
        return any(map(_is_rounded, value.values()))
    if isinstance(value, list):
        return any(map(_is_rounded, value))
    # The exponent of 64-bit floats ends there.
    return isinstance(value, int) and (abs(value) >= 1 << 1023 or int(float(value)) != value)


def _cause(message: str) -> str:
    """Returns the library's message on one line."""
    said = " ".join(message.removesuffix("<non-verbose/>").split()).replace(_ADVICE, "Use anyOf")
    return said[:_MAX_CAUSE] or "it cannot be compiled"
