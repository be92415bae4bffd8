"""The chart: Helm's own library takes it, Kubernetes' schemas what it renders, and processes what they are told."""

import json
from pathlib import Path
from typing import Any

import helm_python as helm
import kubernetes_validate
import pytest
import yaml

from tests.stack import ROOT
from tests.support.deployed import CHART, Manifest, Secrets, pods, render, shortest_stop, understood
from tests.support.names import unknown_settings

# The oldest that the chart says, and a late one.
KUBERNETES = ("1.27", "1.37")
# Whose token each pod shows; kvctl is in the cache manager's.
TOKENS = {"cachemgr": "operator", "executor": "executor", "scheduler": "scheduler"}
VALUES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "without TLS": {"tls": {"enabled": False}, "tokens": {"enabled": False}, "insecure": True},
    "without tokens": {"tokens": {"enabled": False}, "insecure": True},
    "callers with certificates": {
        "tokens": {"enabled": False},
        "scheduler": {"settings": {"KVKEEP_TLS_CLIENT_CA_FILE": "/run/secrets/tls/ca.crt"}},
    },
    "GPUs": {"executor": {"replicas": 3, "gpus": 2, "diskCacheSize": "100Gi", "storage": {"size": "200Gi"}}},
    "Redis elsewhere": {"redis": {"bundled": False, "url": "rediss://elsewhere:6379/1"}},
    "Redis with a password": {"redis": {"bundled": False, "urlSecret": "redis"}},
    "Redis with a password of ours": {"redis": {"passwordSecret": "ours"}},
    "Redis in the clear": {"redis": {"bundled": False, "url": "redis://elsewhere"}, "insecure": True},
    "console": {"cachemgr": {"console": True}, "networkPolicy": {"operators": [{"podSelector": {}}]}},
    "slow to stop": {"cachemgr": {"drainSeconds": 100}, "scheduler": {"drainSeconds": 200}},
    "traced": {
        process: {
            "extraEnv": [
                {"name": "OTEL_EXPORTER_OTLP_ENDPOINT", "value": "http://collector:4317"},
                {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}},
            ],
            "envFrom": [{"secretRef": {"name": "more"}}],
        }
        for process in TOKENS
    },
    "watched": {"monitoring": {"serviceMonitor": True, "prometheusRule": True, "dashboards": True}},
}


