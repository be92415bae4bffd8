"""Programs report the state of a connection in their own lines; gRPC's notices about it do not appear."""

import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from tests.stack import ROOT
from tests.support.patience import patience

PROGRAMS = {
    "generate": ["scheduler.generate", "hello", "--timeout", "5", "--address"],
    "kvctl": ["kvctl", "pools", "--timeout", "5s", "--server"],
}
# Frames of HTTP/2: empty SETTINGS, and GOAWAY with an internal error, which gRPC writes a notice about.
SETTINGS = b"\0\0\0\x04\0\0\0\0\0"
GOAWAY = struct.pack(">I", 8)[1:] + b"\x07\0" + struct.pack(">III", 0, 0, 2)


@pytest.fixture
def leaving() -> Iterator[str]:
    """The address of a server that ends every connection at once."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.sendall(SETTINGS + GOAWAY)
                    while connection.recv(65_536):
                        pass

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
    thread.join(patience(5))


def errors(program: str, address: str, **variables: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("GRPC_", "KVKEEP_"))}
    done = subprocess.run(
        [sys.executable, "-m", *PROGRAMS[program], address],
        env=environment | {"PYTHONPATH": str(ROOT)} | variables,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=patience(60),
        check=False,
    )
    assert done.returncode != 0
    return done.stderr


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_lost_connection_is_one_line(program: str, leaving: str) -> None:
    [said] = errors(program, leaving).strip().splitlines()
    assert said.startswith("error: ")


def test_the_notices_are_there_for_whom_wants_them(leaving: str) -> None:
    assert "goaway" in errors("generate", leaving, GRPC_VERBOSITY="INFO")
