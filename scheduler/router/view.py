"""The view of the caches: it knows no block yet, so that every prompt is new to every engine."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterable, Sequence

from protos.rpc.security import Security
from scheduler.router.score import Match


class CacheView:
    def keys(self, _executor_id: str, _token_ids: array[int], _salt: str | None) -> Sequence[int]:
        return ()

    def match(self, _executor_ids: Iterable[str], _keys: Sequence[int]) -> dict[str, Match]:
        return {}


class ViewFeed:
    def __init__(self, view: CacheView, address: str, security: Security) -> None: ...

    async def run(self) -> None:
        await asyncio.Event().wait()
