"""What a mistyped verb brings up: a near one, but never one that may lose something."""

import pytest

from kvctl.app import main
from tests.support.kvctl import VERBS


def said(capfd: pytest.CaptureFixture[str], *line: str) -> str:
    assert main(line) == 2
    return capfd.readouterr().err


@pytest.mark.parametrize(
    ("line", "suggested"),
    [("pols", "'pools'"), ("prefixs", "'prefixes'"), ("rule", "'rules'"), ("rules lst", "'list'")],
)
def test_a_near_verb_is_suggested(capfd: pytest.CaptureFixture[str], line: str, suggested: str) -> None:
    assert f"Did you mean {suggested}" in said(capfd, *line.split())


@pytest.mark.parametrize(
    "name", ["get", *(name for name, verb in VERBS.items() if any("--yes" in p.opts for p in verb.params))]
)
def test_a_verb_that_asks_before_it_acts_is_never_suggested(capfd: pytest.CaptureFixture[str], name: str) -> None:
    *group, verb = name.split()
    for typed in (verb[1:], verb[:-1], f"{verb}x", verb[:1] + verb[2:] + verb[1]) if name != "get" else (name,):
        err = said(capfd, *group, typed)
        assert f"No such command '{typed}'" in err
        assert not any(
            f"'{dangerous}'" in err for dangerous in ("forget", "evict", "drain", "limits", "unpin", "delete")
        )
