"""Ends what goes on under a token that no longer holds: it was taken out of the file, changed, or has expired."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator

from protos.rpc.identity import Identity, UnauthenticatedError

# How often the tokens of calls that go on are looked at.
LOOK_SECONDS = 1.0


class _Call:
    """A call that goes on, in the task that makes it here."""

    def __init__(self, task: asyncio.Task[object]) -> None:
        self.task = task
        self.is_revoked = False


class Holders:
    """Calls that go on, by their tokens."""

    def __init__(self, identify: Callable[[str], Identity]) -> None:
        """identify: who sends this value of an Authorization header; raises UnauthenticatedError."""
        self._identify = identify
        self._calls: dict[tuple[str, Identity], set[_Call]] = {}
        self._timer: asyncio.TimerHandle | None = None

    @contextlib.contextmanager
    def holding(self, authorization: str, identity: Identity) -> Iterator[None]:
        """Cancels the task in the block when the header stands for somebody else or nobody.

        Then UnauthenticatedError leaves the block.
        """
        task = asyncio.current_task()
        assert task is not None
        call, cancelling = _Call(task), task.cancelling()
        calls = self._calls.setdefault((authorization, identity), set())
        calls.add(call)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LOOK_SECONDS, self._look)
        try:
            yield
        except asyncio.CancelledError:
            # Unless it was cancelled for another reason, too.
            if call.is_revoked and task.uncancel() <= cancelling:
                raise UnauthenticatedError from None
            raise
        finally:
            calls.remove(call)
            if not calls:
                self._calls.pop((authorization, identity), None)

    def _look(self) -> None:
        self._timer = None
        for (authorization, identity), calls in self._calls.items():
            if not self._still(authorization, identity):
                for call in calls:
                    if not call.is_revoked:
                        call.is_revoked = True
                        call.task.cancel()
        if self._calls:
            self._timer = asyncio.get_running_loop().call_later(LOOK_SECONDS, self._look)

    def _still(self, authorization: str, identity: Identity) -> bool:
        try:
            return self._identify(authorization) == identity
        except UnauthenticatedError:
            return False
