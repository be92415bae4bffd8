"""Addresses that a process listens on: host:port or unix:/path."""

import errno
import ipaddress
import re
import socket
import stat
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

_UNIX = "unix:"
# sun_path holds 108 bytes including the terminating zero.
_MAX_SOCKET_PATH = 107
_MAX_PORT = 65_535
_NUMBER = re.compile(r"\d+$", re.ASCII)

# The answer to a request with a foreign Host header.
WRONG_HOST = "without TLS and tokens this server answers to localhost or an IP address in the Host header only\n"


class AddressError(Exception):
    """A process cannot listen on an address, or may not send a token there; the message is one line for people."""


def socket_path(address: str) -> Path | None:
    """Path of a unix address; None for host:port."""
    if not address.startswith(_UNIX):
        return None
    return Path(address.removeprefix(_UNIX).removeprefix("//"))


def split_host_port(address: str) -> tuple[str, int]:
    """Returns host (without brackets) and port of "host:port". Raises ValueError."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not (port.isascii() and port.isdecimal()):
        raise ValueError("must be host:port or unix:/path")
    if int(port) > _MAX_PORT:
        raise ValueError(f"must have a port of at most {_MAX_PORT}, not {port}")
    if host.startswith("[") and host.endswith("]"):
        return host[1:-1], int(port)
    if ":" in host:
        raise ValueError("must have its IPv6 host in brackets")
    return host, int(port)


def validate(address: str) -> str:
    """Returns the address. Raises ValueError if it is neither host:port nor an absolute unix:/path."""
    path = socket_path(address)
    if path is None:
        split_host_port(address)
    elif not path.is_absolute():
        raise ValueError("must have an absolute path after unix:")
    return address


def number_of(name: str) -> int:
    """The number at the end of a name; 0 without one."""
    found = _NUMBER.search(name)
    return int(found[0]) if found else 0


def moved(address: str, by: int) -> str:
    """Returns host:port with `by` added to the port; port 0 stays. Raises ValueError if there is no such port."""
    host, _, text = address.rpartition(":")
    _, port = split_host_port(address)
    if port and port + by > _MAX_PORT:
        raise ValueError(f"{text} and {by} are more than {_MAX_PORT}, the last port")
    return f"{host}:{port + by if port else 0}"


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach the address."""
    if socket_path(address) is not None:
        return True
    host, _ = split_host_port(address)
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_own_name(host: str) -> bool:
    """Whether a Host header is localhost or an IP address, and so names no site."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or bool(ipaddress.ip_address(name))
    except ValueError:
        return False


def prepare(address: str, *, insecure: bool, setting: str = "") -> None:
    """Checks that a server may listen here; makes a unix socket's folder, and removes the socket of a killed process.

    insecure: whether other machines may reach the address.
    Raises AddressError, which names the address and, if given, the setting that it came from.
    """
    hint = f" (set by {setting})" if setting else ""
    if not insecure and not is_loopback(address):
        raise AddressError(
            f"{address}{hint} can be reached from other machines without TLS: "
            "use a loopback address or a unix socket, give KVKEEP_TLS_CERT_FILE, or allow it with KVKEEP_INSECURE=1"
        )
    path = socket_path(address)
    if path is None:
        return
    if len(bytes(path)) > _MAX_SOCKET_PATH:
        raise AddressError(f"{address}{hint} is longer than the {_MAX_SOCKET_PATH} bytes a unix socket's path may have")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise AddressError(f"{address}{hint}: its folder cannot be made: {error.strerror}") from error
    if not path.exists():
        return
    if not stat.S_ISSOCK(path.stat().st_mode):
        raise AddressError(f"{address}{hint} is a file that is no socket")
    if _answers(path):
        raise cannot_listen(address, setting)
    path.unlink()


def check_distinct(listening: Mapping[str, str]) -> None:
    """Raises AddressError if two settings (the keys) choose the same address to listen on. Empty addresses are off."""
    seen: list[tuple[str, str]] = []
    for setting, address in listening.items():
        for other_setting, other in seen:
            if address and _overlap(address, other):
                raise AddressError(
                    f"{address} (set by {setting}) and {other} (set by {other_setting}) are one address: "
                    "choose another port for one of them"
                )
        seen.append((setting, address))


def _overlap(one: str, other: str) -> bool:
    if not other or socket_path(one) is not None or socket_path(other) is not None:
        return one == other
    (host, port), (other_host, other_port) = split_host_port(one), split_host_port(other)
    if port != other_port or port == 0:
        return False
    hosts = {"127.0.0.1" if name == "localhost" else name for name in (host, other_host)}
    # A server on all addresses of IPv6 also listens on those of IPv4.
    return len(hosts) == 1 or "::" in hosts or ("0.0.0.0" in hosts and not any(":" in name for name in hosts))  # noqa: S104


def cannot_listen(address: str, setting: str = "", error: OSError | None = None) -> AddressError:
    """Makes the error for an address that the system refuses. error: the system's; without it, the system is asked."""
    error = error or _refusal(address)
    cause = "already in use" if error is None or error.errno == errno.EADDRINUSE else error.strerror
    hint = f" ({setting} chooses another)" if setting else ""
    return AddressError(f"cannot listen on {address}: {cause}{hint}")


def _refusal(address: str) -> OSError | None:
    """Returns the system's error for a socket at this address; None if the system has none, or no longer."""
    path = socket_path(address)
    host, port = ("", 0) if path is not None else split_host_port(address)
    family = socket.AF_UNIX if path is not None else socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        try:
            probe.bind((host, port) if path is None else str(path))
        except OSError as error:
            return error
    if path is not None:
        path.unlink()
    return None


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return False
        return True
