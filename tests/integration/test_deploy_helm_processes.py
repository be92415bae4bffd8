"""What the chart renders, run as processes of this machine: each pod has a separate address on loopback.

Names are replaced by addresses; everything else is as in a cluster, ports, certificates, tokens and probes included.
"""

import contextlib
import os
import random
import signal
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import certs
import grpc
import msgspec
import pytest
import zmq
from children import Child
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.rpc.identity import Role
from tests.stack import ROOT, START_SECONDS, STOP_SECONDS
from tests.support.deployed import Manifest, addressed, containers, render, variables, workloads
from tests.support.keyring import Keyring
from tests.support.patience import patience

# Probes of a container that fail one after the other before a kubelet acts.
FAILURES = 3
SMALL = {
    "hostCacheSize": "",
    "settings": {
        "KVKEEP_EXECUTOR_MAX_TOKENS": "2048",
        "KVKEEP_EXECUTOR_DTYPE": "float32",
        "KVKEEP_EXECUTOR_THREADS": "1",
    },
}
REDIS = {"bundled": False, "url": "rediss://elsewhere:6379"}
PLAIN: dict[str, Any] = {"tls": {"enabled": False}, "tokens": {"enabled": False}, "insecure": True}


class Cluster:
    """The pods of a release without its Redis. Use it in a with statement."""

    def __init__(self, folder: Path, values: dict[str, Any]) -> None:
        manifests = render({"executor": SMALL, "redis": REDIS} | values)
        self._folder = folder
        self.pods: dict[str, Manifest] = addressed(manifests)
        # A Deployment's pods have no names in DNS; one is enough here.
        self.pods |= {
            one["metadata"]["name"]: one["spec"]["template"]
            for one in workloads(manifests)
            if one["kind"] == "Deployment"
        }
        (self._test,) = (one["spec"]["containers"][0] for one in manifests if one["kind"] == "Pod")
        network = f"127.{random.SystemRandom().randrange(1, 255)}.0"
        self._hosts = {name: f"{network}.{number}" for number, name in enumerate(self.pods, start=1)}
        (service,) = (one for one in manifests if one["metadata"]["name"] == "demo-kvkeep" and one["kind"] == "Service")
        self._hosts["demo-kvkeep"] = next(
            self._hosts[name]
            for name, pod in self.pods.items()
            if service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
        )
        self._make_secrets()
        self.children: dict[tuple[str, str], Child] = {}

    def _make_secrets(self) -> None:
        """One folder for all: in a cluster each process sees its own only."""
        ca = certs.authority()
        trusted, _ = ca.write(self._folder / "made", "ca")
        own, key = certs.certificate(ca, "pod", [*certs.HOSTS, *self._hosts.values()]).write(
            self._folder / "made", "pod"
        )
        for name, made in (("ca.crt", trusted), ("tls.crt", own), ("tls.key", key)):
            (self._folder / "tls").mkdir(exist_ok=True)
            made.rename(self._folder / "tls" / name)
        tokens = self._folder / "tokens"
        tokens.mkdir()
        keyring = Keyring(tokens)
        for role in (Role.EXECUTOR, Role.SCHEDULER, Role.OPERATOR, Role.ROUTER, Role.CALLER):
            shown = keyring.add(role).token_file
            assert shown is not None
            shown.rename(tokens / f"{role.value}.token")

    def environment(self, pod: str, container: Manifest) -> dict[str, str]:
        """What a container is told, moved to this machine."""
        state = self._folder / pod / container["name"]
        state.mkdir(parents=True, exist_ok=True)
        told = variables(container, pod.partition(".")[0]) | {
            # There is no Redis here; the others are the image's or a mounted volume's.
            "KVKEEP_REDIS_URL": "",
            "KVKEEP_STATE_DIR": str(state),
        }
        return {
            "PATH": os.environ["PATH"],
            "HOME": os.environ["HOME"],
            "PYTHONPATH": str(ROOT),
            **{name: self._here(pod, value) for name, value in told.items()},
        }

    def _here(self, pod: str, value: str) -> str:
        value = value.replace("/run/secrets", str(self._folder))
        for name, address in sorted(self._hosts.items(), key=lambda one: -len(one[0])):
            value = value.replace(f"{name}:", f"{address}:")
        own = self._hosts[pod]
        return value.replace("0.0.0.0:", f"{own}:").replace("localhost:", f"{own}:")

    def __enter__(self) -> "Cluster":
        for pod, template in self.pods.items():
            for container in containers(template["spec"]):
                name = container["name"]
                child = self.children[pod, name] = Child(
                    # The images' own arguments, unless the chart has different arguments.
                    [sys.executable, *container.get("command", ["python", "-m", name])[1:]],
                    self.environment(pod, container),
                    folder=ROOT,
                    log=self._folder / f"{pod}-{name}.log",
                    stop_seconds=patience(STOP_SECONDS),
                )
                child.start()
        return self

    def __exit__(self, *_: object) -> None:
        for child in reversed(self.children.values()):
            child.terminate()
        for child in reversed(self.children.values()):
            child.wait()

    def probe(self, what: str, tries: int = 1) -> dict[tuple[str, str], bool]:
        """What a kubelet finds, of each container of each pod; a container fails when all tries fail."""
        return {
            (pod, container["name"]): any(succeeds(container[what], self._hosts[pod]) for _ in range(tries))
            for pod, template in self.pods.items()
            for container in containers(template["spec"])
        }

    def wait_until(self, what: str, wanted: Callable[[dict[tuple[str, str], bool]], bool]) -> None:
        deadline = time.monotonic() + patience(START_SECONDS)
        while not wanted(found := self.probe(what)):
            tails = {name: child.tail() for name, child in self.children.items()}
            assert time.monotonic() < deadline, (found, tails)
            assert not any(child.ended() for child in self.children.values()), tails
            time.sleep(0.2)

    def run_test(self, **changed: str) -> subprocess.CompletedProcess[str]:
        """`helm test`."""
        _, *rest = self._test["command"]
        pod = next(iter(self.pods))
        told = {name: self._here(pod, value) for name, value in (variables(self._test) | changed).items()}
        environment = {"PATH": os.environ["PATH"]} | told
        return subprocess.run(
            [sys.executable, *rest], env=environment, capture_output=True, text=True, timeout=patience(60), check=False
        )

    def sample(self, pod: str, name: str) -> float:
        """A metric of the only process of a pod, read as Prometheus does."""
        (container,) = self.pods[pod]["spec"]["containers"]
        (port,) = (one["containerPort"] for one in container["ports"] if one["name"] == "metrics")
        tls = self._folder / "tls"
        context = ssl.create_default_context(cafile=tls / "ca.crt")
        context.load_cert_chain(tls / "tls.crt", tls / "tls.key")
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
        )
        with opener.open(f"https://{self._hosts[pod]}:{port}/metrics", timeout=patience(30)) as answer:
            (line,) = (line for line in answer.read().decode().splitlines() if line.startswith(f"{name} "))
        return float(line.rpartition(" ")[2])

    def published(self, pod: str, port: int) -> list[bytes]:
        """A batch of events, as a third-party router receives it."""
        with zmq.Context() as context, context.socket(zmq.SUB) as reader:
            reader.rcvtimeo = int(patience(60) * 1000)
            reader.subscribe(b"")
            reader.connect(f"tcp://{self._hosts[pod]}:{port}")
            return reader.recv_multipart()

    def kvctl(self, pod: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """As with `kubectl exec` in a cache manager's pod."""
        (container,) = self.pods[pod]["spec"]["containers"]
        command = [sys.executable, "-m", "kvctl", *arguments]
        return subprocess.run(
            command,
            env=self.environment(pod, container),
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=patience(60),
            check=False,
        )


def succeeds(probe: Manifest, host: str) -> bool:
    """A kubelet has no certificate, and looks at none."""
    if "grpc" in probe:
        with grpc.insecure_channel(f"{host}:{probe['grpc']['port']}") as channel, contextlib.suppress(grpc.RpcError):
            check = health_pb2_grpc.HealthStub(channel).Check
            answer = check(health_pb2.HealthCheckRequest(), timeout=probe["timeoutSeconds"])
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
        return False
    asked = probe["httpGet"]
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    url = f"{asked['scheme'].lower()}://{host}:{asked['port']}{asked['path']}"
    try:
        with opener.open(url, timeout=probe["timeoutSeconds"]) as answer:
            return 200 <= answer.status < 400
    except urllib.error.HTTPError as error:
        error.close()
        return False
    except OSError:
        return False


def all_of(found: dict[tuple[str, str], bool]) -> bool:
    return all(found.values())


@contextlib.contextmanager
def running(folder: Path, values: dict[str, Any]) -> Iterator[Cluster]:
    with Cluster(folder, values) as cluster:
        cluster.wait_until("startupProbe", all_of)
        cluster.wait_until("readinessProbe", all_of)
        yield cluster


@pytest.mark.model
def test_two_shards_behind_a_router_serve_with_tls_and_tokens_as_the_chart_tells_them(tmp_path: Path) -> None:
    with running(tmp_path, {"shards": [1, 1], "router": {"enabled": True}}) as cluster:
        assert len(cluster.children) == 7
        done = cluster.run_test()
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith("The capital of France is Paris")
        refused = cluster.run_test(TOKEN_FILE="/run/secrets/tokens/scheduler.token")
        assert refused.returncode == 1
        assert "status 403" in refused.stderr
        for shard in (0, 1):
            pod = f"demo-kvkeep-cachemgr-{shard}.demo-kvkeep-cachemgr.models.svc"
            ping = cluster.kvctl(pod, "ping")
            assert ping.returncode == 0, ping.stdout + ping.stderr
            pools = cluster.kvctl(pod, "pools", "--output", "json")
            # Its own engine, and no other one.
            assert f'"demo-kvkeep-engine-{shard}-0/0"' in pools.stdout
            assert f"engine-{1 - shard}-0" not in pools.stdout

        # The router has found both engines, and follows their caches.
        router = "demo-kvkeep-router"
        cluster.wait_until(
            "readinessProbe", lambda _: cluster.sample(router, 'kvkeep_router_engines{state="ready"}') == 2
        )
        cluster.wait_until("readinessProbe", lambda _: cluster.sample(router, "kvkeep_router_view_blocks") > 0)

        # One shard is gone: its engine is not ready, and lives; the other one is as it was.
        gone = "demo-kvkeep-cachemgr-1.demo-kvkeep-cachemgr.models.svc"
        engine = "demo-kvkeep-engine-1-0.demo-kvkeep-engine.models.svc"
        os.kill(cluster.children[gone, "cachemgr"].pid, signal.SIGSTOP)
        try:
            cluster.wait_until("readinessProbe", lambda found: not found[engine, "scheduler"])
            ready, alive = cluster.probe("readinessProbe", FAILURES), cluster.probe("livenessProbe", FAILURES)
            assert not ready[gone, "cachemgr"]
            assert {name for name, lives in alive.items() if not lives} == {(gone, "cachemgr")}
            assert all(found for (pod, _), found in ready.items() if pod not in (gone, engine))
            assert cluster.run_test().returncode == 0
        finally:
            os.kill(cluster.children[gone, "cachemgr"].pid, signal.SIGCONT)
        cluster.wait_until("readinessProbe", all_of)


@pytest.mark.model
def test_an_engine_without_tls_and_tokens_serves_as_the_chart_configures_it(tmp_path: Path) -> None:
    with running(tmp_path, PLAIN | {"cachemgr": {"zmqEvents": True}}) as cluster:
        assert all("grpc" in one["readinessProbe"] for pod in cluster.pods.values() for one in containers(pod["spec"]))
        done = cluster.run_test()
        assert (done.returncode, done.stderr) == (0, "")
        assert all_of(cluster.probe("livenessProbe"))
        # The first engine's port: without events a batch comes every second.
        _, number, batch = cluster.published("demo-kvkeep-cachemgr-0.demo-kvkeep-cachemgr.models.svc", 5557)
        assert (len(number), msgspec.msgpack.decode(batch)[2]) == (8, None)
        # Nobody listens there.
        assert cluster.run_test(URL="http://localhost:1/v1").returncode == 1
