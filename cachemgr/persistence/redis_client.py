"""Opening Redis, as one server or as a cluster, and the names of the keys."""

from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import quote

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import MovedError, RedisClusterException, RedisError

from protos.rpc.settings import cluster_nodes

# What an exchange with Redis raises, whatever is the matter with it.
UNAVAILABLE = (RedisError, RedisClusterException, OSError, TimeoutError)
# Longest wait for one answer.
ANSWER_SECONDS = 2.0
_CONNECT_SECONDS = 1.0


def open_redis(url: str) -> Redis:
    """A client that fails fast: the store does its own waiting and trying again.

    `redis+cluster://` gives a client of a cluster, which finds the other nodes by itself and follows keys that move.
    """
    options: dict[str, Any] = {
        "socket_connect_timeout": _CONNECT_SECONDS,
        "socket_timeout": ANSWER_SECONDS,
        "decode_responses": False,
    }
    first, nodes = cluster_nodes(url)
    if not nodes:
        return Redis.from_url(url, retry=Retry(NoBackoff(), 0), **options)
    cluster = RedisCluster.from_url(
        first,
        startup_nodes=[ClusterNode(host, port) for host, port in nodes],
        # Once more after the nodes have listed their cluster.
        retry=Retry(NoBackoff(), 1),
        # A key that has moved is followed; to forget all nodes instead ends the call in which it happens.
        reinitialize_steps=0,
        # What lies on the nodes that are left can be used.
        require_full_coverage=False,
        **options,
    )
    # The commands used here are the same.
    return cast("Redis", cluster)


def reason(error: BaseException) -> str:
    """The text of an error for people: never the command, which may hold token ids."""
    text = str(error).rpartition("of pipeline caused error: ")[2] or type(error).__name__
    return f"{text}: write redis+cluster:// for a cluster" if isinstance(error, MovedError) else text


# The owner of keys that belong to no executor.
OPERATORS = ""


@dataclass(frozen=True)
class Keys:
    """The names of one cache manager's keys. shard: its name among those that share the Redis, empty for none.

    In a cluster all keys of an owner, an executor's id or OPERATORS, lie on one node.
    """

    shard: str = ""

    def executor(self, executor_id: str, what: str) -> str:
        """A key of one executor."""
        return self._key(quote(executor_id, safe=""), what)

    def operators(self, what: str) -> str:
        """A key that belongs to no executor."""
        return self._key("operators", what)

    def clock(self, owner: str) -> str:
        """Where an owner's clock lies."""
        return self.operators("time") if owner == OPERATORS else self.executor(owner, "clock")

    def _key(self, owner: str, what: str) -> str:
        # No quoted id and no shard has a slash: names of two shards are never equal.
        return f"kvkeep:{{{self.shard and f'{self.shard}/'}{owner}}}:{what}"
