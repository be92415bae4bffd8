"""Where a router's engines are: addresses, names that stand for several addresses, and files that list addresses."""

from __future__ import annotations

import asyncio
import socket
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path

import structlog

from protos.rpc import addresses
from protos.rpc.addresses import AddressError
from protos.rpc.security import Security
from scheduler.router.settings import DNS, FILE

log = structlog.get_logger()


class EngineList:
    """Looks up the engines. For a source that cannot be read, or is empty, what was found there last still holds."""

    def __init__(self, sources: Sequence[str], security: Security) -> None:
        self._sources = sources
        self._security = security
        self._found: dict[str, list[str]] = {}
        # By source: the addresses found last that may not be called, and why the source was not read.
        self._refused: dict[str, set[str]] = {}
        self._obstacles: dict[str, str] = {}

    async def addresses(self) -> list[str]:
        """Returns the addresses that names and files stand for at the moment."""
        found: list[str] = []
        for source in self._sources:
            found += await self._of(source)
        return found

    def callable(self, found: Iterable[str], source: str) -> list[str]:
        """Returns the addresses that may be called; what is wrong with the others is logged once."""
        usable, refused = [], set()
        for address in found:
            try:
                self._security.check_target(addresses.validate(address))
            except (AddressError, ValueError) as error:
                refused.add(address)
                if address not in self._refused.get(source, ()):
                    log.error("an address cannot be used", address=address, source=source, cause=str(error))
            else:
                usable.append(address)
        self._refused[source] = refused
        return usable

    async def _of(self, source: str) -> list[str]:
        if not source.startswith((FILE, DNS)):
            return [source]
        try:
            read = _lines if source.startswith(FILE) else _hosts
            found = self.callable(await read(source), source)
        except (OSError, UnicodeError) as error:
            # This also happens while a file is being written.
            self._say(source, str(error))
            return self._found.get(source, [])
        if not found:
            self._say(source, "it names no engine")
            return self._found.get(source, [])
        self._obstacles.pop(source, None)
        self._found[source] = found
        return found

    def _say(self, source: str, cause: str) -> None:
        if self._obstacles.get(source) != cause:
            self._obstacles[source] = cause
            log.warning("engines cannot be looked up", source=source, cause=cause)


async def _lines(source: str) -> list[str]:
    """Returns the words of a file. Raises OSError, UnicodeError."""
    return (await asyncio.to_thread(_text, Path(source.removeprefix(FILE)))).split()


def _text(path: Path) -> str:
    # Opening any other kind of file may block forever.
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(f"{path} is no regular file")
    return path.read_text()


async def _hosts(source: str) -> list[str]:
    """Returns the addresses that a name stands for. Raises OSError, UnicodeError."""
    host, port = addresses.split_host_port(source.removeprefix(DNS))
    infos = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    hosts = sorted({str(info[4][0]) for info in infos})
    return [f"[{one}]:{port}" if ":" in one else f"{one}:{port}" for one in hosts]
