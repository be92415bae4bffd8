"""A service at an address, called with a time limit for each call."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Generic, TypeVar

import grpc

from kvctl.status import CommandError, Status, command_error
from protos.rpc.errors import from_rpc_error

S = TypeVar("S")
R = TypeVar("R")

PAGE = 1000


class Remote(Generic[S]):
    """A service at an address. timeout: seconds for each call."""

    def __init__(self, address: str, stub: S, timeout: float) -> None:
        self.address = address
        self.stub = stub
        self._timeout = timeout

    def call(self, method: Callable[..., R], request: Any, at_least: float = 0.0) -> R:
        """Calls a method of the stub. at_least: a lower bound of the time limit in seconds. Raises CommandError."""
        try:
            return method(request, timeout=max(self._timeout, at_least))
        except grpc.RpcError as error:
            raise command_error(from_rpc_error(error), self.address) from None

    def messages(self, method: Callable[..., Any], request: Any, seconds: float | None, *, ends: bool) -> Iterator[Any]:
        """Yields the messages of a stream. Raises CommandError.

        seconds: time limit; None for no limit. ends: the time limit ends the stream without an error.
        """
        call, begun = method(request, timeout=seconds), False
        try:
            for message in call:
                begun = True
                yield message
        except grpc.RpcError as caught:
            error = from_rpc_error(caught)
            if ends and error.code is grpc.StatusCode.DEADLINE_EXCEEDED:
                return
            if begun and error.code is grpc.StatusCode.UNAVAILABLE and not error.reason:
                raise CommandError(f"the connection to {self.address} broke", Status.UNREACHABLE) from None
            raise command_error(error, self.address) from None
        finally:
            call.cancel()

    def all_pages(self, method: Callable[..., R], request: Any, items: str, limit: int = 0) -> R:
        """The pages of a listing as one answer. Raises CommandError.

        items: the field with the items. limit: the most items, 0 for all.
        """
        whole: Any = None
        while True:
            left = limit - len(getattr(whole, items)) if limit and whole is not None else limit
            request.page_size = min(left, PAGE) or PAGE
            page: Any = self.call(method, request)
            if whole is None:
                whole = page
            else:
                whole.ClearField("next_page_token")
                whole.MergeFrom(page)
            if limit:
                # A page of leases ends with all leases of its last block, so it may be longer.
                del getattr(whole, items)[limit:]
            if not page.next_page_token or (limit and len(getattr(whole, items)) >= limit):
                answer: R = whole
                return answer
            request.page_token = page.next_page_token


async def all_pages(method: Callable[..., Awaitable[R]], request: Any, **options: Any) -> R:
    """Returns the pages of a listing as one answer. options: of each call. Raises AioRpcError."""
    whole: Any = await method(request, **options)
    while whole.next_page_token:
        request.page_token = whole.next_page_token
        whole.ClearField("next_page_token")
        whole.MergeFrom(await method(request, **options))
    answer: R = whole
    return answer
