"""The server's health, reflection, addresses and end."""

import asyncio
import contextlib
import os
import signal
import socket
import stat
import threading
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from urllib.error import HTTPError

import grpc
import pytest
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from protos.kvcache.v1 import kvcache_pb2 as pb
from protos.kvcache.v1 import kvcache_pb2_grpc as pb_grpc
from protos.rpc import connections, http_connection, interceptors, metrics_server
from protos.rpc import server as server_module
from protos.rpc.addresses import AddressError
from protos.rpc.channel import open_channel
from protos.rpc.http_server import bind
from protos.rpc.security import Security
from protos.rpc.server import Server, StopSignals
from protos.rpc.startup import raise_file_limit
from protos.rpc.version import VERSION_KEY, program_version
from tests.support.patience import patience
from tests.support.ports import free_address
from tests.unit.rpc.conftest import ADMIN, EVENTS, Admin, Endless, Served, serving

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def health(channel: grpc.aio.Channel, service: str) -> int:
    stub = health_pb2_grpc.HealthStub(channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=patience(5))).status


async def test_health_follows_the_process_and_each_service(served: Served) -> None:
    assert await health(served.channel, "") == NOT_SERVING
    served.server.set_serving(True)
    assert [await health(served.channel, name) for name in ("", ADMIN, EVENTS)] == [SERVING] * 3
    served.server.set_serving(False, EVENTS)
    assert [await health(served.channel, name) for name in ("", ADMIN, EVENTS)] == [SERVING, SERVING, NOT_SERVING]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await health(served.channel, "no.such.Service")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_an_answer_about_health_has_the_version(served: Served) -> None:
    call = health_pb2_grpc.HealthStub(served.channel).Check(health_pb2.HealthCheckRequest(), timeout=patience(5))
    await call
    assert dict(await call.trailing_metadata())[VERSION_KEY] == program_version()


async def test_all_of_an_addresss_health_is_listed(served: Served) -> None:
    served.server.set_serving(True)
    served.server.set_serving(False, EVENTS)
    stub = health_pb2_grpc.HealthStub(served.channel)
    listed = await stub.List(health_pb2.HealthListRequest(), timeout=patience(5))
    statuses = {name: answer.status for name, answer in listed.statuses.items()}
    assert [statuses[name] for name in ("", ADMIN, EVENTS)] == [SERVING, SERVING, NOT_SERVING]


async def test_a_health_watch_sees_every_change_and_ends_with_the_server(served: Served) -> None:
    stub = health_pb2_grpc.HealthStub(served.channel)
    watch = stub.Watch(health_pb2.HealthCheckRequest(service=ADMIN), timeout=patience(5))
    assert (await watch.read()).status == NOT_SERVING
    served.server.set_serving(True)
    assert (await watch.read()).status == SERVING
    last = asyncio.create_task(watch.read())
    await asyncio.gather(served.server.stop(), last)
    assert last.result().status == NOT_SERVING
    assert await watch.read() is grpc.aio.EOF


async def test_few_watches_are_open_at_once_and_others_may_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MAX_WATCHES", 3)
    async with watched() as stub:
        watches = [stub.Watch(health_pb2.HealthCheckRequest(), timeout=patience(30)) for _ in range(3)]
        for watch in watches:
            assert (await watch.read()).status == NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError, match="Health/Watch has 3 streams open") as caught:
            await stub.Watch(health_pb2.HealthCheckRequest(), timeout=patience(30)).read()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await stub.Check(health_pb2.HealthCheckRequest(), timeout=patience(30))).status == NOT_SERVING
        watches[0].cancel()
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):
                next_one = stub.Watch(health_pb2.HealthCheckRequest(), timeout=patience(30))
                assert (await next_one.read()).status == NOT_SERVING
                break


async def test_a_watch_that_needs_no_token_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interceptors, "OPEN_WATCH_SECONDS", 0.05)
    async with watched() as stub:
        watch = stub.Watch(health_pb2.HealthCheckRequest(), timeout=patience(30))
        assert (await watch.read()).status == NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError, match="has been open") as caught:
            await watch.read()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize(("callers", "pause"), [(270, 0.0), (400, 0.06), (800, 0.3)])
