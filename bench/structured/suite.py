"""JSON-Schema-Test-Suite against the compiled grammars: they allow nothing invalid, and random outputs are valid.

The suite is read from the source package of `jsonschema` on PyPI, which carries it. A schema with a keyword that the
compiler does not know is refused, and counted.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np

from executor.core.grammars import Grammars, Matcher
from executor.core.restrictions import unpacked
from executor.errors import GrammarError
from executor.step import Grammar, GrammarKind

PACKAGE = "jsonschema==4.25.1"
DRAFTS: Mapping[str, Any] = {
    "draft4": jsonschema.Draft4Validator,
    "draft6": jsonschema.Draft6Validator,
    "draft7": jsonschema.Draft7Validator,
    "draft2019-09": jsonschema.Draft201909Validator,
    "draft2020-12": jsonschema.Draft202012Validator,
}
# The URI that names a draft in a schema.
NAMES: Mapping[str, str] = {
    "draft4": "http://json-schema.org/draft-04/schema#",
    "draft6": "http://json-schema.org/draft-06/schema#",
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}
# Random outputs of a schema, and tokens of each.
WALKS, MAX_TOKENS = 3, 80


@dataclass
class Found:
    """Results of one draft. kinds: number of schemas by result."""

    kinds: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


def download(folder: Path) -> Path:
    """The source package, downloaded once."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (found := list(folder.glob("jsonschema-*.tar.gz"))):
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", PACKAGE]
        subprocess.run([*command, "-d", str(folder)], check=True)
        found = list(folder.glob("jsonschema-*.tar.gz"))
    return found[0]


def cases(package: Path, draft: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The suite's cases of a draft: a schema with instances that are valid or not."""
    with tarfile.open(package) as archive:
        for member in archive.getmembers():
            parts = Path(member.name).parts
            if "tests" not in parts or parts[-2] != draft or not member.name.endswith(".json"):
                continue
            file = archive.extractfile(member)
            assert file is not None
            for case in json.load(file):
                # A schema without $schema counts as the newest draft, in which some keywords have a different meaning.
                if isinstance(case["schema"], dict):
                    case["schema"].setdefault("$schema", NAMES[draft])
                yield f"{draft}/{parts[-1].removesuffix('.json')}: {case['description']}", case


def check(package: Path, draft: str, grammars: Grammars, encode: Any, decode: Any) -> Found:
    """Runs all cases of a draft. encode, decode: between a text and the ids of the grammars' tokenizer."""
    found = Found()
    for name, case in cases(package, draft):
        grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(case["schema"]))
        try:
            grammars.matcher(grammar)
        except GrammarError:
            found.kinds["refused"] += 1
            continue
        found.kinds["compiled"] += 1
        validator = DRAFTS[draft](case["schema"])
        for test in case["tests"]:
            accepted = accepts(
                grammars.matcher(grammar), encode(json.dumps(test["data"], ensure_ascii=False)), grammars
            )
            found.kinds["valid accepted" if accepted else "valid not accepted"] += test["valid"]
            found.kinds["invalid"] += not test["valid"]
            if accepted and not test["valid"]:
                found.faults.append(f"{name}: allows {test['description']}")
        luck = random.Random(name)
        for _ in range(WALKS):
            text = walk(grammars.matcher(grammar), luck, grammars, decode)
            if text is None:
                continue
            found.kinds["outputs"] += 1
            try:
                if not validator.is_valid(json.loads(text)):
                    found.faults.append(f"{name}: wrote what is not valid: {text[:200]}")
            except ValueError:
                found.faults.append(f"{name}: wrote no JSON: {text[:200]}")
    return found


def accepts(matcher: Matcher, token_ids: list[int], grammars: Grammars) -> bool:
    """Whether a grammar allows an output and its end."""
    for token_id in token_ids:
        if not allowed(matcher, grammars)[token_id]:
            return False
        matcher.take([token_id])
    return bool(allowed(matcher, grammars)[list(grammars.eos_token_ids)].any())


def walk(matcher: Matcher, luck: random.Random, grammars: Grammars, decode: Any) -> str | None:
    """A random output, which ends with probability 1/2 whenever it may; None if it does not end."""
    token_ids: list[int] = []
    ends = list(grammars.eos_token_ids)
    while len(token_ids) < MAX_TOKENS:
        possible = allowed(matcher, grammars)
        may_end, possible[ends] = possible[ends].any(), False
        rest = possible.nonzero()[0]
        if may_end and (not len(rest) or luck.random() < 0.5):
            return str(decode(token_ids))
        token_ids.append(int(rest[luck.randrange(len(rest))]))
        matcher.take(token_ids[-1:])
    return None


def allowed(matcher: Matcher, grammars: Grammars) -> np.ndarray:
    """Whether each id may come next, [V] bool."""
    masks = np.zeros((1, grammars.words), dtype=np.uint32)
    matcher.fill(masks, ())
    return unpacked(masks[0], 32 * grammars.words)
