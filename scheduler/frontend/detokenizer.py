"""Turns tokens into text incrementally, whole characters only."""

from collections.abc import Sequence as Seq

from tokenizers import Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# Earlier tokens that are decoded again with new tokens, so that the new tokens keep a leading space.
_CONTEXT = 5
# A character has at most four bytes: text that is still incomplete after this many tokens stays incomplete.
_LONGEST_OPEN = 16


class Detokenizer:
    """Decodes a window of tokens with and without the newest ones; the difference is the new text.

    Decoding token by token would break characters that span tokens (byte-level BPE) and lose the spaces that a decoder
    strips at the beginning (sentencepiece). Text that ends in U+FFFD may be half a character and is held back.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Seq[int], *, keep_special: bool = False) -> None:
        """keep_special: whether the text has special tokens."""
        self._tokenizer = tokenizer
        self._skip_special = not keep_special
        self._window = list(prompt_ids[-_CONTEXT:])
        # Number of the window's tokens whose text has been returned, and the text of these tokens.
        self._read = len(self._window)
        self._before = self._decode(self._window)

    def push(self, token_ids: Seq[int]) -> str:
        """Returns the text that tokens add, without an incomplete character at its end."""
        after = self._decode([*self._window, *token_ids])
        if len(token_ids) > 1 and after.endswith(_REPLACEMENT):
            # Only the last tokens form an incomplete character: decoding token by token returns the text before them.
            return "".join([self.push([token_id]) for token_id in token_ids])
        self._window += token_ids
        return self._advance(after, final=len(self._window) - self._read > _LONGEST_OPEN)

    def flush(self) -> str:
        """Returns the text that was held back, at the end of the output."""
        return self._advance(self._decode(self._window), final=True)

    def _advance(self, after: str, *, final: bool) -> str:
        """Returns the new text. after: text of the whole window. final: whether to return an incomplete character."""
        if not final and after.endswith(_REPLACEMENT):
            return ""
        before = self._before
        # An incomplete character at the end of `before` may be complete now: all after the common prefix is new.
        text = after.removeprefix(before) if after.startswith(before) else after[_common(before, after) :]
        if text or final:
            self._window = self._window[self._read :]
            tail = self._window[-_CONTEXT:]
            self._before = self._decode(tail)
            if len(tail) < len(self._window) and (not self._before or _REPLACEMENT in self._before):
                # The tail has no text, or begins within a character: some decoders then replace every byte of the run.
                self._before = self._decode(self._window)
            else:
                self._window = tail
            self._read = len(self._window)
        return text

    def _decode(self, token_ids: Seq[int]) -> str:
        if not token_ids:
            return ""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=self._skip_special))


def _common(left: str, right: str) -> int:
    """Returns the length of the common prefix."""
    shortest = min(len(left), len(right))
    return next((at for at in range(shortest) if left[at] != right[at]), shortest)
