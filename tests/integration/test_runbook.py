"""The runbook is up to date: every metric, log line, reason and setting in it exists in the code."""

import re

import pytest

from tests.stack import ROOT
from tests.support.names import SETTINGS, SOURCE, metrics_in, settings_in, unknown_metrics

RUNBOOK = (ROOT / "docs/runbook.md").read_text()
# Line breaks do not belong to quoted text.
QUOTED = [" ".join(quoted.split()) for quoted in re.findall(r"`([^`]+)`", RUNBOOK)]
SECTIONS = re.split(r"^## ", RUNBOOK, flags=re.MULTILINE)[1:]


def test_every_metric_is_one() -> None:
    assert len(metrics_in(RUNBOOK)) > 15
    assert unknown_metrics(RUNBOOK) == set()


def test_every_log_line_is_one() -> None:
    lines = {quoted for quoted in QUOTED if re.fullmatch(r"[a-z][a-z ;,]+ [a-z ;,]+", quoted)} - {"make chaos"}
    assert len(lines) > 15
    assert [line for line in lines if line not in SOURCE] == []


def test_every_reason_and_setting_is_one() -> None:
    assert settings_in(RUNBOOK) <= SETTINGS
    reasons = {quoted for quoted in QUOTED if re.fullmatch(r"[A-Z]+_[A-Z_]+", quoted)} - SETTINGS
    # gRPC's own words.
    reasons -= {"NOT_SERVING", "DEADLINE_EXCEEDED"}
    assert len(reasons) > 10
    assert [reason for reason in reasons if f'"{reason}"' not in SOURCE] == []


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.partition("\n")[0])
def test_each_failure_has_symptoms_automatic_actions_and_steps(section: str) -> None:
    for part in ("\nSeen: ", "\nBy itself: ", "\nTo do: "):
        assert part in section
