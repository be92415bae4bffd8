"""Three nodes of a Redis or Valkey cluster on loopback, each a process that ends with the tests."""

import os
import time
from pathlib import Path

import redis
from children import Child

from tests.support.patience import patience
from tests.support.ports import free_port

SLOTS = 16_384
NODES = 3
_START_SECONDS = patience(30)
_STOP_SECONDS = patience(30)


class Node:
    """One server. Its files stay in its folder, so that it may be stopped and started again."""

    def __init__(self, binary: Path, folder: Path, port: int, bus_port: int) -> None:
        self.port = port
        self.bus_port = bus_port
        folder.mkdir(parents=True)
        server = [str(binary), "--port", str(port), "--cluster-port", str(bus_port)]
        server += ["--bind", "127.0.0.1", "--dir", str(folder)]
        server += ["--cluster-enabled", "yes", "--cluster-node-timeout", "2000", "--appendonly", "yes"]
        server += ["--cluster-require-full-coverage", "no", "--save", ""]
        self._child = Child(server, os.environ, folder=folder, log=folder / "log", stop_seconds=_STOP_SECONDS)
        self.client = redis.Redis(port=port, socket_timeout=patience(10))

    def start(self) -> None:
        """Starts the server, unless it runs, and waits for its answer. It ends with the caller, the main thread."""
        if not self._child.has_started or self._child.ended():
            self._child.start()
        _eventually(self._answers)

    def _answers(self) -> bool:
        try:
            return bool(self.client.ping())
        except (redis.ConnectionError, redis.TimeoutError):
            return False

    def stop(self) -> None:
        """Ends the server in order: all acknowledged data is in its files."""
        self.client.close()
        self._child.terminate()
        assert self._child.wait()

    def kill(self) -> None:
        """Kills the server. A write that waits for a running fsync may be lost, though it was acknowledged."""
        self.client.close()
        self._child.kill()
        self._child.wait()

    def signal(self, number: int) -> None:
        """Sends it a signal."""
        if self._child.has_started and not self._child.ended():
            os.kill(self._child.pid, number)


class RedisCluster:
    """Each node has a third of the slots; there are no replicas. Starts with the first `reset`."""

    def __init__(self, binary: Path, folder: Path) -> None:
        ports = [free_port() for _ in range(2 * NODES)]
        self.nodes = [Node(binary, folder / str(n), ports[n], ports[NODES + n]) for n in range(NODES)]
        self._joined = False
        self.url = "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)

    def start(self) -> None:
        """Starts nodes that do not run, and waits until all nodes know each other."""
        for node in self.nodes:
            node.start()
        if not self._joined:
            self._join()
            self._joined = True
        for node in self.nodes:
            _eventually(lambda node=node: self._is_whole(node))

    def _join(self) -> None:
        first, *others = self.nodes
        for index, node in enumerate(self.nodes):
            begin, end = SLOTS * index // NODES, SLOTS * (index + 1) // NODES - 1
            node.client.execute_command("CLUSTER", "ADDSLOTSRANGE", begin, end)
            node.client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", index + 1)
        for node in others:
            first.client.execute_command("CLUSTER", "MEET", "127.0.0.1", node.port, node.bus_port)

    def _is_whole(self, node: Node) -> bool:
        info = node.client.execute_command("CLUSTER", "INFO").decode()
        facts = ("cluster_state:ok", f"cluster_slots_ok:{SLOTS}", f"cluster_known_nodes:{NODES}")
        return all(f"{fact}\r\n" in info for fact in facts)

    def stop(self) -> None:
        """Ends all nodes in order; all acknowledged data is in their files."""
        for node in self.nodes:
            node.stop()

    def kill(self) -> None:
        """Kills all nodes; see `Node.kill`."""
        for node in self.nodes:
            node.kill()

    def signal(self, number: int) -> None:
        """Sends all nodes a signal."""
        for node in self.nodes:
            node.signal(number)

    def reset(self) -> None:
        """Starts nodes that do not run, and deletes all data."""
        self.start()
        for node in self.nodes:
            node.client.flushall()

    def move(self, key: str) -> None:
        """Moves the slot of a key, with all keys in it, from its node to the next one."""
        slot = int(self.nodes[0].client.execute_command("CLUSTER", "KEYSLOT", key))
        ids = [node.client.execute_command("CLUSTER", "MYID").decode() for node in self.nodes]
        owner = self._owner(slot)
        source, target = self.nodes[owner], self.nodes[(owner + 1) % NODES]
        source_id, target_id = ids[owner], ids[(owner + 1) % NODES]
        target.client.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", source_id)
        source.client.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", target_id)
        keys = source.client.execute_command("CLUSTER", "GETKEYSINSLOT", slot, 1000)
        if keys:
            source.client.execute_command("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *keys)
        for node in (target, source, *self.nodes):
            node.client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", target_id)

    def _owner(self, slot: int) -> int:
        for begin, end, (_, port, *_rest), *_replicas in self.nodes[0].client.execute_command("CLUSTER", "SLOTS"):
            if begin <= slot <= end:
                return [node.port for node in self.nodes].index(port)
        raise AssertionError(f"slot {slot} has no owner")


def _eventually(condition: object) -> None:
    """Waits until other processes have made the condition true."""
    deadline = time.monotonic() + _START_SECONDS
    while not condition():  # type: ignore[operator]
        if time.monotonic() > deadline:
            raise TimeoutError("the cluster did not come up")
        time.sleep(0.05)
