"""What decides the bytes in a cache: equal fingerprints may share blocks."""

import hashlib
import json
from pathlib import Path

from executor.models.files import ModelFiles
from executor.models.forward import Model

# Raise when the meaning of the pools' bytes changes.
LAYOUT_VERSION = 1
_PIECE = 1 << 20


def fingerprint(model: Model, files: ModelFiles, block_size: int) -> bytes:
    """SHA-256, 32 bytes, over configuration, identity of the weights, dtype, block size and layout."""
    digest = hashlib.sha256()
    config = {key: value for key, value in model.config.to_dict().items() if key != "_name_or_path"}
    parts = [json.dumps(config, sort_keys=True, default=str), str(model.dtype), block_size, LAYOUT_VERSION]
    digest.update(json.dumps(parts).encode())
    folder = Path(files.source)
    if not folder.is_dir():
        digest.update(f"{files.source} {getattr(model.config, '_commit_hash', None)}".encode())
        return digest.digest()
    for path in sorted(folder.glob("*.safetensors")) + sorted(folder.glob("*.bin")):
        digest.update(f"{path.name} {path.stat().st_size}".encode())
        digest.update(_samples(path))
    return digest.digest()


def _samples(path: Path) -> bytes:
    """Digest of a file's first, middle and last piece: reading all of a large model takes minutes."""
    digest = hashlib.sha256()
    size = path.stat().st_size
    with path.open("rb") as file:
        for start in (0, size // 2, max(0, size - _PIECE)):
            file.seek(start)
            digest.update(file.read(_PIECE))
    return digest.digest()
