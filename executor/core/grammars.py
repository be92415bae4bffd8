"""Compiled forms of outputs: which tokens may come next so that a text follows a grammar.

The grammars are those of the `llguidance` library, which walks a trie of the vocabulary with a lexer and an Earley
parser. A mask has one bit per token, packed in little-endian 32-bit words.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy as np

from executor.errors import GrammarError
from executor.step import Grammar, GrammarKind

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# Compiled grammars that are kept.
MAX_GRAMMARS = 256
# JSON as models write it on one line; a model that may choose its spaces can write nothing else without end.
_JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# Characters of a compiler's message that an error shows.
_MAX_CAUSE = 500


class Matcher:
    """Follows one output through its grammar."""

    def __init__(self, matcher: LLMatcher, eos_token_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self._eos_token_ids = eos_token_ids
        # Whether an end-of-sequence token has ended the output.
        self.ended = False

    def take(self, token_ids: Sequence[int]) -> None:
        """The output has more tokens."""
        for token_id in token_ids:
            self.ended = self.ended or token_id in self._eos_token_ids
            if not self.ended:
                self._matcher.consume_token(token_id)

    def fill(self, masks: np.ndarray, drafts: Sequence[int]) -> None:
        """The tokens that may come behind the output, and behind each draft as if those before it were taken.

        masks: [1 + D, W] uint32, overwritten. Behind a draft that the grammar forbids no token may come.
        """
        taken = 0
        masks[:] = 0
        for row, mask in enumerate(masks):
            if self.ended or self._matcher.is_error():
                break
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            if row == len(drafts) or drafts[row] in self._eos_token_ids:
                break
            # Unlike others, this call leaves the matcher usable where the grammar forbids the token.
            if not self._matcher.try_consume_tokens([drafts[row]]):
                break
            taken += 1
        if taken:
            self._matcher.rollback(taken)


class Grammars:
    """Compiles grammars for one tokenizer, and keeps those that were used last. Thread-safe."""

    def __init__(self, tokenizer_json: bytes, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """tokenizer_json: of the `tokenizers` library, empty for a model without one."""
        self.words = -(-vocab_size // 32)
        self._tokenizer_json = tokenizer_json
        self._vocab_size = vocab_size
        self.eos_token_ids = frozenset(eos_token_ids)
        # The library's view of the vocabulary takes a moment: it is made for the first grammar.
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[Grammar, Future[LLMatcher]] = OrderedDict()
        self._lock = threading.Lock()

    def lacks(self, grammar: Grammar) -> bool:
        """Whether it would have to be compiled."""
        with self._lock:
            found = self._compiled.get(grammar)
            return found is None or not found.done()

    def matcher(self, grammar: Grammar) -> Matcher:
        """One for a new output; compiles the grammar if it is not kept. Raises GrammarError."""
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
                # Another thread may wait for it.
                future.set_exception(error)
                with self._lock:
                    self._compiled.pop(grammar, None)
                raise
            found = future
        return Matcher(found.result().deep_copy(), self.eos_token_ids)

    def _compile(self, grammar: Grammar) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits, LLTokenizer

        if not self._tokenizer_json or not self.eos_token_ids:
            missing = "end-of-sequence token" if self._tokenizer_json else "tokenizer"
            raise GrammarError(f"the model has no {missing}, which the form of an output needs")
        if self._tokenizer is None:
            self._tokenizer = LLTokenizer(
                self._tokenizer_json.decode(), n_vocab=self._vocab_size, eos_token=sorted(self.eos_token_ids)
            )
        matcher = LLMatcher(
            self._tokenizer, _library_grammar(grammar), log_level=0, limits=LLParserLimits(verbose_errors=False)
        )
        if matcher.is_error():
            raise GrammarError(_cause(matcher.get_error()))
        # The first masks build what later ones reuse, and may find that the grammar is too complex.
        tried = matcher.deep_copy()
        bits = np.unpackbits(np.frombuffer(tried.compute_bitmask(), np.uint8), bitorder="little")
        tried.consume_tokens(bits.nonzero()[0][:1].tolist())
        tried.compute_bitmask()
        if tried.is_error():
            raise GrammarError(_cause(tried.get_error()))
        return matcher


def _library_grammar(grammar: Grammar) -> str:
    """The grammar in the library's own form. Raises GrammarError."""
    from llguidance import StructTag, grammar_from

    try:
        match grammar.kind:
            case GrammarKind.JSON_SCHEMA:
                return grammar_from("json_schema", json.dumps(_with_options(json.loads(grammar.text))))
            case GrammarKind.STRUCTURAL_TAGS:
                tags = [
                    StructTag(trigger=trigger, begin=begin, grammar=_with_options(json.loads(schema)), end=end)
                    for trigger, begin, schema, end in json.loads(grammar.text)
                ]
                # A trigger may look like a special token and be none.
                return StructTag.to_grammar(tags, assume_special=False)
            case _:
                return grammar_from(grammar.kind.value, grammar.text)
    except (AssertionError, ValueError, RecursionError) as error:
        # Some of what the library checks, it asserts.
        raise GrammarError(_cause(str(error))) from error


def _with_options(schema: Any) -> Any:
    """A JSON Schema with the library's options, where it has none of its own."""
    return {"x-guidance": _JSON_OPTIONS} | schema if isinstance(schema, dict) else schema


def _cause(message: str) -> str:
    """What the library says, on one line."""
    return " ".join(message.removesuffix("<non-verbose/>").split())[:_MAX_CAUSE] or "it cannot be compiled"
