"""Where a router's engines are: addresses, names that stand for several, and files with an address in each line."""

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
    """Looks the engines up. A source that cannot be read, or has nothing, stands for what was found there last."""

    def __init__(self, sources: Sequence[str], security: Security) -> None:
        self._sources = sources
        self._security = security
        self._found: dict[str, list[str]] = {}
        # Addresses that were found last and may not be called, and why a source was not read, by what found them.
        self._refused: dict[str, set[str]] = {}
        self._obstacles: dict[str, str] = {}

    async def addresses(self) -> list[str]:
        """The addresses that names and files stand for at the moment."""
        found: list[str] = []
        for source in self._sources:
            found += await self._of(source)
        return found

    def callable(self, found: Iterable[str], source: str) -> list[str]:
        """Those of these addresses that may be called; what is wrong with others is logged once."""
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
            # Also a file that is being written.
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
    """The words of a file. Raises OSError, UnicodeError."""
    return (await asyncio.to_thread(_text, Path(source.removeprefix(FILE)))).split()


def _text(path: Path) -> str:
    # Opening another kind of file may wait for ever.
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(f"{path} is no regular file")
    return path.read_text()


async def _hosts(source: str) -> list[str]:
    """The addresses behind a name. Raises OSError, UnicodeError."""
    host, port = addresses.split_host_port(source.removeprefix(DNS))
    infos = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    hosts = sorted({str(info[4][0]) for info in infos})
    return [f"[{one}]:{port}" if ":" in one else f"{one}:{port}" for one in hosts]