async def test_connections_without_calls_make_room_for_others(
    monkeypatch: pytest.MonkeyPatch, callers: int, pause: float
) -> None:
    """Also for many more than gRPC lets in at once; and a channel that is used now and then keeps its connection."""
    most = 128
    monkeypatch.setattr(server_module, "SHARE_OF_FILES", raise_file_limit() // most)
    # Not closed because they wait for long.
    monkeypatch.setattr(server_module, "HANDSHAKE_SECONDS", 3600.0)
    monkeypatch.setattr(server_module, "IDLE_SECONDS", 3600.0)
    stub_of, closed = health_pb2_grpc.HealthStub, Counter[int]()

    async def come_again(number: int, host: str, port: str) -> None:
        """Connects, asks nothing, and connects again."""
        while True:
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection(host, port)
                with contextlib.closing(writer):
                    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0")
                    while await reader.read(100):
                        pass
                    closed[number] += 1
            await asyncio.sleep(pause)

    async def call_now_and_then(channel: grpc.aio.Channel, ended: asyncio.Event) -> int:
        calls = 0
        while not ended.is_set():
            await stub_of(channel).Check(health_pb2.HealthCheckRequest(), timeout=patience(30))
            calls += 1
            await asyncio.sleep(0.02)
        return calls

    async with (
        serving("127.0.0.1:0", {}) as server,
        open_channel(server.addresses[0]) as earlier,
        # This one tries nothing again.
        grpc.aio.insecure_channel(server.addresses[0], [("grpc.use_local_subchannel_pool", 1)]) as used,
    ):
        watch = stub_of(earlier).Watch(health_pb2.HealthCheckRequest(), timeout=patience(120))
        assert (await watch.read()).status == NOT_SERVING
        address = server.addresses[0].split(":")
        ended = asyncio.Event()
        await stub_of(used).Check(health_pb2.HealthCheckRequest(), timeout=patience(30))
        calling = asyncio.create_task(call_now_and_then(used, ended))
        flood = [asyncio.create_task(come_again(number, *address)) for number in range(callers)]
        while len(closed) < callers:
            await asyncio.sleep(0.01)
        for _ in range(5):
            async with open_channel(server.addresses[0]) as newcomer:
                answer = await stub_of(newcomer).Check(
                    health_pb2.HealthCheckRequest(), timeout=patience(30), wait_for_ready=True
                )
                assert answer.status == NOT_SERVING
        ended.set()
        assert await calling
        server.set_serving(True)
        # It has been open all the time.
        assert (await watch.read()).status == SERVING
        for task in flood:
            task.cancel()
        await asyncio.wait(flood)


@pytest.mark.parametrize(
    ("text", "peer"),
    [
        ("ipv4:127.0.0.1:50000", ("127.0.0.1", 50000)),
        ("ipv6:%5B::1%5D:50000", ("::1", 50000)),
        ("ipv6:%5B::ffff:10.0.0.1%5D:50000", ("10.0.0.1", 50000)),
        ("ipv6:%5Bfe80::1%25eth0%5D:50000", ("fe80::1", 50000)),
        ("unix:", None),
    ],
)
def test_the_peer_of_a_call_is_that_of_its_socket(text: str, peer: tuple[str, int] | None) -> None:
    assert connections.peer_of(text) == peer


@contextlib.asynccontextmanager
async def watched() -> AsyncIterator[health_pb2_grpc.HealthStub]:
    """Health of a server without services."""
    async with serving("127.0.0.1:0", {}) as server, open_channel(server.addresses[0]) as channel:
        yield health_pb2_grpc.HealthStub(channel)


@pytest.mark.parametrize("version", ["v1alpha", "v1"])
async def test_reflection_lists_the_services(served: Served, version: str) -> None:
    call = served.channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )(timeout=patience(5))
    answers = aiter(call)
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    names = {service.name for service in (await anext(answers)).list_services_response.service}
    assert {ADMIN, EVENTS, "grpc.health.v1.Health"} <= names
    await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol=ADMIN))
    assert (await anext(answers)).file_descriptor_response.file_descriptor_proto
    await call.done_writing()


async def test_a_call_without_deadline_is_served_and_logged_once(served: Served) -> None:
    stub = pb_grpc.CacheAdminServiceStub(served.channel)
    with structlog.testing.capture_logs() as logs:
        for pool_id in ("a", "b"):
            assert (await stub.GetPool(pb.GetPoolRequest(pool_id=pool_id))).pool.pool_id == pool_id
    assert [entry["event"] for entry in logs] == ["call without deadline"]
    with structlog.testing.capture_logs() as logs:
        await stub.PurgeBlocks(pb.PurgeBlocksRequest(), timeout=patience(5))
    assert logs == []


async def test_a_port_of_zero_becomes_a_real_one_and_a_taken_one_is_an_error() -> None:
    first, second = Server("a", drain_seconds=0), Server("b", drain_seconds=0)
    first.listen("127.0.0.1:0", {})
    await first.start()
    (address,) = first.addresses
    assert not address.endswith(":0")
    second.listen(address, {}, setting="KVKEEP_B_ADDRESS")
    with pytest.raises(AddressError, match=rf"{address}.*KVKEEP_B_ADDRESS"):
        await second.start()
    await first.stop()