def named(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    (found,) = (one for one in manifests if one["kind"] == kind and one["metadata"]["name"] == f"demo-kvkeep-{name}")
    return found


def test_helm_finds_nothing_to_complain_of() -> None:
    found = helm.lint(str(CHART))
    assert found["errors"] == []
    # Nothing but a picture that nobody has drawn.
    assert [message["error"] for message in found["messages"]] == ["icon is recommended"]


@pytest.mark.parametrize("version", KUBERNETES)
def test_rendered_manifests_match_the_schema_of_kubernetes(version: str) -> None:
    # Most are the same in all cases, and looking at one takes long.
    manifests = {json.dumps(manifest): manifest for values in VALUES.values() for manifest in render(values)}
    assert len(manifests) > 20
    for manifest in manifests.values():
        # Those of Prometheus' operator are in no schema of Kubernetes.
        if not manifest["apiVersion"].startswith("monitoring."):
            kubernetes_validate.validate(manifest, version, strict=True)


@pytest.mark.parametrize("case", VALUES)
def test_pods_set_only_known_settings(case: str, tmp_path: Path) -> None:
    seen = []
    for process, pod in pods(render(VALUES[case])):
        assert pod["securityContext"]["runAsNonRoot"] is True
        container, *_ = pod["containers"]
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        if process == "redis":
            continue
        seen.append(process)
        folder = tmp_path / str(len(seen))
        files = {"tls/ca.crt": "ca", "tls/tls.crt": "certificate", "tls/tls.key": "key", "tokens/tokens": "tokens"}
        Secrets(folder, {what: name for name, what in files.items()} | {"token": f"tokens/{TOKENS[process]}.token"})
        environment = {
            variable["name"]: variable.get("value", "rediss://:secret@elsewhere").replace("/run/secrets", str(folder))
            for variable in container["env"]
        }
        settings = understood(process, environment)
        assert settings.security.serves_tls is (case != "without TLS")
        assert settings.security.asks_callers or settings.insecure
        assert pod.get("terminationGracePeriodSeconds", 30) >= shortest_stop(settings)
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert {volume["name"] for volume in pod["volumes"]} <= mounted
    assert set(seen) == set(TOKENS)


def test_processes_get_variables_that_are_no_settings() -> None:
    given = VALUES["traced"]
    found = {part: pod["containers"][0] for part, pod in pods(render(given)) if part != "redis"}
    assert set(found) == set(TOKENS)
    for process, container in found.items():
        assert container["env"][-2:] == given[process]["extraEnv"]
        assert container["envFrom"] == given[process]["envFrom"]


def test_each_executor_has_a_scheduler_of_its_own() -> None:
    manifests = render(VALUES["GPUs"])
    assert named(manifests, "StatefulSet", "executor")["spec"]["replicas"] == 3
    addresses = set()
    for process, pod in pods(manifests):
        if process == "scheduler":
            environment = {one["name"]: one.get("value") for one in pod["containers"][0]["env"]}
            addresses.add(environment["KVKEEP_EXECUTOR_ADDRESS"])
    assert addresses == {f"demo-kvkeep-executor-{n}.demo-kvkeep-executor:50053" for n in range(3)}


def test_operators_reach_each_scheduler_by_a_name_of_its_own() -> None:
    manifests = render(VALUES["GPUs"])
    for number in range(3):
        wanted = named(manifests, "Service", f"scheduler-{number}")["spec"]["selector"]
        labels = named(manifests, "Deployment", f"scheduler-{number}")["spec"]["template"]["metadata"]["labels"]
        assert wanted.items() <= labels.items()
        assert wanted["kvkeep/executor"] == str(number)


def test_network_policies_admit_only_callers_of_a_process() -> None:
    manifests = render({"networkPolicy": {"callers": [{"podSelector": {}}], "operators": [], "monitoring": []}})
    open_to: dict[str, dict[int, set[str]]] = {}
    for part in (*TOKENS, "redis"):
        doors = open_to[part] = {}
        for rule in named(manifests, "NetworkPolicy", part)["spec"]["ingress"]:
            assert rule["from"]
            for port in rule["ports"]:
                labels = [peer["podSelector"].get("matchLabels", {}) for peer in rule["from"]]
                who = {label.get("app.kubernetes.io/component", "callers") for label in labels}
                doors[port["port"]] = doors.get(port["port"], set()) | who
    assert open_to == {
        "scheduler": {8000: {"callers"}, 50051: {"callers", "cachemgr"}},
        "cachemgr": {50052: {"scheduler", "executor"}},
        "executor": {50053: {"scheduler", "cachemgr"}},
        "redis": {6379: {"cachemgr"}},
    }


@pytest.mark.parametrize("console", [False, True], ids=["off", "on"])
def test_console_is_for_operators_where_it_is_wanted(console: bool, tmp_path: Path) -> None:
    manifests = render(VALUES["console"] | {"cachemgr": {"console": console}})
    _, *beside = named(manifests, "StatefulSet", "cachemgr")["spec"]["template"]["spec"]["containers"]
    assert [container["name"] for container in beside] == ["console"] * console
    files = {"tls/ca.crt": "ca", "tls/tls.crt": "certificate", "tls/tls.key": "key", "tokens/tokens": "tokens"}
    Secrets(tmp_path, {what: name for name, what in files.items()} | {"token": "tokens/operator.token"})
    for container in beside:
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        told = {one["name"]: one["value"].replace("/run/secrets", str(tmp_path)) for one in container["env"]}
        settings = understood("console", told)
        assert settings.listening == {"KVKEEP_CONSOLE_ADDRESS": "0.0.0.0:9112"}
        assert settings.security.serves_tls
    service = named(manifests, "Service", "cachemgr")["spec"]["ports"]
    rules = named(manifests, "NetworkPolicy", "cachemgr")["spec"]["ingress"]
    (operators,) = ([port["port"] for port in rule["ports"]] for rule in rules if {"podSelector": {}} in rule["from"])
    assert operators == ([50062, 9112] if console else [50062])
    assert (9112 in {port["port"] for port in service}) is console
    assert all(container["ports"] == [{"name": "console", "containerPort": 9112}] for container in beside)


def test_watchers_get_the_alerts_and_dashboards_that_there_are() -> None:
    manifests = render(VALUES["watched"])
    rules = yaml.safe_load((ROOT / "ops/deploy/prometheus/alerts.yaml").read_text())
    assert named(manifests, "PrometheusRule", "alerts")["spec"] == rules
    boards = named(manifests, "ConfigMap", "dashboards")["data"]
    for name in ("overview", "cache"):
        assert boards[f"kvkeep-{name}.json"] == (ROOT / f"ops/deploy/grafana/dashboards/{name}.json").read_text()


@pytest.mark.parametrize(
    ("values", "named_in_error"),
    [
        ({"tls": {"enabled": False}}, "tls.enabled=false .* insecure=true"),
        ({"tokens": {"enabled": False}}, "tokens.enabled=false .* insecure=true"),
        ({"redis": {"bundled": False, "url": "redis://elsewhere"}}, "redis.url .* insecure=true"),
        ({"redis": {"bundled": False}}, "redis"),
        ({"executor": {"replicas": 0}}, "replicas"),
        ({"executor": {"hostCacheSize": "8GB"}}, "hostCacheSize"),
        ({"scheduler": {"settings": {"MAX_RUNNING": "8"}}}, "MAX_RUNNING"),
        ({"scheduler": {"settings": {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://here"}}}, "OTEL_EXPORTER_OTLP_ENDPOINT"),
        ({"executor": {"extraEnv": [{"value": "http://here"}]}}, "extraEnv"),
        ({"cachemanager": {}}, "cachemanager"),
    ],
)
def test_wrong_values_are_refused_by_name(values: dict[str, Any], named_in_error: str) -> None:
    with pytest.raises(helm.HelmError, match=named_in_error):
        render(values)


def test_every_setting_is_one() -> None:
    for path in CHART.rglob("*"):
        if path.is_file() and not path.is_symlink():
            assert not unknown_settings(path.read_text()), path
