"""What determines the bytes in a cache: executors with equal fingerprints may share blocks."""

import hashlib
import json
from pathlib import Path

from executor.cache.pool import KvPools
from executor.models.files import ModelFiles
from executor.models.forward import Model

# To be raised whenever the meaning of the pools' bytes changes.
LAYOUT_VERSION = 1
_PIECE = 1 << 20


def fingerprint(model: Model, files: ModelFiles, pools: KvPools) -> bytes:
    """SHA-256, 32 bytes, over configuration, identity of the weights, dtypes, scales, block size and layout."""
    scales = [[pool.scales.k.tolist(), pool.scales.v.tolist()] for pool in pools.pools if pool.scales]
    return model_digest(model, files, str(pools.dtype), scales, pools.block_size, LAYOUT_VERSION)


def model_digest(model: Model, files: ModelFiles, *more: object) -> bytes:
    """SHA-256, 32 bytes, over configuration, identity and dtype of the weights, and more that JSON can hold."""
    digest = hashlib.sha256()
    config = {key: value for key, value in model.config.to_dict().items() if key != "_name_or_path"}
    parts = [json.dumps(config, sort_keys=True, default=str), str(model.dtype), *more]
    digest.update(json.dumps(parts).encode())
    folder = Path(files.source)
    if not folder.exists():
        digest.update(f"{files.source} {getattr(model.config, '_commit_hash', None)}".encode())
        return digest.digest()
    digest.update(weights_digest(folder))
    return digest.digest()


def weights_digest(source: Path) -> bytes:
    """Returns a SHA-256, 32 bytes, of samples of the weights in a folder or a file."""
    digest = hashlib.sha256()
    whole = [source] if source.is_file() else sorted(source.glob("*.safetensors")) + sorted(source.glob("*.bin"))
    for path in whole:
        digest.update(f"{path.name} {path.stat().st_size}".encode())
        digest.update(_samples(path))
    return digest.digest()


def _samples(path: Path) -> bytes:
    """Returns a digest of a file's first, middle and last piece: reading all of a large model takes minutes."""
    digest = hashlib.sha256()
    size = path.stat().st_size
    with path.open("rb") as file:
        for start in (0, size // 2, max(0, size - _PIECE)):
            file.seek(start)
            digest.update(file.read(_PIECE))
    return digest.digest()
