"""The examples of the pages work, and print what the pages say."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest

from protos.kvcache.v1 import kvcache_pb2 as kv
from protos.kvcache.v1 import kvcache_pb2_grpc as kvcache_rpc
from tests import capture
from tests.stack import Stack
from tests.support.pages import DOCS, WITH_EXAMPLES, Reader, elsewhere, examples, places
from tests.support.patience import patience

pytestmark = pytest.mark.model

SECURITY = DOCS / "security.md"


@pytest.fixture
def reader(
    served: Stack, addresses: dict[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> Iterator[Reader]:
    (tmp_path / "operations.log").symlink_to(served.folder / "operations.log")
    environment = {f"KVKEEP_{setting.upper()}": address for setting, address in addresses.items()}
    with Reader(tmp_path, capfd, places(addresses), **environment) as reader:
        yield reader


def wait_until_released(stack: Stack) -> None:
    """A request's blocks are released with a sync that comes after its last answer."""
    with grpc.insecure_channel(stack.admin) as channel:
        admin: kvcache_rpc.CacheAdminServiceStub = kvcache_rpc.CacheAdminServiceStub(channel)
        deadline = time.monotonic() + patience(10)
        while admin.ListSequences(kv.ListSequencesRequest(), timeout=patience(5)).sequences:
            assert time.monotonic() < deadline
            time.sleep(0.02)


@pytest.mark.parametrize("page", [page for page in WITH_EXAMPLES if page != SECURITY], ids=lambda page: page.stem)
def test_every_example_answers_as_the_page_shows(served: Stack, reader: Reader, page: Path) -> None:
    for example in examples(page):
        reader.check(example)
        if not reader.is_busy:
            wait_until_released(served)


def test_the_session_of_the_readme_still_runs_so() -> None:
    assert alike(capture.session()) == alike(capture.shown(capture.README.read_text()))


def alike(session: str) -> str:
    """The text without values that differ from run to run: keys, times, speed, and widths of columns."""
    text = re.sub(r"\b[0-9a-f]{12}\b", "KEY", session)
    text = re.sub(r"\b(?:[\d.]+[hm])*[\d.]+m?s\b", "TIME", text)
    text = re.sub(r"TTFT \d+ ms · [\d.]+ tokens/s", "SPEED", text)
    return re.sub(r"pin-\d+|[\d.]+%", "", re.sub(r" +", " ", text))


def test_the_way_to_tls_and_tokens_leads_there(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    addresses = elsewhere()
    environment = {f"KVKEEP_{setting.upper()}": address for setting, address in addresses.items()}
    with Reader(tmp_path, capfd, places(addresses), **environment) as reader, ExitStack() as running:
        for example in examples(SECURITY):
            code = example.code.removesuffix("\nmake run-stack")
            reader.check(example._replace(code=code))
            if code != example.code:
                settings = {
                    name[len("KVKEEP_") :].lower(): value for name, value in reader.variables("KVKEEP_").items()
                }
                running.enter_context(Stack(**settings, executor_max_tokens=4096))
