"""The chart: Helm's own library accepts it, Kubernetes' schemas its manifests, and processes their settings."""

import asyncio
import json
import re
import shutil
from pathlib import Path
from typing import Any

import certs
import grpc
import helm_python as helm
import kubernetes_validate
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

from executor.settings import settings_from
from protos.rpc.security import Security
from tests.stack import ROOT
from tests.support.deployed import (
    CHART,
    Manifest,
    Secrets,
    addressed,
    containers,
    pods,
    processes,
    render,
    shortest_stop,
    understood,
    variables,
    workloads,
)
from tests.support.names import unknown_settings
from tests.support.patience import patience
from tests.unit.rpc.conftest import serving

# The oldest that the chart says, and a late one.
KUBERNETES = ("1.29", "1.37")
# Whose token each process shows; kvctl is in the cache manager's pod.
TOKENS = {"cachemgr": "operator", "executor": "executor", "scheduler": "scheduler", "router": "router"}
PLAIN: dict[str, Any] = {"tls": {"enabled": False}, "tokens": {"enabled": False}, "insecure": True}
CALLERS_CERTIFICATES = {"settings": {"KVKEEP_TLS_CLIENT_CA_FILE": "/run/secrets/tls/ca.crt"}}
ROUTERS: dict[str, Any] = {"shards": [2, 1], "router": {"enabled": True}}
TRACED: dict[str, Any] = {
    "extraEnv": [
        {"name": "OTEL_EXPORTER_OTLP_ENDPOINT", "value": "http://collector:4317"},
        {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}},
    ],
    "envFrom": [{"secretRef": {"name": "more"}}],
}
DIGEST = "sha256:" + "0123456789abcdef" * 4
VALUES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "without TLS": PLAIN,
    "without tokens": {"tokens": {"enabled": False}, "insecure": True},
    "callers with certificates": {"tokens": {"enabled": False}, "scheduler": CALLERS_CERTIFICATES},
    "GPUs": {"shards": [3], "executor": {"gpus": 2, "diskCacheSize": "100Gi", "storage": {"size": "200Gi"}}},
    "shards": {"shards": [3, 1, 2]},
    "routers": ROUTERS,
    "routers without TLS": ROUTERS | PLAIN,
    "routers, callers with certificates": ROUTERS
    | {"tokens": {"enabled": False}, "scheduler": CALLERS_CERTIFICATES}
    | {"router": {"enabled": True} | CALLERS_CERTIFICATES},
    "gateway": {"inferencePool": {"enabled": True, "endpointPicker": {"name": "picker"}}},
    "gateway past routers": ROUTERS | {"inferencePool": {"enabled": True, "endpointPicker": {"name": "picker"}}},
    "Redis elsewhere": {"redis": {"bundled": False, "url": "rediss://elsewhere:6379/1"}},
    "Redis with a password": {"redis": {"bundled": False, "urlSecret": "redis"}},
    "Redis with a password of ours": {"redis": {"passwordSecret": "ours"}},
    "index by key": ROUTERS | {"redis": {"keyIndex": True}},
    "Redis in the clear": {"redis": {"bundled": False, "url": "redis://elsewhere"}, "insecure": True},
    "Redis elsewhere, for shards": {
        "shards": [1, 1],
        "redis": {
            "bundled": False,
            "url": "rediss+cluster://:$(REDIS_PASSWORD)@elsewhere:6379",
            "passwordSecret": "ours",
        },
    },
    "routers of others": {
        "shards": [3, 1],
        "insecure": True,
        "cachemgr": {"zmqEvents": True, "settings": {"KVKEEP_CACHEMGR_ZMQ_TOKEN_IDS": "1"}},
        "networkPolicy": {"routers": [{"podSelector": {"matchLabels": {"app": "dynamo"}}}]},
    },
    "events for gateways": {"scheduler": {"settings": {"KVKEEP_SCHEDULER_KV_EVENTS": "1"}}},
    "console": {"cachemgr": {"console": True}, "networkPolicy": {"operators": [{"podSelector": {}}]}},
    "slow to stop": ROUTERS
    | {"cachemgr": {"drainSeconds": 100}, "scheduler": {"drainSeconds": 200}}
    | {"router": {"enabled": True, "drainSeconds": 300}},
    "traced": dict.fromkeys(("cachemgr", "executor", "scheduler"), TRACED) | {"router": {"enabled": True} | TRACED},
    "watched": ROUTERS | {"monitoring": {"podMonitor": True, "prometheusRule": True, "dashboards": True}},
    "images": {
        "image": {
            "registry": "registry.example:5000/team",
            "tag": "1.2",
            "pullSecrets": [{"name": "regcred"}],
            "executor": {"repository": "kvkeep-executor", "tag": "1.2-cuda", "digest": DIGEST},
            "redis": {"registry": "mirror.example", "repository": "valkey/valkey", "tag": "9"},
        }
    },
}


