"""Opening Redis, as one server or as a cluster."""

from typing import Any, cast

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.connection import SSLConnection, UnixDomainSocketConnection, parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import MovedError, RedisClusterException, RedisError

from protos.rpc import addresses
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


def check_redis_url(url: str, *, insecure: bool) -> str:
    """Returns the URL. Raises ValueError where it leads to another machine without TLS, unless that is allowed."""
    if url and not insecure and (address := _without_tls(url)):
        raise ValueError(
            f"{address} is on another machine and would be reached without TLS: use a loopback address or a unix "
            "socket, write rediss:// or rediss+cluster://, or allow it with KVKEEP_INSECURE=1"
        )
    return url


def _without_tls(url: str) -> str:
    """The first server of another machine that the URL leads to without TLS, empty for none. Raises ValueError."""
    first, nodes = cluster_nodes(url)
    how: dict[str, Any] = dict(parse_url(first))
    if how.get("connection_class") in (SSLConnection, UnixDomainSocketConnection):
        return ""
    for host, port in nodes or [(how.get("host", "localhost"), how.get("port", 6379))]:
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        if not addresses.is_loopback(address):
            return address
    return ""
