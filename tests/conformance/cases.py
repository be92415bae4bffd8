"""The cases as data; `vectors/README.md` has the notation."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

VECTORS = Path(__file__).parent / "vectors"
BACKEND_NAMES = ("object", "replay", "service")


@dataclass(frozen=True)
class Part:
    """One run from an empty manager."""

    name: str
    setup: dict[str, Any]
    steps: list[dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """One conformance case."""

    case_id: str
    title: str
    rules: list[int]
    parts: list[Part] = field(default_factory=list)


@cache
def all_cases() -> dict[str, Case]:
    """By id, in the order of the files."""
    read = [case for path in sorted(VECTORS.glob("*.json")) for case in json.loads(path.read_text())]
    raw = {case["id"]: case for case in read}
    assert len(raw) == len(read), "two cases have one id"
    return {case_id: _case(case, raw) for case_id, case in raw.items()}


def _case(case: dict[str, Any], raw: dict[str, dict[str, Any]]) -> Case:
    parts = [
        Part(
            part.get("name", ""),
            part.get("setup", case.get("setup", {})),
            _before(case, raw) + case.get("steps", []) + part.get("steps", []),
        )
        for part in case.get("parts", [{}])
    ]
    return Case(case["id"], case["title"], case["rules"], parts)


def _before(case: dict[str, Any], raw: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """The steps of the cases that this one continues."""
    if "after" not in case:
        return []
    earlier = raw[case["after"]]
    return _before(earlier, raw) + earlier["steps"]