async def test_an_address_others_can_reach_needs_insecure() -> None:
    server = Server("open", drain_seconds=0)
    server.listen("0.0.0.0:0", {}, setting="KVKEEP_OPEN_ADDRESS")
    with pytest.raises(AddressError, match=r"0\.0\.0\.0:0.*KVKEEP_OPEN_ADDRESS.*KVKEEP_INSECURE"):
        await server.start()
    allowed = Server("open", drain_seconds=0, security=Security(insecure=True))
    allowed.listen("0.0.0.0:0", {})
    await allowed.start()
    await allowed.stop()


async def test_an_address_that_this_machine_does_not_have_is_not_said_to_be_in_use() -> None:
    address, security = "192.0.2.1:0", Security(insecure=True)
    server = Server("elsewhere", drain_seconds=0, security=security)
    server.listen(address, {}, setting="KVKEEP_X")
    words = r"cannot listen on 192\.0\.2\.1:0: Cannot assign requested address \(KVKEEP_X chooses another\)"
    with pytest.raises(AddressError, match=words):
        await server.start()
    with pytest.raises(AddressError, match=words):
        bind(address, insecure=True, setting="KVKEEP_X")


async def test_a_socket_is_for_its_user_only_and_a_dead_ones_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "socket"
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    server = Server("unix", drain_seconds=0)
    server.listen(f"unix:{path}", {})
    await server.start()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    rival = Server("rival", drain_seconds=0)
    rival.listen(f"unix:{path}", {})
    with pytest.raises(AddressError, match="already in use"):
        await rival.start()
    async with open_channel(f"unix:{path}") as channel:
        assert await health(channel, "") == NOT_SERVING
    await server.stop()


async def test_a_path_too_long_for_a_socket_or_a_plain_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path, words in ((tmp_path / ("x" * 120), "longer than"), (tmp_path / "file", "no socket")):
        server = Server("unix")
        server.listen(f"unix:{path}", {})
        with pytest.raises(AddressError, match=words):
            await server.start()


async def test_sigterm_says_not_serving_then_drains_then_stops(tmp_path: Path) -> None:
    server = Server("test", drain_seconds=5)
    address = f"unix:{tmp_path}/s"
    server.listen(address, {ADMIN: lambda s: pb_grpc.add_CacheAdminServiceServicer_to_server(Admin(), s)})
    await server.start()
    server.set_serving(True)
    seen: list[int] = []

    async def drain() -> None:
        # As when the process becomes ready, or registers again, only now.
        server.set_serving(True)
        async with open_channel(address) as channel:
            seen.append(await health(channel, ""))

    running = asyncio.create_task(server.run_until_stopped(StopSignals(), drain))
    await asyncio.sleep(0)
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(running, patience(5))
    assert seen == [NOT_SERVING]


async def test_a_second_signal_does_not_wait_for_the_drain(tmp_path: Path) -> None:
    server = Server("test", drain_seconds=600)
    server.listen(f"unix:{tmp_path}/s", {})
    await server.start()
    draining = asyncio.Event()

    async def drain() -> None:
        draining.set()
        await asyncio.Event().wait()

    running = asyncio.create_task(server.run_until_stopped(StopSignals(), drain))
    await asyncio.sleep(0)
    os.kill(os.getpid(), signal.SIGINT)
    await asyncio.wait_for(draining.wait(), patience(5))
    os.kill(os.getpid(), signal.SIGINT)
    assert not await asyncio.wait_for(running, patience(5))


@pytest.mark.parametrize(
    "sent", [b"", b"PRI * HTTP/2.0\r\n\r\nSM\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"]
)
async def test_a_connection_without_a_call_is_closed(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "HANDSHAKE_SECONDS", 0.3)
    monkeypatch.setattr(server_module, "IDLE_SECONDS", 0.3)
    async with serving("127.0.0.1:0") as server:
        [address] = server.addresses
        reader, writer = await asyncio.open_connection(*address.split(":"))
        writer.write(sent)
        async with asyncio.timeout(patience(30)):
            while await reader.read(1 << 16):
                pass
        writer.close()


