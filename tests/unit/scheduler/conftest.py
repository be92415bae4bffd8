"""A whole scheduler between a fake executor and a cache manager, over unix sockets."""

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import openai
import pytest

from tests.support.keyring import Keyring
from tests.support.scheduler.fleet import run_engine
from tests.support.scheduler.http import client, serve
from tests.support.scheduler.stack import Stack, StackFactory


@pytest.fixture
def run_stack(tmp_path: Path) -> StackFactory:
    """Starts a stack; checks at its end that every block was released."""
    return partial(run_engine, tmp_path, scheduler_id="test")


@pytest.fixture
async def stack(run_stack: StackFactory) -> AsyncIterator[Stack]:
    """A stack with default settings."""
    async with run_stack() as stack:
        yield stack


@pytest.fixture
async def address(stack: Stack) -> AsyncIterator[str]:
    """The address of the stack's HTTP API."""
    async with serve(stack.scheduler.service) as address:
        yield address


@pytest.fixture
def keyring(tmp_path: Path) -> Keyring:
    """A tokens file without tokens."""
    return Keyring(tmp_path)


@pytest.fixture
async def caller(address: str) -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's client of that API."""
    async with client(address) as caller:
        yield caller
