"""Front ends in separate processes: their number, their shared state, and how they and their requests end."""

import asyncio
import contextlib
import http.client
import json
import os
import signal
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import certs
import openai
import psutil
import pytest

from protos.generation.v1 import generation_pb2 as pb
from protos.rpc.identity import Role
from protos.rpc.settings import SettingsError, load
from scheduler import frontends
from scheduler.settings import SchedulerSettings
from tests.stack import metrics
from tests.support.keyring import Keyring
from tests.support.patience import patience
from tests.support.ports import free_address
from tests.support.scheduler.http import LEAST, Answer, ask, client
from tests.support.scheduler.process import Running, scheduler

LONG = LEAST | {"max_tokens": 300, "stream": True}


@contextlib.asynccontextmanager
async def run(folder: Path, count: int = 2, **settings: object) -> AsyncIterator[tuple[Running, str]]:
    """A scheduler with front ends that serves, and where these do."""
    address = free_address()
    async with scheduler(folder, http_address=address, frontends=count, **settings) as running:
        await running.begin()
        await serving(address, count)
        yield running, address


async def value(address: str, name: str, labels: str = "") -> float:
    """A metric as every front end shows it; 0 where there is none yet."""
    found = await asyncio.to_thread(lambda: list(metrics(address)))
    return sum(amount for metric, its, amount in found if (metric, its) == (f"kvkeep_{name}", labels))


async def serving(address: str, count: int) -> None:
    async with asyncio.timeout(patience(30)):
        while await value(address, "scheduler_frontends") != count:
            await asyncio.sleep(0.05)


async def first_answer(address: str) -> Answer:
    """The first answer to a probe, once anything listens."""
    async with asyncio.timeout(patience(30)):
        while True:
            with contextlib.suppress(ConnectionRefusedError):
                return await ask(address, "GET", "/health")
            await asyncio.sleep(0.05)


def pids(running: Running) -> list[int]:
    return [child.pid for child in psutil.Process(running.process.pid).children()]


async def health(address: str, obstacle: str) -> None:
    """Waits until the answer of /health contains `obstacle`."""
    async with asyncio.timeout(patience(20)):
        while (answer := await ask(address, "GET", "/health")).status == 200 or obstacle not in answer.error["message"]:
            await asyncio.sleep(0.05)