async def test_metrics_are_served_beside_connections_that_ask_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Enough for the request below.
    monkeypatch.setattr(http_connection, "REQUEST_SECONDS", 1.0)
    metrics_address = free_address()
    threads = threading.active_count()
    async with serving(f"unix:{tmp_path}/s", metrics_address=metrics_address):
        idle = [await asyncio.open_connection(*metrics_address.split(":")) for _ in range(50)]
        text = await asyncio.to_thread(
            lambda: urllib.request.urlopen(f"http://{metrics_address}/metrics").read().decode()
        )
        assert "kvkeep_rpc_in_flight" in text
        # One for the server and one for the reading above, none for a connection.
        assert threading.active_count() < threads + 10
        for reader, writer in idle:
            async with asyncio.timeout(patience(30)):
                assert await reader.read() == b""
            writer.close()


def status_of(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=patience(30)) as answer:
            return answer.status
    except HTTPError as error:
        with error:
            return error.code


async def test_supervisors_learn_over_http_whether_a_process_serves_and_lives(tmp_path: Path) -> None:
    metrics_address = free_address()
    health, live = (f"http://{metrics_address}/{path}" for path in ("health", "live"))
    async with serving(f"unix:{tmp_path}/s", metrics_address=metrics_address) as server:
        assert [await asyncio.to_thread(status_of, url) for url in (health, live)] == [503, 200]
        server.set_serving(True)
        assert [await asyncio.to_thread(status_of, url) for url in (health, live)] == [200, 200]
        # One service of several is not the process.
        server.set_serving(False, ADMIN)
        assert await asyncio.to_thread(status_of, health) == 200
        server.set_serving(False)
        assert [await asyncio.to_thread(status_of, url) for url in (health, live)] == [503, 200]


async def test_a_process_whose_loop_hangs_neither_serves_nor_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_server, "ANSWER_SECONDS", 0.05)
    metrics_address = free_address()
    async with serving(f"unix:{tmp_path}/s", metrics_address=metrics_address) as server:
        server.set_serving(True)
        with ThreadPoolExecutor(2) as threads:
            asked = [threads.submit(status_of, f"http://{metrics_address}/{path}") for path in ("health", "live")]
            # Nothing else runs on the loop until both have been answered.
            assert [one.result() for one in asked] == [503, 503]
        monkeypatch.setattr(metrics_server, "ANSWER_SECONDS", 30.0)
        assert await asyncio.to_thread(status_of, f"http://{metrics_address}/health") == 200


async def test_a_probe_in_flight_does_not_delay_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "ANSWER_SECONDS", 3600.0)
    metrics_address = free_address()
    asked = threading.Event()
    monkeypatch.setattr(metrics_server, "Future", lambda: asked.set() or Future())
    async with serving(f"unix:{tmp_path}/s", metrics_address=metrics_address) as server:
        with ThreadPoolExecutor(1) as threads:
            probe = threads.submit(status_of, f"http://{metrics_address}/live")
            # It waits for this loop, which continues to stop and never lets it run in between.
            assert asked.wait(patience(30))
            stopped = server._stop_metrics
            assert stopped is not None
            stopped()
            server._stop_metrics = None
            assert probe.result(patience(30)) == 503


async def test_metrics_count_calls_by_method_and_code(tmp_path: Path) -> None:
    metrics_address = free_address()
    async with serving(f"unix:{tmp_path}/s", metrics_address=metrics_address):
        async with open_channel(f"unix:{tmp_path}/s") as channel:
            stub = pb_grpc.CacheAdminServiceStub(channel)
            await stub.PurgeBlocks(pb.PurgeBlocksRequest(), timeout=patience(5))
            with pytest.raises(grpc.aio.AioRpcError):
                await stub.GetPool(pb.GetPoolRequest(pool_id="field"), timeout=patience(5))

        def read() -> str:
            with urllib.request.urlopen(f"http://{metrics_address}/metrics") as response:
                return response.read().decode()

        text = await asyncio.to_thread(read)
        assert f'kvkeep_rpc_handled_total{{code="INVALID_ARGUMENT",method="{ADMIN}/GetPool"}}' in text
        assert f'kvkeep_rpc_handled_total{{code="OK",method="{ADMIN}/PurgeBlocks"}}' in text


async def test_a_cancelled_stream_ends_its_handler(tmp_path: Path) -> None:
    endless = Endless()
    address = f"unix:{tmp_path}/s"
    async with serving(address, {"test.Endless": endless.add}), open_channel(address) as channel:
        call = channel.unary_stream("/test.Endless/Stream")(b"", timeout=patience(30))
        assert await call.read() == b""
        call.cancel()
        await asyncio.wait_for(endless.ended.wait(), patience(5))


async def test_a_message_beyond_the_limit_is_refused_by_its_size(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/s"
    async with serving(address, max_message_bytes=1000), open_channel(address) as channel:
        stub = pb_grpc.CacheAdminServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetPool(pb.GetPoolRequest(pool_id="x" * 2000), timeout=patience(5))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
