"""How much memory the host has left. Imports no torch."""

from pathlib import Path

MEMINFO = Path("/proc/meminfo")


def available_memory(meminfo: Path = MEMINFO) -> int:
    """Returns the bytes of host memory that are available; 2^62 if the kernel does not report them."""
    for line in meminfo.read_text().splitlines() if meminfo.exists() else ():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    return 1 << 62
