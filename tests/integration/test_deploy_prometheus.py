"""The alerts: promtool accepts them, each fires exactly when it must, and the runbook has the same alerts."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.stack import ROOT
from tests.support.names import unknown_metrics

FOLDER = ROOT / "ops/deploy/prometheus"
ALERTS, TESTS = FOLDER / "alerts.yaml", FOLDER / "alerts_test.yaml"
RULES = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
RUNBOOK = re.split(r"^## ", (ROOT / "docs/runbook.md").read_text(), flags=re.MULTILINE)[1:]

needs_promtool = pytest.mark.skipif(not shutil.which("promtool"), reason="there is no promtool on the PATH")


def promtool(*arguments: str | Path) -> str:
    done = subprocess.run(["promtool", *arguments], cwd=FOLDER, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def plain(expression: str) -> str:
    """An expression without the labels that select series, and without spaces."""
    return re.sub(r"\{[^}]*\}|\s", "", expression)


@needs_promtool
def test_promtool_accepts_configuration_and_rules() -> None:
    # The configuration names the rules; both are checked.
    assert f"{len(RULES)} rules found" in promtool("check", "config", "prometheus.yaml")


@needs_promtool
def test_alerts_fire_when_they_must() -> None:
    promtool("test", "rules", TESTS.name)


def test_every_alert_is_tested_both_ways() -> None:
    fires: dict[bool, set[str]] = {True: set(), False: set()}
    for test in yaml.safe_load(TESTS.read_text())["tests"]:
        for case in test["alert_rule_test"]:
            fires[bool(case["exp_alerts"])].add(case["alertname"])
    names = {rule["alert"] for rule in RULES}
    assert fires == {True: names, False: names}


def test_every_metric_is_one() -> None:
    assert unknown_metrics(ALERTS.read_text()) == set()


def test_alerts_and_runbook_are_the_same() -> None:
    expressions = [plain(rule["expr"]) for rule in RULES]
    alerting, missing = set(), []
    for section in RUNBOOK:
        if alert := re.search(r"^Alert: (.*?)\n\n", section, flags=re.MULTILINE | re.DOTALL):
            alerting.add(section.partition("\n")[0])
            for quoted in re.findall(r"`([^`]+)`", alert[1]):
                wanted = plain(quoted)
                # Beside expressions there are words of gRPC, labels and a command.
                if re.search(r"kvkeep_|process_|^up", wanted) and not any(wanted in one for one in expressions):
                    missing.append(quoted)
    assert missing == []
    named = {rule["annotations"]["runbook"] for rule in RULES}
    # What Prometheus cannot tell from Redis being gone.
    assert alerting - named == {"Redis is full", "Two cache managers have the same records"}
    assert named <= alerting
