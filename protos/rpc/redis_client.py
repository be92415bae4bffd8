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

# All errors that an exchange with Redis may raise.
UNAVAILABLE = (RedisError, RedisClusterException, OSError, TimeoutError)
# The limit on the wait for one answer.
ANSWER_SECONDS = 2.0
_CONNECT_SECONDS = 1.0


def open_redis(url: str) -> Redis:
    """Opens a client that fails fast, since the store itself waits and retries.

    `redis+cluster://` gives a client of a cluster, which finds the other nodes itself and follows keys that move.
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
        # One retry, after the nodes have listed their cluster.
        retry=Retry(NoBackoff(), 1),
        # Follow a key that has moved; forgetting all nodes instead would end the current call.
        reinitialize_steps=0,
        # Use the keys on the remaining nodes.
        require_full_coverage=False,
        **options,
    )
    # The commands used here are the same in both clients.
    return cast("Redis", cluster)


def reason(error: BaseException) -> str:
    """The text of an error for people, without the command, which may hold token ids."""
    text = str(error).rpartition("of pipeline caused error: ")[2] or type(error).__name__
    return f"{text}: write redis+cluster:// for a cluster" if isinstance(error, MovedError) else text


def check_redis_url(url: str, *, insecure: bool) -> str:
    """Returns the URL. Raises ValueError if it leads to another machine without TLS, unless `insecure`."""
    if url and not insecure and (address := _without_tls(url)):
        raise ValueError(
            f"{address} is on another machine and would be reached without TLS: use a loopback address or a unix "
            "socket, write rediss:// or rediss+cluster://, or allow it with KVKEEP_INSECURE=1"
        )
    return url


def _without_tls(url: str) -> str:
    """The URL's first server on another machine that it reaches without TLS; empty for none. Raises ValueError."""
    first, nodes = cluster_nodes(url)
    how: dict[str, Any] = dict(parse_url(first))
    if how.get("connection_class") in (SSLConnection, UnixDomainSocketConnection):
        return ""
    for host, port in nodes or [(how.get("host", "localhost"), how.get("port", 6379))]:
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        if not addresses.is_loopback(address):
            return address
    return ""
