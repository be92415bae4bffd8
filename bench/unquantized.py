"""A model whose weights nothing quantized. `python -m bench.unquantized` makes the model once and prints its folder.

The default model was published in 4 and 8 bits. kvkeep recovers these bits from the weights, and reads only the bits.
Most models are published in bfloat16 instead. This model has weights of that kind in the default model's shape: each
weight is changed by normal noise of 0.3 %, always the same, and rounded to bfloat16. In float32 the model has the same
values.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

from executor.models.files import made_whole, resolve
from tests.stack import model_cache

NOISE = 0.003
SEED = 29
_WEIGHTS, _CONFIG = "model.safetensors", "config.json"


def made(source: Path, folder: Path) -> Path:
    """The folder below `folder` with the changed copy of a local model, which is written if it is missing."""
    asked = hashlib.sha256(f"{source.name} {NOISE} {SEED}".encode()).hexdigest()[:12]
    target = folder / f"unquantized-{asked}"
    if target.is_dir():
        return target
    # Imported here: a process that only measures needs no torch.
    import torch
    from safetensors.torch import load_file, save_file

    folder.mkdir(parents=True, exist_ok=True)
    noise = torch.Generator().manual_seed(SEED)
    weights = {
        name: (weight * (1 + NOISE * torch.randn(weight.shape, generator=noise))).bfloat16()
        for name, weight in sorted(load_file(source / _WEIGHTS).items())
    }
    config = json.loads((source / _CONFIG).read_text()) | {"dtype": "bfloat16"}
    with made_whole(target) as copy:
        shutil.copytree(source, copy, ignore=shutil.ignore_patterns(_WEIGHTS))
        save_file(weights, copy / _WEIGHTS, {"format": "pt"})
        (copy / _CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    return target


def run() -> None:
    """Prints the folder of the default model's copy."""
    print(made(resolve(), model_cache() / "models"))


if __name__ == "__main__":
    run()