def named(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    whole = f"demo-kvkeep-{name}".removesuffix("-")
    (found,) = (one for one in manifests if one["kind"] == kind and one["metadata"]["name"] == whole)
    return found


def kinds(manifests: list[Manifest], kind: str) -> set[str]:
    return {
        one["metadata"]["name"].removeprefix("demo-kvkeep").removeprefix("-")
        for one in manifests
        if one["kind"] == kind
    }


def test_helm_finds_nothing_to_complain_of() -> None:
    found = helm.lint(str(CHART))
    assert found["errors"] == []
    # Nothing but a picture that is not drawn.
    assert [message["error"] for message in found["messages"]] == ["icon is recommended"]


@pytest.mark.parametrize("version", KUBERNETES)
def test_rendered_manifests_match_the_schema_of_kubernetes(version: str) -> None:
    # Most are the same in all cases, and looking at one takes long.
    manifests = {json.dumps(manifest): manifest for values in VALUES.values() for manifest in render(values)}
    assert len(manifests) > 40
    for manifest in manifests.values():
        # Manifests of Prometheus' operator and of the inference extension are in no schema of Kubernetes.
        if not manifest["apiVersion"].startswith(("monitoring.", "inference.")):
            kubernetes_validate.validate(manifest, version, strict=True)


@pytest.mark.parametrize("case", VALUES)
def test_pods_set_only_known_settings(case: str, tmp_path: Path) -> None:
    values = VALUES[case]
    seen = set()
    for number, (_, pod) in enumerate(pods(render(values))):
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        mounted, stops = set[str](), [0.0]
        for container in containers(pod):
            process = container["name"]
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            mounted |= {mount["name"] for mount in container["volumeMounts"]}
            if process == "redis":
                continue
            seen.add(process)
            folder = tmp_path / str(number) / process
            files = {"tls/ca.crt": "ca", "tls/tls.crt": "certificate", "tls/tls.key": "key", "tokens/tokens": "tokens"}
            role = TOKENS["cachemgr" if process == "console" else process]
            Secrets(folder, {what: name for name, what in files.items()} | {"token": f"tokens/{role}.token"})
            told = variables(container)
            if told.get("KVKEEP_REDIS_URL") == "secret":
                told["KVKEEP_REDIS_URL"] = "rediss://:secret@elsewhere"
            environment = {
                name: value.replace("/run/secrets", str(folder))
                for name, value in told.items()
                if name.startswith("KVKEEP_")
            }
            settings = understood(process, environment)
            assert settings.security.serves_tls is not ("without TLS" in case)
            assert settings.security.asks_callers or settings.insecure
            leave = container.get("lifecycle", {"preStop": {"exec": {"command": ["sleep", "0"]}}})
            stops.append(int(leave["preStop"]["exec"]["command"][1]) + shortest_stop(settings))
        # A sidecar ends after the other containers.
        assert pod.get("terminationGracePeriodSeconds", 30) >= (sum if "initContainers" in pod else max)(stops)
        assert {volume["name"] for volume in pod["volumes"]} <= mounted
    assert seen >= set(TOKENS) - {"router"}
    assert ("router" in seen) is values.get("router", {}).get("enabled", False)


def test_processes_get_variables_that_are_no_settings() -> None:
    found = processes(render(VALUES["traced"]))
    assert set(found) == {*TOKENS, "redis"}
    for process in TOKENS:
        assert found[process]["env"][-2:] == TRACED["extraEnv"]
        assert found[process]["envFrom"] == TRACED["envFrom"]


def test_a_process_sees_no_token_of_another() -> None:
    for part, pod in pods(render(VALUES["routers"])):
        keys = {
            volume["name"]: {item["key"] for item in volume["secret"]["items"]}
            for volume in pod["volumes"]
            if "items" in volume.get("secret", ())
        }
        for container in containers(pod):
            shown = set().union(*(keys.get(mount["name"], set()) for mount in container["volumeMounts"]))
            wanted = set() if part == "redis" else {"tokens", f"{TOKENS[container['name']]}.token"}
            assert shown == wanted


def test_a_new_version_of_the_chart_starts_no_pod_anew(tmp_path: Path) -> None:
    newer = shutil.copytree(CHART, tmp_path / "kvkeep")
    description = yaml.safe_load((newer / "Chart.yaml").read_text())
    (newer / "Chart.yaml").write_text(yaml.safe_dump(description | {"version": "9.9.9", "appVersion": "9.9.9"}))
    values = VALUES["watched"] | {"image": {"tag": "1.2"}}
    before, after = (workloads(render(values, chart)) for chart in (CHART, newer))
    assert len(before) == 5
    assert [one["spec"] for one in after] == [one["spec"] for one in before]
    # Objects themselves say whose they are.
    assert {one["metadata"]["labels"]["helm.sh/chart"] for one in after} == {"kvkeep-9.9.9"}


def test_selectors_find_the_pods_that_they_mean() -> None:
    manifests = render(VALUES["routers"])
    labels = {
        one["metadata"]["name"].removeprefix("demo-kvkeep-"): one["spec"]["template"]["metadata"]["labels"]
        for one in workloads(manifests)
    }
    found = {}
    for one in manifests:
        if one["kind"] in ("Service", "PodDisruptionBudget", "StatefulSet", "Deployment"):
            wanted = one["spec"]["selector"].get("matchLabels", one["spec"]["selector"])
            found[one["kind"], one["metadata"]["name"].removeprefix("demo-kvkeep").removeprefix("-")] = {
                name for name, has in labels.items() if wanted.items() <= has.items()
            }
    engines = {"engine-0", "engine-1"}
    assert found == {
        ("Service", ""): {"router"},
        ("Service", "cachemgr"): {"cachemgr"},
        ("Service", "engine"): engines,
        ("Service", "redis"): {"redis"},
        ("PodDisruptionBudget", "cachemgr"): {"cachemgr"},
        ("PodDisruptionBudget", "engine"): engines,
        ("PodDisruptionBudget", "router"): {"router"},
        ("StatefulSet", "cachemgr"): {"cachemgr"},
        ("StatefulSet", "engine-0"): {"engine-0"},
        ("StatefulSet", "engine-1"): {"engine-1"},
        ("StatefulSet", "redis"): {"redis"},
        ("Deployment", "router"): {"router"},
    }


def test_images_are_named_by_registry_tag_and_digest() -> None:
    def images(image: dict[str, Any]) -> dict[str, str]:
        found = processes(render({"image": image, "router": {"enabled": True}}))
        return {process: container["image"] for process, container in found.items()}

    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    assert images({}) == {
        "cachemgr": f"kvkeep-cachemgr:{version}",
        "executor": f"kvkeep-executor:{version}",
        "scheduler": f"kvkeep-scheduler:{version}",
        "router": f"kvkeep-scheduler:{version}",
        "redis": "valkey/valkey:8.1.3-alpine",
    }
    assert images(VALUES["images"]["image"]) == {
        "cachemgr": "registry.example:5000/team/kvkeep-cachemgr:1.2",
        "executor": f"registry.example:5000/team/kvkeep-executor@{DIGEST}",
        "scheduler": "registry.example:5000/team/kvkeep-scheduler:1.2",
        "router": "registry.example:5000/team/kvkeep-scheduler:1.2",
        "redis": "mirror.example/valkey/valkey:9",
    }


def test_every_pod_pulls_with_the_secrets_that_are_named() -> None:
    manifests = render(VALUES["images"])
    started = [pod for _, pod in pods(manifests)] + [one["spec"] for one in manifests if one["kind"] == "Pod"]
    assert len(started) == 4
    assert all(pod["imagePullSecrets"] == [{"name": "regcred"}] for pod in started)


@pytest.mark.parametrize("case", ["routers", "routers without TLS"])
def test_probes_start_no_process(case: str) -> None:
    scheme = "HTTP" if case == "routers without TLS" else "HTTPS"
    for process, container in processes(render(VALUES[case])).items():
        if process == "redis":
            continue
        told = variables(container)
        own = f"KVKEEP_{process.upper()}"
        metrics = int(told[f"{own}_METRICS_ADDRESS"].rpartition(":")[2])
        grpc_address = told.get(f"{own}_CACHEMGR_ADDRESS") or told[f"{own}_ADDRESS"]
        live = {"path": "/live", "port": metrics, "scheme": scheme}
        assert container["startupProbe"]["httpGet"] == live
        assert container["livenessProbe"]["httpGet"] == live
        ready = {key: value for key, value in container["readinessProbe"].items() if not key.endswith("Seconds")}
        if scheme == "HTTP":
            assert ready == {"grpc": {"port": int(grpc_address.rpartition(":")[2])}}
        else:
            assert ready == {"httpGet": {"path": "/health", "port": metrics, "scheme": scheme}}


@pytest.mark.parametrize("shards", [[1], [4], [3, 1, 2]])
def test_an_engine_belongs_to_the_cache_manager_of_its_shard(shards: list[int]) -> None:
    manifests = render({"shards": shards})
    assert named(manifests, "StatefulSet", "cachemgr")["spec"]["replicas"] == len(shards)
    assert kinds(manifests, "StatefulSet") == {"cachemgr", "redis", *(f"engine-{n}" for n in range(len(shards)))}
    known = addressed(manifests)
    for shard, engines in enumerate(shards):
        owner = f"demo-kvkeep-cachemgr-{shard}.demo-kvkeep-cachemgr.models.svc"
        assert owner in known
        for number in range(engines):
            pod = known[f"demo-kvkeep-engine-{shard}-{number}.demo-kvkeep-engine.models.svc"]
            assert pod["metadata"]["labels"]["kvkeep/shard"] == str(shard)
            for container in containers(pod["spec"]):
                assert variables(container)["KVKEEP_CACHEMGR_ADDRESS"] == f"{owner}:50052"


def test_an_engines_processes_meet_in_its_pod_under_its_name() -> None:
    (executor, scheduler) = containers(dict(pods(render({})))["engine"])
    name = "demo-kvkeep-engine-0-0"
    told = variables(executor, name)
    assert told["KVKEEP_EXECUTOR_EXECUTOR_ID"] == name
    assert told["KVKEEP_EXECUTOR_ADDRESS"] == "0.0.0.0:50053"
    told = variables(scheduler, name)
    assert told["KVKEEP_SCHEDULER_SCHEDULER_ID"] == name
    assert told["KVKEEP_EXECUTOR_ADDRESS"] == "localhost:50053"
    # The sidecar starts before the scheduler and ends after it; a plain container would not.
    assert executor["restartPolicy"] == "Always"
    assert "restartPolicy" not in scheduler


def test_no_volume_is_the_folder_of_a_tier() -> None:
    """An executor needs a private folder, which no kubelet makes writable for a group."""
    manifests = render({"executor": {"hostCacheSize": "1Gi", "diskCacheSize": "1Gi"}} | PLAIN)
    engine = dict(pods(manifests))["engine"]
    executor = containers(engine)[0]
    # The image says where caches are.
    settings = settings_from({"XDG_CACHE_HOME": "/var/cache"} | variables(executor, "demo-kvkeep-engine-0-0"))
    mounts = {mount["mountPath"] for mount in executor["volumeMounts"]}
    for folder in (settings.host_cache_dir, settings.disk_dir):
        assert str(folder) not in mounts
        assert {str(parent) for parent in folder.parents} & mounts
    # Else it gives the group that right in all folders of a volume, each time that a pod is replaced.
    assert engine["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"


def test_more_engines_and_shards_start_none_anew() -> None:
    before = {one["metadata"]["name"]: one["spec"] for one in workloads(render({"shards": [1, 1]}))}
    after = {one["metadata"]["name"]: one["spec"] for one in workloads(render({"shards": [2, 1, 1]}))}
    assert set(after) - set(before) == {"demo-kvkeep-engine-2"}
    assert {name for name in before if before[name]["replicas"] != after[name]["replicas"]} == {
        "demo-kvkeep-engine-0",
        "demo-kvkeep-cachemgr",
    }
    for name, spec in before.items():
        assert spec | {"replicas": 0} == after[name] | {"replicas": 0}


def test_operators_find_the_first_engine_of_their_shard() -> None:
    manifests = render(VALUES["shards"])
    known, cachemgr = addressed(manifests), processes(manifests)["cachemgr"]
    for shard in range(3):
        told = variables(cachemgr, f"demo-kvkeep-cachemgr-{shard}")
        for process in ("SCHEDULER", "EXECUTOR"):
            name = told[f"KVKEEP_{process}_ADDRESS"].rpartition(":")[0]
            assert name == f"demo-kvkeep-engine-{shard}-0.demo-kvkeep-engine.models.svc"
            assert name in known


def test_shards_share_a_redis_under_names_of_their_own() -> None:
    for values in ({"shards": [1, 1]}, VALUES["Redis elsewhere, for shards"], VALUES["Redis with a password"]):
        cachemgr = processes(render(values))["cachemgr"]
        told = [variables(cachemgr, f"demo-kvkeep-cachemgr-{shard}") for shard in (0, 1)]
        assert [one["KVKEEP_CACHEMGR_SHARD"] for one in told] == ["0", "1"]
        assert told[0]["KVKEEP_REDIS_URL"] == told[1]["KVKEEP_REDIS_URL"]


def test_each_engine_has_ports_for_routers_of_others_where_they_are_wanted() -> None:
    manifests = render(VALUES["routers of others"])
    told = variables(processes(manifests)["cachemgr"])
    events, replays = (
        int(told[f"KVKEEP_CACHEMGR_ZMQ_{what}"].removeprefix("0.0.0.0:")) for what in ("EVENTS", "REPLAYS")
    )
    # The number at the end of an executor's name is added to both, and the largest shard may have 1000.
    assert replays - events >= 1000
    used = [first + number for first in (events, replays) for number in range(3)]
    service = named(manifests, "Service", "cachemgr")["spec"]["ports"]
    assert [one["port"] for one in service if one["name"].startswith("zmq-")] == used
    assert all(len(one["name"]) <= 15 for one in service)
    # Pods of a StatefulSet restart when their template changes, and then all shards lose their caches.
    one, more = (render(VALUES["routers of others"] | {"shards": shards}) for shards in ([1], [3, 1]))
    one, more = (named(found, "StatefulSet", "cachemgr")["spec"]["template"] for found in (one, more))
    assert one == more
    opened = {}
    for part in ("cachemgr", "engine"):
        for rule in named(manifests, "NetworkPolicy", part)["spec"]["ingress"]:
            if {"podSelector": {"matchLabels": {"app": "dynamo"}}} in rule["from"]:
                opened[part] = [
                    port for one in rule["ports"] for port in range(one["port"], one.get("endPort", one["port"]) + 1)
                ]
    assert opened == {"cachemgr": used, "engine": [8000, 50051]}
    assert "zmq" not in json.dumps(render({})).lower()


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_the_same_values_always_render_the_same_manifests(values: dict[str, Any]) -> None:
    """Go walks maps in random order; an upgrade that changes nothing must not touch a manifest."""
    # The chart makes a different password each time; in a cluster, an upgrade keeps the password.
    first, *others = ([one for one in render(values) if one["kind"] != "Secret"] for _ in range(5))
    assert all(other == first for other in others)


def test_routers_find_all_engines_and_the_events_of_their_shards() -> None:
    manifests = render(VALUES["routers"])
    known = addressed(manifests)
    engines = {name: pod for name, pod in known.items() if "-engine-" in name}
    told = variables(processes(manifests)["router"])
    assert told["KVKEEP_ROUTER_ENGINES"].split(",") == [f"{name}:50051" for name in engines]
    assert len(engines) == 3
    for pod in engines.values():
        (scheduler,) = pod["spec"]["containers"]
        told = variables(scheduler)
        assert told["KVKEEP_SCHEDULER_ADDRESS"] == "0.0.0.0:50051"
        # The engine tells routers where its cache manager serves events.
        owner, _, port = told["KVKEEP_CACHEMGR_ADMIN_ADDRESS"].rpartition(":")
        assert owner == told["KVKEEP_CACHEMGR_ADDRESS"].rpartition(":")[0]
        (cachemgr,) = known[owner]["spec"]["containers"]
        assert variables(cachemgr)["KVKEEP_CACHEMGR_CACHEMGR_ADMIN_ADDRESS"] == f"0.0.0.0:{port}"
    # The names of pods have addresses while the pods are not ready, too.
    service = named(manifests, "Service", "engine")["spec"]
    assert service["clusterIP"] == "None"
    assert service["publishNotReadyAddresses"] is True
    assert processes(manifests)["router"]["command"] == ["python", "-m", "scheduler.router"]


def test_an_autoscaler_chooses_how_many_routers_there_are() -> None:
    chosen = {"enabled": True, "minReplicas": 3, "maxReplicas": 5, "targetCPUPercent": 60}
    manifests = render({"router": chosen})
    deployment = named(manifests, "Deployment", "router")
    assert "replicas" not in deployment["spec"]
    # It follows the share of the requested resources.
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["requests"]["cpu"]
    scaler = named(manifests, "HorizontalPodAutoscaler", "router")
    assert scaler["apiVersion"] == "autoscaling/v2"
    assert scaler["spec"]["scaleTargetRef"] == {
        "apiVersion": deployment["apiVersion"],
        "kind": "Deployment",
        "name": deployment["metadata"]["name"],
    }
    assert (scaler["spec"]["minReplicas"], scaler["spec"]["maxReplicas"]) == (3, 5)
    (metric,) = scaler["spec"]["metrics"]
    assert metric["resource"] == {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 60}}


def test_without_routers_there_is_nothing_of_them() -> None:
    manifests = render({"monitoring": VALUES["watched"]["monitoring"]})
    assert "router" not in json.dumps([one for one in manifests if one["kind"] not in ("ConfigMap", "PrometheusRule")])


def test_callers_find_the_api_under_one_name_with_and_without_routers() -> None:
    for case, part in (("as it is", "engine"), ("routers", "router")):
        service = named(render(VALUES[case]), "Service", "")["spec"]
        assert service["selector"]["app.kubernetes.io/component"] == part
        assert {port["port"] for port in service["ports"]} == {8000, 50051}
    assert named(render({"service": {"type": "NodePort"}}), "Service", "")["spec"]["type"] == "NodePort"


@pytest.mark.parametrize("case", ["as it is", "routers"])
def test_pods_of_a_part_are_spread_and_go_one_at_a_time(case: str) -> None:
    manifests = render(VALUES[case])
    for one in workloads(manifests):
        template = one["spec"]["template"]
        part = template["metadata"]["labels"]["app.kubernetes.io/component"]
        if part == "redis":
            continue
        for constraint in template["spec"]["topologySpreadConstraints"]:
            assert constraint["labelSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
            # A pod that cannot be spread is better than none.
            assert constraint["whenUnsatisfiable"] == "ScheduleAnyway"
        assert named(manifests, "PodDisruptionBudget", part)["spec"]["maxUnavailable"] == 1
    assert kinds(render({"podDisruptionBudget": False}), "PodDisruptionBudget") == set()


@pytest.mark.parametrize("case", ["as it is", "routers", "gateway past routers", "index by key", "events for gateways"])
def test_network_policies_admit_only_callers_of_a_process(case: str) -> None:
    policy = {"networkPolicy": {"callers": [{"podSelector": {}}], "operators": [], "monitoring": []}}
    manifests = render(VALUES[case] | policy)
    open_to: dict[str, dict[int, set[str]]] = {}
    for part in kinds(manifests, "NetworkPolicy"):
        doors = open_to[part] = {}
        for rule in named(manifests, "NetworkPolicy", part)["spec"]["ingress"]:
            assert rule["from"]
            for port in rule["ports"]:
                labels = [peer["podSelector"].get("matchLabels", {}) for peer in rule["from"]]
                who = {label.get("app.kubernetes.io/component", "callers") for label in labels}
                doors[port["port"]] = doors.get(port["port"], set()) | who
    api = {"callers", "test"}
    wanted: dict[str, dict[int, set[str]]] = {
        "cachemgr": {50052: {"engine"}},
        "engine": {8000: api, 50051: api | {"cachemgr"}, 50053: {"cachemgr"}},
        "redis": {6379: {"cachemgr"}},
    }
    if case == "events for gateways":
        wanted["cachemgr"][50062] = {"engine"}
    elif case != "as it is":
        wanted["router"] = {8000: api, 50051: api}
        wanted["cachemgr"][50062] = {"router"}
        wanted["engine"] = {50051: {"router", "cachemgr"}, 50053: {"cachemgr"}}
    if case == "index by key":
        wanted["redis"] = {6379: {"cachemgr", "router"}}
    if case == "gateway past routers":
        wanted["engine"] = {8000: api, 50051: api | {"router", "cachemgr"}, 50053: {"cachemgr"}}
    assert open_to == wanted


@pytest.mark.parametrize("console", [False, True], ids=["off", "on"])
def test_console_is_for_operators_where_it_is_wanted(console: bool) -> None:
    manifests = render(VALUES["console"] | {"cachemgr": {"console": console}})
    _, *beside = named(manifests, "StatefulSet", "cachemgr")["spec"]["template"]["spec"]["containers"]
    assert [container["name"] for container in beside] == ["console"] * console
    assert all(variables(container)["KVKEEP_CONSOLE_ADDRESS"] == "0.0.0.0:9112" for container in beside)
    service = named(manifests, "Service", "cachemgr")["spec"]["ports"]
    rules = named(manifests, "NetworkPolicy", "cachemgr")["spec"]["ingress"]
    (operators,) = ([port["port"] for port in rule["ports"]] for rule in rules if {"podSelector": {}} in rule["from"])
    assert operators == ([50062, 9112] if console else [50062])
    assert (9112 in {port["port"] for port in service}) is console
    assert all(container["ports"] == [{"name": "console", "containerPort": 9112}] for container in beside)


@pytest.mark.parametrize("redis", [{}, {"bundled": False, "urlSecret": "redis"}], ids=["bundled", "elsewhere"])
def test_routers_have_the_redis_in_which_cache_managers_keep_an_index_by_key(redis: dict[str, Any]) -> None:
    found = processes(render(ROUTERS | {"redis": redis | {"keyIndex": True}}))
    cachemgr, router = (variables(found[name]) for name in ("cachemgr", "router"))
    assert cachemgr["KVKEEP_CACHEMGR_KEY_INDEX"] == "1"
    assert router["KVKEEP_REDIS_URL"] == cachemgr["KVKEEP_REDIS_URL"]
    without = {name: variables(one) for name, one in processes(render(ROUTERS)).items()}
    assert "KVKEEP_CACHEMGR_KEY_INDEX" not in without["cachemgr"]
    assert "KVKEEP_REDIS_URL" not in without["router"]


def test_an_inference_pool_selects_the_engines_and_their_api() -> None:
    manifests = render(VALUES["gateway past routers"])
    pool = named(manifests, "InferencePool", "")
    assert pool["apiVersion"] == "inference.networking.k8s.io/v1"
    assert pool["spec"] == {
        "selector": {"matchLabels": named(manifests, "Service", "engine")["spec"]["selector"]},
        "targetPorts": [{"number": 8000}],
        "endpointPickerRef": {"name": "picker", "port": {"number": 9002}},
    }
    pod = dict(pods(manifests))["engine"]
    (scheduler,) = pod["containers"]
    # A picker reads vLLM's metrics at the address for requests, too.
    assert variables(scheduler)["KVKEEP_SCHEDULER_HTTP_ADDRESS"] == "0.0.0.0:8000"
    assert variables(scheduler)["KVKEEP_SCHEDULER_VLLM_METRICS"] == "1"
    labels = named(manifests, "StatefulSet", "engine-1")["spec"]["template"]["metadata"]["labels"]
    assert pool["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert {labels[f"{prefix}/engine-type"] for prefix in ("inference.networking.k8s.io", "llm-d.ai")} == {"vllm"}
    assert kinds(render({}), "InferencePool") == set()
    plain = variables(processes(render({}))["scheduler"])
    assert "KVKEEP_SCHEDULER_VLLM_METRICS" not in plain


def test_watchers_get_the_alerts_and_dashboards_that_there_are() -> None:
    manifests = render(VALUES["watched"])
    rules = yaml.safe_load((ROOT / "ops/deploy/prometheus/alerts.yaml").read_text())
    assert named(manifests, "PrometheusRule", "alerts")["spec"] == rules
    boards = named(manifests, "ConfigMap", "dashboards")["data"]
    for name in ("overview", "cache"):
        assert boards[f"kvkeep-{name}.json"] == (ROOT / f"ops/deploy/grafana/dashboards/{name}.json").read_text()


def test_every_process_is_watched_as_the_job_of_its_name() -> None:
    manifests = render(VALUES["watched"])
    watched = {}
    for part in kinds(manifests, "PodMonitor"):
        spec = named(manifests, "PodMonitor", part)["spec"]
        found = [one["spec"]["template"] for one in workloads(manifests)]
        found = [one for one in found if spec["selector"]["matchLabels"].items() <= one["metadata"]["labels"].items()]
        for endpoint in spec["podMetricsEndpoints"]:
            job, *more = endpoint["relabelings"]
            assert job["targetLabel"] == "job"
            for pod in found:
                (container,) = (
                    container
                    for container in containers(pod["spec"])
                    for port in container["ports"]
                    if port["name"] == endpoint["port"]
                )
                (port,) = (one["containerPort"] for one in container["ports"] if one["name"] == endpoint["port"])
                process = container["name"]
                assert variables(container)[f"KVKEEP_{process.upper()}_METRICS_ADDRESS"] == f"0.0.0.0:{port}"
                assert process == job["replacement"]
            watched[job["replacement"]] = [(one["sourceLabels"], one["targetLabel"]) for one in more]
    label = "__meta_kubernetes_pod_label_"
    assert watched == {
        "router": [],
        "cachemgr": [([f"{label}apps_kubernetes_io_pod_index"], "shard")],
        "scheduler": [([f"{label}kvkeep_shard"], "shard")],
        "executor": [([f"{label}kvkeep_shard"], "shard")],
    }


@pytest.mark.parametrize(
    ("values", "named_in_error"),
    [
        ({"tls": {"enabled": False}}, "tls.enabled=false .* insecure=true"),
        ({"tokens": {"enabled": False}}, "tokens.enabled=false .* insecure=true"),
        (
            {"tokens": {"enabled": False}, "scheduler": CALLERS_CERTIFICATES, "router": {"enabled": True}},
            "tokens.enabled=false .* a router .* router.settings",
        ),
        ({"redis": {"bundled": False, "url": "redis://elsewhere"}}, "redis.url .* insecure=true"),
        ({"redis": {"bundled": False}}, "redis"),
        ({"cachemgr": {"zmqEvents": True}}, "cachemgr.zmqEvents=true .* insecure=true"),
        ({"shards": []}, "shards"),
        ({"shards": [1, 0]}, "shards"),
        ({"image": {"executor": {"digest": "sha256:12"}}}, "digest"),
        ({"image": {"executor": {"repository": ""}}}, "repository"),
        ({"inferencePool": {"enabled": True}}, "endpointPicker"),
        ({"router": {"minReplicas": 0}}, "minReplicas"),
        ({"router": {"minReplicas": 9, "maxReplicas": 8}}, "router.minReplicas .* router.maxReplicas"),
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


def names_in_certificates() -> dict[str, list[str]]:
    """What the page says, by the part whose certificate it is, for the release and namespace of these tests."""
    page = (ROOT / "docs/kubernetes.md").read_text()
    rows = re.findall(r"^\| `RELEASE-kvkeep-(\w+)-tls` \| (.*) \|$", page, flags=re.MULTILINE)
    return {
        part: [name.replace("RELEASE", "demo").replace("NAMESPACE", "models") for name in re.findall(r"`(.*?)`", names)]
        for part, names in rows
    }


def servers() -> set[tuple[str, str]]:
    """What a part is called where a process is told its address: (part, name)."""
    found = set()
    for case in ("shards", "routers"):
        manifests = render(VALUES[case])
        for container in processes(manifests).values():
            for shard in range(2):
                for name, value in variables(container, f"pod-{shard}").items():
                    for host in re.findall(r"(demo-kvkeep[\w.-]*):\d", value):
                        part = re.match(r"demo-kvkeep-([a-z]+)", host)
                        assert part, (name, value)
                        found.add((part[1], host))
        (test,) = (one["spec"]["containers"][0] for one in manifests if one["kind"] == "Pod")
        front = named(manifests, "Service", "")["spec"]["selector"]["app.kubernetes.io/component"]
        host = re.match(r"https://(.*):8000/v1$", variables(test)["URL"])
        assert host
        found.add((front, host[1]))
    return found


async def test_certificates_with_the_names_of_the_page_are_those_that_callers_ask_for(tmp_path: Path) -> None:
    ca = certs.authority()
    trusted, _ = ca.write(tmp_path, "ca")
    found, checked = servers(), names_in_certificates()
    assert {part for part, _ in found} == set(checked) == {"cachemgr", "engine", "router", "redis"}
    for part, names in checked.items():
        cert, key = certs.certificate(ca, part, hosts=names).write(tmp_path, part)
        security = Security(tls_cert_file=cert, tls_key_file=key, tls_ca_file=trusted)
        async with serving("127.0.0.1:0", security=security) as server:
            for name in [name for owner, name in found if owner == part]:
                # As when the cluster's DNS leads this name here.
                options = [("grpc.default_authority", name), ("grpc.enable_retries", 0)]
                credentials = grpc.ssl_channel_credentials(trusted.read_bytes())
                async with grpc.aio.secure_channel(server.addresses[0], credentials, options=options) as channel:
                    async with asyncio.timeout(patience(30)):
                        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
                assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
