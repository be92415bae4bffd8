"""Channels whose calls carry the token of this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import grpc

from protos.rpc.security import Security

AUTHORIZATION_KEY = "authorization"


def _metadata(security: Security) -> tuple[str, str]:
    return AUTHORIZATION_KEY, f"Bearer {security.token()}"


class AuthorizedChannel(grpc.aio.Channel):
    """Another channel with the token in each call's metadata.

    No interceptors: those of asyncio run a task more per call.
    """

    def __init__(self, channel: grpc.aio.Channel, security: Security) -> None:
        self._channel = channel
        self._security = security

    def _with_token(self, call: Callable[..., Any]) -> Any:
        def authorized(*arguments: Any, metadata: Any = None, **options: Any) -> Any:
            return call(*arguments, metadata=(*(metadata or ()), _metadata(self._security)), **options)

        return authorized

    def unary_unary(self, *arguments: Any, **options: Any) -> Any:
        """As of the channel."""
        return self._with_token(self._channel.unary_unary(*arguments, **options))

    def unary_stream(self, *arguments: Any, **options: Any) -> Any:
        """As of the channel."""
        return self._with_token(self._channel.unary_stream(*arguments, **options))

    def stream_unary(self, *arguments: Any, **options: Any) -> Any:
        """As of the channel."""
        return self._with_token(self._channel.stream_unary(*arguments, **options))

    def stream_stream(self, *arguments: Any, **options: Any) -> Any:
        """As of the channel."""
        return self._with_token(self._channel.stream_stream(*arguments, **options))

    async def close(self, grace: float | None = None) -> None:
        """As of the channel."""
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """As of the channel."""
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """As of the channel."""
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """As of the channel."""
        await self._channel.channel_ready()

    async def __aenter__(self) -> AuthorizedChannel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class _Details(NamedTuple):
    method: str
    timeout: float | None
    metadata: Any
    credentials: Any
    wait_for_ready: bool | None
    compression: Any


class Authorizing(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    """The same for channels of threads, whose interceptors cost next to nothing."""

    def __init__(self, security: Security) -> None:
        self._security = security

    def _authorized(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:
        carried = _Details(
            details.method,
            details.timeout,
            [*(details.metadata or ()), _metadata(self._security)],
            details.credentials,
            details.wait_for_ready,
            details.compression,
        )
        return continuation(carried, request)

    intercept_unary_unary: Any = _authorized
    intercept_unary_stream: Any = _authorized
    intercept_stream_unary: Any = _authorized
    intercept_stream_stream: Any = _authorized
