"""Waiting for a condition."""

import asyncio
from collections.abc import Callable

from tests.support.patience import patience


async def until(reached: Callable[[], object]) -> None:
    """Waits until the condition holds. Raises TimeoutError."""
    async with asyncio.timeout(patience(20)):
        while not reached():
            await asyncio.sleep(0.01)