class Stream:
    """A stream of events on a separate connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.port: int = writer.get_extra_info("sockname")[1]

    @classmethod
    async def begin(cls, address: str, **fields: object) -> "Stream":
        """Returns with the first event."""
        body = json.dumps(LONG | fields).encode()
        reader, writer = await asyncio.open_connection(*address.split(":"))
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            + f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode()
            + body
        )
        assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        await reader.readuntil(b"data: ")
        return cls(reader, writer)

    def server(self, candidates: list[int]) -> int:
        """The process that serves it."""
        for pid in candidates:
            if any(one.raddr and one.raddr.port == self.port for one in psutil.Process(pid).net_connections("tcp")):
                return pid
        raise AssertionError("nobody serves it")

    async def rest(self) -> str:
        """Everything that follows; what a process that is killed leaves is no whole answer."""
        with contextlib.closing(self._writer), contextlib.suppress(ConnectionError):
            return (await self._reader.read()).decode()
        return ""

    def leave(self) -> None:
        self._writer.close()


async def one_at_each(address: str, running: Running) -> dict[int, Stream]:
    """A stream at every front end, by its process."""
    found: dict[int, Stream] = {}
    async with asyncio.timeout(patience(30)):
        while set(found) != set(pids(running)):
            stream = await Stream.begin(address)
            found.setdefault(stream.server(pids(running)), stream)
            if stream not in found.values():
                stream.leave()
    return found


@pytest.mark.parametrize(
    ("given", "cores", "count"),
    [("auto", 1, 0), ("auto", 3.5, 0), ("auto", 4, 1), ("auto", 11, 2), ("auto", 96, 4), (0, 96, 0), (3, 1, 3)],
)
def test_the_number_of_front_ends_follows_the_cores_unless_it_is_given(
    given: str | int, cores: float, count: int
) -> None:
    assert frontends.front_ends(SchedulerSettings(frontends=given), cores) == count
    assert frontends.front_ends(SchedulerSettings(frontends=given, http_address=""), cores) == 0


@pytest.mark.parametrize(("quota", "cores"), [("150000 100000", 1.5), ("max 100000", 6), ("900000 100000", 6), ("", 6)])
def test_a_control_group_withholds_cores(
    quota: str, cores: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpu.max").write_text(quota)
    monkeypatch.setattr(frontends, "_QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
    assert frontends.available_cores() == cores


@pytest.mark.parametrize("given", ["two", "-1", "65", "1.5", ""])
def test_another_number_is_refused_by_name(given: str) -> None:
    with pytest.raises(SettingsError, match="KVKEEP_SCHEDULER_FRONTENDS: must be auto or a number from 0 to 64"):
        load(SchedulerSettings, {"KVKEEP_SCHEDULER_FRONTENDS": given})


async def test_front_ends_answer_as_the_scheduler_does_before_and_after_it_serves(tmp_path: Path) -> None:
    address = free_address()
    async with scheduler(tmp_path, http_address=address, frontends=2) as running:
        early = await first_answer(address)
        assert (early.status, early.error["code"]) == (503, "not_ready")
        assert "waits for the executor" in early.error["message"]
        await running.begin()
        await serving(address, 2)
        assert (await ask(address, "GET", "/health")).status == 200
        async with client(address) as caller:
            answer = await caller.completions.create(model="fake", **LEAST | {"prompt": [1, 2]})
            assert answer.usage is not None
            assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 3)
            with pytest.raises(openai.BadRequestError):
                await caller.completions.create(model="fake", **LEAST | {"n": 200})
        # Each scrape may meet another front end: all show the sum, and nothing is counted twice.
        for _ in range(4):
            assert await value(address, "scheduler_requests_total", 'finish_reason="length"') == 1
            assert await value(address, "scheduler_request_seconds_count") == 1
            assert await value(address, "scheduler_refused_requests_total", 'reason="INVALID_FIELD"') == 1
            assert await value(address, "scheduler_output_tokens_total") == 3
            assert await value(address, "http_requests_total", 'code="200",route="/v1/completions"') == 1


async def test_a_front_end_that_dies_takes_its_own_streams_only_and_is_started_again(tmp_path: Path) -> None:
    async with run(tmp_path) as (running, address):
        running.executor.step_seconds = 0.02
        (killed, broken), (left, whole) = (await one_at_each(address, running)).items()
        os.kill(killed, signal.SIGKILL)
        assert "[DONE]" not in await broken.rest()
        await running.manager.until(lambda: len(running.manager.live) == 1)
        assert "data: [DONE]" in await whole.rest()
        await serving(address, 2)
        assert left in pids(running)
        assert killed not in pids(running)
        # The scrape itself. The stream may be in flight for a moment after its last line.
        async with asyncio.timeout(patience(60)):
            while await value(address, "http_in_flight") != 1:
                await asyncio.sleep(0.02)
        running.executor.step_seconds = 0
        for _ in range(8):
            assert (await ask(address, "POST", "/v1/completions", json.dumps(LEAST))).status == 200


async def test_callers_who_leave_free_their_blocks(tmp_path: Path) -> None:
    async with run(tmp_path) as (running, address):
        running.executor.step_seconds = 0.02
        streams = await one_at_each(address, running)
        for stream in streams.values():
            stream.leave()
        await running.manager.unused()


async def test_no_stream_is_lost_when_the_scheduler_ends(tmp_path: Path) -> None:
    async with run(tmp_path) as (running, address):
        running.executor.step_seconds = 0.05
        streams = await one_at_each(address, running)
        children = pids(running)
        # None ends before callers were told. A closed gate would be a silent executor, and that another answer.
        running.executor.step_seconds = 1
        # As a service manager that signals the whole group.
        for pid in (*children, running.process.pid):
            os.kill(pid, signal.SIGTERM)
        while (answer := await ask(address, "GET", "/health")).status == 200:
            await asyncio.sleep(0.01)
        assert (answer.status, "drains" in answer.error["message"]) == (503, True)
        refused = await ask(address, "POST", "/v1/completions", json.dumps(LEAST))
        assert (refused.status, refused.error["code"]) == (503, "draining")
        running.executor.step_seconds = 0
        for stream in streams.values():
            assert "data: [DONE]" in await stream.rest()
        assert await running.end() == 0
        assert not any(map(psutil.pid_exists, children))


async def test_streams_that_take_too_long_end_with_an_error(tmp_path: Path) -> None:
    async with run(tmp_path, drain_seconds=0.1) as (running, address):
        running.executor.step_seconds = 0.05
        streams = await one_at_each(address, running)
        running.process.send_signal(signal.SIGTERM)
        for stream in streams.values():
            assert '"code":"draining"' in (await stream.rest()).split("data: ")[-1]
        assert await running.end() == 0


async def test_a_second_signal_ends_front_ends_at_once(tmp_path: Path) -> None:
    async with run(tmp_path) as (running, address):
        running.executor.step_seconds = 0.05
        streams = await one_at_each(address, running)
        running.process.send_signal(signal.SIGINT)
        while (await ask(address, "GET", "/health")).status == 200:
            await asyncio.sleep(0.01)
        running.process.send_signal(signal.SIGINT)
        for stream in streams.values():
            assert '"code":"draining"' in (await stream.rest()).split("data: ")[-1]
        await running.end()


async def test_no_front_end_outlives_a_scheduler_that_is_killed(tmp_path: Path) -> None:
    async with run(tmp_path) as (running, address):
        running.executor.step_seconds = 0.05
        streams = await one_at_each(address, running)
        children = pids(running)
        running.process.kill()
        await running.process.wait()
        for stream in streams.values():
            assert '"code":"draining"' in (await stream.rest()).split("data: ")[-1]
        async with asyncio.timeout(patience(20)):
            while any(psutil.pid_exists(child) and psutil.Process(child).status() != "zombie" for child in children):
                await asyncio.sleep(0.02)


async def test_the_queue_is_bounded_over_all_front_ends(tmp_path: Path) -> None:
    async with run(tmp_path, max_running=1, max_waiting=2) as (running, address):
        running.manager.gate.clear()
        body = json.dumps(LEAST | {"prompt": [1, 2]})
        asked = [asyncio.create_task(ask(address, "POST", "/v1/completions", body)) for _ in range(12)]
        await running.manager.until(lambda: sum(one.done() for one in asked) == 10)
        refused = [one.result() for one in asked if one.done()]
        assert {(one.status, one.error["code"]) for one in refused} == {(429, "queue_full")}
        assert all(int(one.headers["retry-after"]) >= 1 for one in refused)
        running.manager.gate.set()
        assert sorted([answer.status for answer in await asyncio.gather(*asked)]) == [200] * 2 + [429] * 10
        assert await value(address, "scheduler_refused_requests_total", 'reason="QUEUE_FULL"') == 10


async def test_samples_of_a_request_are_one_request_of_its_tenant(tmp_path: Path, keyring: Keyring) -> None:
    keyring.add(Role.CALLER, "acme")
    (token,) = keyring.tokens.values()
    async with (
        run(tmp_path, 1, max_tenant_requests=1, tokens_file=keyring.file) as (running, address),
        client(address, token) as caller,
    ):
        running.executor.step_seconds = 0.01
        asked = LEAST | {"prompt": [1, 2, 3], "n": 3, "max_tokens": 30}
        first = asyncio.create_task(caller.completions.create(model="fake", **asked))
        await running.manager.until(lambda: len(running.manager.live) == 3)
        # It does not end before the other one is refused.
        running.executor.gate.clear()
        with pytest.raises(openai.RateLimitError, match="of this tenant"):
            await caller.completions.create(model="fake", **asked)
        running.executor.gate.set()
        texts = {choice.text for choice in (await first).choices}
        assert len(texts) == 1


async def test_an_operator_drains_front_ends_and_takes_them_back(tmp_path: Path) -> None:
    async with run(tmp_path, 1) as (running, address):
        for draining, status in ((True, 503), (False, 200)):
            await running.admin.SetDraining(pb.SetDrainingRequest(draining=draining), timeout=patience(5))
            async with asyncio.timeout(patience(10)):
                while (await ask(address, "GET", "/health")).status != status:
                    await asyncio.sleep(0.02)
            assert (await ask(address, "POST", "/v1/completions", json.dumps(LEAST))).status == status


async def test_health_says_when_the_cache_manager_is_silent(tmp_path: Path) -> None:
    async with run(tmp_path, 1) as (running, address):
        running.manager.gate.clear()
        waiting = asyncio.create_task(ask(address, "POST", "/v1/completions", json.dumps(LEAST)))
        await health(address, "the cache manager does not answer: new requests wait")
        running.manager.gate.set()
        assert (await waiting).status == 200


async def test_the_access_log_has_one_line_per_request(tmp_path: Path) -> None:
    file = tmp_path / "access"
    async with run(tmp_path, access_log=file) as (_, address):
        for _ in range(6):
            assert (await ask(address, "POST", "/v1/completions", json.dumps(LEAST))).status == 200
        # Each process has a thread that writes.
        async with asyncio.timeout(patience(10)):
            while len(text := file.read_text().splitlines()) < 6:
                await asyncio.sleep(0.02)
        lines = [json.loads(line) for line in text]
        assert [(line["route"], line["status"], line["finish_reason"]) for line in lines] == [
            ("/v1/completions", 200, "length")
        ] * 6
        assert {line["output_tokens"] for line in lines} == {3}
        assert all(line["peer"].startswith("127.0.0.1:") for line in lines)


async def test_front_ends_have_the_certificate_of_the_scheduler(tmp_path: Path) -> None:
    address, authority = free_address(), certs.authority()
    trusted, _ = authority.write(tmp_path, "ca")
    certificate, key = certs.certificate(authority, "scheduler").write(tmp_path, "scheduler")
    tls = {"tls_cert_file": certificate, "tls_key_file": key, "tls_ca_file": trusted}
    context = ssl.create_default_context(cafile=str(trusted))

    def status() -> int:
        connection = http.client.HTTPSConnection(
            address.replace("127.0.0.1", "localhost"), context=context, timeout=patience(30)
        )
        with contextlib.closing(connection):
            connection.request("GET", "/health")
            return connection.getresponse().status

    async with scheduler(tmp_path, http_address=address, frontends=1, **tls), asyncio.timeout(patience(30)):
        found = 0
        while not found:
            with contextlib.suppress(ConnectionRefusedError):
                found = await asyncio.to_thread(status)
        assert found == 503, "its neighbours are not there"
        with pytest.raises((http.client.HTTPException, ConnectionError)):
            await ask(address, "GET", "/health")


async def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    async with run(tmp_path, 2) as (_, address):
        (tmp_path / "other").mkdir()
        async with scheduler(tmp_path / "other", http_address=address, frontends=2) as second:
            assert await second.end() == 1


async def test_health_says_that_an_engine_drains_even_if_its_cache_manager_is_silent(tmp_path: Path) -> None:
    async with run(tmp_path, 1) as (running, address):
        running.manager.gate.clear()
        waiting = asyncio.create_task(ask(address, "POST", "/v1/completions", json.dumps(LEAST)))
        await health(address, "the cache manager does not answer: new requests wait")
        await running.admin.SetDraining(pb.SetDrainingRequest(draining=True), timeout=patience(5))
        await health(address, "the scheduler drains: it takes no new requests")
        running.manager.gate.set()
        assert (await waiting).status == 200
