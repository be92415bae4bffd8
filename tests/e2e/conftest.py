"""A stack as people meet it, for the tests of what they use."""

from collections.abc import Iterator

import pytest

from tests.stack import Stack
from tests.support.pages import elsewhere


@pytest.fixture(scope="session")
def addresses() -> dict[str, str]:
    """Where `served` listens, by setting."""
    return elsewhere()


@pytest.fixture(scope="session")
def served(addresses: dict[str, str]) -> Iterator[Stack]:
    """With HTTP, metrics and a host tier, and so small a queue that a test fills it."""
    settings = {"executor_max_tokens": 4096, "executor_host_cache_size": "16MiB"}
    stack = Stack(**addresses, **settings, scheduler_max_running=4, scheduler_max_waiting=8)
    stack.own["cachemgr"] = {"cachemgr_operation_log": stack.folder / "operations.log"}
    with stack:
        yield stack
