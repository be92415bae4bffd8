"""The server that all processes share: health, reflection, interceptors, and an orderly end."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
import structlog
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2
from prometheus_client import REGISTRY, CollectorRegistry

from protos.rpc import addresses
from protos.rpc.connections import Connections
from protos.rpc.guard import Guard
from protos.rpc.health import Health
from protos.rpc.interceptors import Check, ServiceInterceptor
from protos.rpc.security import PLAIN, Security
from protos.rpc.startup import raise_file_limit

HEALTH_SERVICE = "grpc.health.v1.Health"
# The messages of both versions are equal on the wire; grpcio-reflection serves only the first.
REFLECTION_SERVICES = (reflection.SERVICE_NAME, "grpc.reflection.v1.ServerReflection")
# Time limits for a connection to become HTTP/2, and for a connection without calls: clients reconnect themselves.
HANDSHAKE_SECONDS = 10.0
IDLE_SECONDS = 60.0
# The limit on concurrent calls on one connection.
MAX_CALLS = 16_384
# The limit on connections of one listener is the process's limit on open files, divided by this number: other listeners
# need files, too. For a moment, there may be twice as many connections.
SHARE_OF_FILES = 8
# The limit on streams of one method on one listener that wait for events. Other calls keep half of the connections.
MAX_WATCHES = 1024

log = structlog.get_logger()


@dataclass
class _Listener:
    address: str
    setting: str
    server: grpc.aio.Server
    health: Health
    connections: Connections


class StopSignals:
    """Catches SIGTERM and SIGINT to this process, from its construction on, on its loop.

    Construct this before a server starts: a process that is told to stop once callers can reach it must drain.
    """

    def __init__(self) -> None:
        self.first, self.second = asyncio.Event(), asyncio.Event()
        self._loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._note)

    def _note(self) -> None:
        (self.second if self.first.is_set() else self.first).set()

    def close(self) -> None:
        """Restores the usual effect of both signals."""
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.remove_signal_handler(number)


class Server:
    """Listens on one or more addresses, each with its own services, and stops them together.

    Everything starts NOT_SERVING until the process calls `set_serving(True)`.
    """

    def __init__(
        self,
        name: str,
        *,
        metrics_address: str = "",
        metrics: CollectorRegistry = REGISTRY,
        drain_seconds: float = 10.0,
        security: Security = PLAIN,
        max_message_bytes: int = 64 << 20,
    ) -> None:
        self._name = name
        self._metrics_address = metrics_address
        self._metrics = metrics
        self._drain_seconds = drain_seconds
        self._security = security
        self.guard = Guard(security.tokens_file, security.audit_file)
        self._max_message_bytes = max_message_bytes
        self._listeners: list[_Listener] = []
        self._draining = False
        self._stop_metrics: Callable[[], None] | None = None
        self._keeping_room: list[asyncio.Task[None]] = []

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses listened on, in the order of `listen`; after `start`, with the real port in place of 0."""
        return tuple(listener.address for listener in self._listeners)

    def listen(
        self,
        address: str,
        services: Mapping[str, Callable[[grpc.aio.Server], None]],
        *,
        setting: str = "",
        parts: Iterable[str] = (),
        check: Check | None = None,
    ) -> None:
        """Adds a listener. `services` maps full service names to functions that add them to a server.

        `setting` is the variable that chose the address, for the message if it is unavailable. `parts` are names of
        further parts with a separate health, which may be down while all services continue. `check` may refuse a
        request by raising, after the caller's role has been checked.
        """
        most = max(2, raise_file_limit() // SHARE_OF_FILES)
        watching = min(MAX_WATCHES, most // 2)
        connections = Connections(self._name, most)
        server = grpc.aio.server(
            interceptors=[ServiceInterceptor(self.guard, connections, check, max_watches=watching)],
            options=[*self._options(), ("grpc.max_allowed_incoming_connections", 2 * most)],
        )
        for add in services.values():
            add(server)
        health = Health((*services, *parts))
        health_pb2_grpc.add_HealthServicer_to_server(health, server)
        # Only the version with a descriptor is announced, since clients describe whatever is announced.
        _add_reflection(server, (*services, HEALTH_SERVICE, REFLECTION_SERVICES[0]))
        self._listeners.append(_Listener(address, setting, server, health, connections))

    def set_serving(self, serving: bool, service: str | None = None) -> None:
        """Sets the health of one service or, for None, of all and the process (""), unless the server drains."""
        for listener in self._listeners:
            listener.health.set(serving and not self._draining, service)

    def _is_serving(self) -> bool:
        return all(listener.health.is_serving for listener in self._listeners)

    async def start(self) -> None:
        """Binds every address, then starts. Raises AddressError if an address is unavailable."""
        for listener in self._listeners:
            if not (addresses.is_loopback(listener.address) or self._security.asks_callers):
                log.warning("any caller that reaches this address may use it", address=listener.address)
            addresses.prepare(listener.address, insecure=self._security.may_be_reached, setting=listener.setting)
            listener.address = _bind(listener, self._security)
        if self._metrics_address:
            # The import takes a fifth of a second, which a process without metrics can save.
            from protos.rpc import metrics_server

            self._stop_metrics = metrics_server.start(
                self._metrics_address, self._is_serving, self._security, self._metrics
            )
        for listener in self._listeners:
            await listener.server.start()
            if addresses.socket_path(listener.address) is None:
                port = int(listener.address.rpartition(":")[2])
                self._keeping_room.append(asyncio.create_task(listener.connections.keep_room(port)))
            log.info("listening", server=self._name, address=listener.address)

    async def run_until_stopped(
        self, signals: StopSignals, on_drain: Callable[[], Awaitable[None]] | None = None
    ) -> bool:
        """Serves until SIGTERM or SIGINT, then drains: NOT_SERVING, `on_drain`, and a grace period for running calls.

        A second signal stops at once; returns whether there was no second signal. Closes `signals`.
        """
        with contextlib.closing(signals):
            await signals.first.wait()
            log.info("draining", server=self._name)
            self._draining = True
            self.set_serving(False)
            drain = asyncio.ensure_future(self._drain(on_drain))
            hurry = asyncio.ensure_future(signals.second.wait())
            await asyncio.wait({drain, hurry}, return_when=asyncio.FIRST_COMPLETED)
            hurry.cancel()
            if not drain.done():
                drain.cancel()
                await asyncio.wait({drain})
            await self._close(0)
        if not drain.cancelled():
            drain.result()
        log.info("stopped", server=self._name)
        return not signals.second.is_set()

    async def stop(self) -> None:
        """Stops with the usual grace period for running calls."""
        self.set_serving(False)
        await self._close(self._drain_seconds)

    async def _drain(self, on_drain: Callable[[], Awaitable[None]] | None) -> None:
        if on_drain is not None:
            await on_drain()
        await self._close(self._drain_seconds)

    async def _close(self, grace: float) -> None:
        for listener in self._listeners:
            listener.health.close()
        for task in self._keeping_room:
            task.cancel()
        await asyncio.gather(*(listener.server.stop(grace) for listener in self._listeners))
        self.guard.audit.flush()
        if self._stop_metrics is not None:
            self._stop_metrics()
            self._stop_metrics = None

    def _options(self) -> list[tuple[str, Any]]:
        return [
            ("grpc.max_send_message_length", self._max_message_bytes),
            ("grpc.max_receive_message_length", self._max_message_bytes),
            # Otherwise, a second process could bind the same port and take half of the calls.
            ("grpc.so_reuseport", 0),
            # Clients of this project ping every 20 s while they have calls.
            ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_SECONDS * 1000)),
            ("grpc.max_connection_idle_ms", int(IDLE_SECONDS * 1000)),
            # A peer that has vanished during a call is noticed within the sum of these times.
            ("grpc.keepalive_time_ms", 120_000),
            ("grpc.keepalive_timeout_ms", 20_000),
            ("grpc.max_concurrent_streams", MAX_CALLS),
        ]


def _bind(listener: _Listener, security: Security) -> str:
    """Binds an address and returns it with its real port."""
    # Only the user of the stack may connect to its sockets.
    previous = os.umask(0o177)
    try:
        if security.serves_tls:
            port = listener.server.add_secure_port(listener.address, security.server_credentials())
        else:
            port = listener.server.add_insecure_port(listener.address)
    except RuntimeError as error:
        raise addresses.cannot_listen(listener.address, listener.setting) from error
    finally:
        os.umask(previous)
    if addresses.socket_path(listener.address) is not None:
        return listener.address
    return f"{listener.address.rpartition(':')[0]}:{port}"


def _add_reflection(server: grpc.aio.Server, services: tuple[str, ...]) -> None:
    reflection.enable_server_reflection(services, server)
    handler = grpc.stream_stream_rpc_method_handler(
        reflection.aio.ReflectionServicer(services).ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(REFLECTION_SERVICES[1], {"ServerReflectionInfo": handler}),)
    )
