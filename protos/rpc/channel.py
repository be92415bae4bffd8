"""Channels between processes: keepalive, retries only on UNAVAILABLE, no proxies, TLS and a token if given."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, cast

import grpc

from protos.rpc.addresses import socket_path
from protos.rpc.identity import AUTHORIZATION_KEY
from protos.rpc.security import PLAIN, Security

# A connection with calls but without data for KEEPALIVE_SECONDS is pinged, and closed if the answer takes longer than
# KEEPALIVE_TIMEOUT_SECONDS. A stopped process or a lost machine closes no connection itself.
KEEPALIVE_SECONDS, KEEPALIVE_TIMEOUT_SECONDS = 20, 5

# Kinds of calls, as stubs request them from a channel.
_KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")

_RETRIES = {
    "methodConfig": [
        {
            "name": [{}],
            "retryPolicy": {
                "maxAttempts": 4,
                "initialBackoff": "0.05s",
                "maxBackoff": "1s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ]
}


def _options(max_message_bytes: int) -> list[tuple[str, Any]]:
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", KEEPALIVE_SECONDS * 1000),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_SECONDS * 1000),
        # While data flows, gRPC sends pings to measure the connection, and no keepalive pings. By default, these pings
        # have a timeout of a minute.
        ("grpc.http2.ping_timeout_ms", (KEEPALIVE_SECONDS + KEEPALIVE_TIMEOUT_SECONDS) * 1000),
        # A restarted server is found soon; the few processes of a stack cannot overwhelm it with their attempts.
        ("grpc.initial_reconnect_backoff_ms", 50),
        ("grpc.min_reconnect_backoff_ms", 1_000),
        ("grpc.max_reconnect_backoff_ms", 100),
        ("grpc.enable_retries", 1),
        ("grpc.service_config", json.dumps(_RETRIES)),
        # Processes of one stack talk to each other directly, whatever the machine's proxy settings are.
        ("grpc.enable_http_proxy", 0),
        # A separate connection, so that one channel's back-off never delays another channel.
        ("grpc.use_local_subchannel_pool", 1),
    ]


def _server_name(address: str) -> list[tuple[str, str]]:
    """The option with the name that a certificate must have, if the address has none: a socket is on this machine."""
    return [("grpc.ssl_target_name_override", "localhost")] if socket_path(address) else []


def open_channel(address: str, security: Security = PLAIN, *, max_message_bytes: int = 64 << 20) -> grpc.aio.Channel:
    """Opens a channel for asyncio to host:port or unix:/path. Every call should carry a deadline (`timeout=`).

    Raises AddressError if the token of `security` would travel in the clear.
    """
    credentials, options = security.channel_credentials(address), _options(max_message_bytes)
    if credentials is None:
        channel = grpc.aio.insecure_channel(address, options=options)
    else:
        channel = grpc.aio.secure_channel(address, credentials, options=[*options, *_server_name(address)])
    return channel if security.token_file is None else cast(grpc.aio.Channel, _AuthorizedChannel(channel, security))


def open_sync_channel(address: str, security: Security = PLAIN, *, max_message_bytes: int = 64 << 20) -> grpc.Channel:
    """Opens a channel for threads; otherwise does as `open_channel`."""
    credentials, options = security.channel_credentials(address), _options(max_message_bytes)
    if credentials is None:
        channel = grpc.insecure_channel(address, options=options)
    else:
        channel = grpc.secure_channel(address, credentials, options=[*options, *_server_name(address)])
    return channel if security.token_file is None else cast(grpc.Channel, _AuthorizedChannel(channel, security))


class _AuthorizedChannel:
    """A channel, for asyncio or threads, with this process's token in the metadata of each call.

    gRPC's call credentials get the token in another thread, which takes a quarter of a millisecond per call. They also
    refuse another machine without TLS, which KVKEEP_INSECURE allows.
    """

    def __init__(self, channel: Any, security: Security) -> None:
        self._channel = channel
        self._security = security

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._channel, name)
        return self._with_token(attribute) if name in _KINDS else attribute

    def _with_token(self, kind: Callable[..., Any]) -> Callable[..., Any]:
        def method(*arguments: Any, **options: Any) -> Callable[..., Any]:
            call = kind(*arguments, **options)
            authorized = self._authorized(call)
            # Only in calls for threads: also returns the metadata of the answer.
            if hasattr(call, "with_call"):
                authorized.with_call = self._authorized(call.with_call)  # type: ignore[attr-defined]
            return authorized

        return method

    def _authorized(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def authorized(*arguments: Any, metadata: Any = None, **options: Any) -> Any:
            token = (AUTHORIZATION_KEY, f"Bearer {self._security.token()}")
            return call(*arguments, metadata=(*(metadata or ()), token), **options)

        return authorized

    async def __aenter__(self) -> _AuthorizedChannel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    def __enter__(self) -> _AuthorizedChannel:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()
