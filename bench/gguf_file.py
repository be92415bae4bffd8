"""Writes the default model, or the model of a GGUF file, as a GGUF file of a different type.

`python -m bench.gguf_file --type Q4_0 --out q4_0.gguf`, then `python -m bench serving --model q4_0.gguf`. Norms stay in
F32. In files of four bits the output matrix is in Q8_0, as llama.cpp's quantizer leaves it for widths that are no
multiples of 256.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter, LlamaFileType, quants
from numpy.typing import NDArray

from executor.errors import ModelError
from executor.models.files import made_whole, packaged_gguf

TYPES = ("Q4_0", "Q4_1", "Q8_0", "F16", "BF16", "F32")
# A tensor to be quantised, and its type.
Values = tuple[NDArray[Any], str]


def write(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Values]) -> None:
    """metadata: by llama.cpp's names. tensors: bytes that are stored as they are, or floats to be quantised."""
    writer = GGUFWriter(path, metadata["general.architecture"])
    kinds = {bool: GGUFValueType.BOOL, int: GGUFValueType.UINT32, float: GGUFValueType.FLOAT32}
    for name, value in metadata.items():
        if name == "general.architecture":
            continue
        if isinstance(value, list):
            writer.add_array(name, value)
        else:
            writer.add_key_value(name, value, kinds.get(type(value), GGUFValueType.STRING))
    for name, (values, kind) in tensors.items():
        stored = GGMLQuantizationType[kind]
        raw = values if values.dtype == np.uint8 else quants.quantize(values.astype(np.float32), stored)
        writer.add_tensor(name, raw, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def requantised(source: Path, target: Path, kind: str) -> None:
    """Writes the model of a file in a different type, from the values of the file's own codes. Raises ModelError."""
    # Imported here and below: a benchmark that only measures needs no torch.
    import torch

    from executor.models.gguf.file import GgufFile

    file = GgufFile(source)
    output = "output.weight" if "output.weight" in file.kinds else "token_embd.weight"
    tensors: dict[str, Values] = {}
    for name in file.kinds:
        if len(file.shape(name)) == 1:
            tensors[name] = file.vector(name).numpy(), "F32"
        else:
            own = "Q8_0" if name == output and kind.startswith("Q4") else kind
            tensors[name] = file.matrix(name).floats(torch.float32).numpy(), own
    of_type = LlamaFileType["ALL_F32" if kind == "F32" else f"MOSTLY_{kind}"]
    write(target, {**file.metadata, "general.file_type": int(of_type)}, tensors)


def in_floats(source: Path, cache: Path) -> Path:
    """The folder of a GGUF file's model as transformers reads it, in float32; made once. Raises ModelError."""
    import torch

    from executor.models.gguf.file import GgufFile
    from executor.models.gguf.module import load_gguf, to_floats
    from executor.models.gguf.tokenizer import build_tokenizer

    stat = source.stat()
    digest = hashlib.sha256(f"{source} {stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()[:12]
    target = cache / "models" / f"{source.stem}-{digest}-floats"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with made_whole(target) as folder:
        module = load_gguf(source, torch.float32)
        to_floats(module, torch.device("cpu"))
        module.save_pretrained(folder)
        if (tokenizer := build_tokenizer(GgufFile(source))) is not None:
            tokenizer.save(str(folder / "tokenizer.json"))
    return target


def run() -> int:
    """Writes the file; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--type", choices=TYPES, required=True)
    parser.add_argument("--source", type=Path, help="a GGUF file; without it the default model's")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    try:
        requantised(given.source or packaged_gguf(), given.out, given.type)
    except ModelError as error:
        parser.error(str(error))
    print(f"{given.out}: {given.out.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(run())
