"""What processes serve for Prometheus is read, with TLS and without."""

from __future__ import annotations

import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

import certs
import pytest

from kvctl.measure.metrics import samples
from protos.rpc import metrics_server
from protos.rpc.security import PLAIN, Security
from tests.support.ports import free_address


async def test_metrics_are_read_as_they_are_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    ca = certs.authority()
    trusted, _ = ca.write(tmp_path, "ca")
    cert, key = certs.certificate(ca, "peer").write(tmp_path, "peer")
    tls = Security(tls_cert_file=cert, tls_key_file=key, tls_ca_file=trusted, tls_client_ca_file=trusted)
    for security, other in ((PLAIN, tls), (tls, PLAIN)):
        address = free_address()
        stop = metrics_server.start(address, lambda: True, security)
        try:
            found = await asyncio.to_thread(samples, address, 10, security)
            assert found["process_resident_memory_bytes"] > 1e6
            for wrong in (other, replace(security, tls_cert_file=None, tls_key_file=None)):
                if wrong != security:
                    with pytest.raises(OSError, match=r".+"):
                        await asyncio.to_thread(samples, address, 10, wrong)
        finally:
            stop()


def test_a_server_that_speaks_no_http_is_an_error_that_names_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as threads:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"-ERR unknown command\r\n")

        threads.submit(answer)
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(OSError, match=f"{address} does not answer in HTTP"):
            samples(address, 10, PLAIN)


async def test_on_loopback_metrics_answer_to_no_name_of_another_site() -> None:
    address = free_address()
    stop = metrics_server.start(address, lambda: True)
    try:
        plain = build_opener(ProxyHandler({}))
        with plain.open(Request(f"http://{address}/metrics", headers={"Host": "localhost"})) as answer:
            assert b"process_resident" in answer.read()
        with pytest.raises(HTTPError, match="400"):
            plain.open(Request(f"http://{address}/metrics", headers={"Host": "evil.example"}))
    finally:
        stop()
