"""Channels between processes: keepalive, retries on UNAVAILABLE only, no proxies."""

import json
from typing import Any

import grpc

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
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 1_000),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        ("grpc.enable_retries", 1),
        ("grpc.service_config", json.dumps(_RETRIES)),
        # Processes of one stack talk to each other directly, whatever the machine's proxy settings are.
        ("grpc.enable_http_proxy", 0),
        # A connection of its own, so that one channel's back-off never delays another's.
        ("grpc.use_local_subchannel_pool", 1),
    ]


def open_channel(address: str, *, max_message_bytes: int = 64 << 20) -> grpc.aio.Channel:
    """A channel for asyncio to host:port or unix:/path. Every call on it should carry a deadline (`timeout=`)."""
    return grpc.aio.insecure_channel(address, options=_options(max_message_bytes))


def open_sync_channel(address: str, *, max_message_bytes: int = 64 << 20) -> grpc.Channel:
    """A channel for threads to host:port or unix:/path. Every call on it should carry a deadline (`timeout=`)."""
    return grpc.insecure_channel(address, options=_options(max_message_bytes))
