"""Paths of unix sockets: the same at every start, and short enough."""

import hashlib
import os
import tempfile
from pathlib import Path

from protos.rpc.addresses import AddressError

# sun_path holds 108 bytes; the rest is for servers that append to a name for a moment.
_MAX_BYTES = 100


def socket_in(folder: Path, name: str) -> Path:
    """The path of a socket in a folder, or a shorter path in its place if it is too long. Raises AddressError."""
    path = folder / name
    if len(bytes(path)) <= _MAX_BYTES:
        return path
    runtime = Path("/run/user", str(os.getuid()))
    if not os.access(runtime, os.W_OK):
        runtime = Path(tempfile.gettempdir())
    private = runtime / f"kvkeep-{os.getuid()}"
    private.mkdir(mode=0o700, exist_ok=True)
    if private.is_symlink() or private.stat().st_uid != os.getuid():
        raise AddressError(f"{private} belongs to another user")
    return private / hashlib.sha256(bytes(path)).hexdigest()[:16]
