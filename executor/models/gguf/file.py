"""A GGUF file: its metadata, and its tensors in their stored form, which stay in the file until they are read.

The `gguf` package's own reader creates several arrays for every string of a vocabulary, which takes seconds, and it
says little about a damaged file.
"""

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGUF_MAGIC, GGMLQuantizationType, GGUFValueType
from numpy.typing import NDArray

from executor.errors import ModelError, first_line
from kernels.stored import CODES, FLOATS, StoredMatrix, StoredRows

_MAGIC = struct.pack("<I", GGUF_MAGIC)
_VERSIONS = (2, 3)
# A type that is served only because files with mostly other types contain it: llama.cpp's quantizer stores the output
# matrix of a Q4_0 or Q4_1 file in it.
_DEQUANTISED = ("Q6_K",)
SERVED = (*CODES, *FLOATS, *_DEQUANTISED)
_NUMBERS = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT64: "<f8",
}
_MOST_DIMENSIONS = 4


@dataclass(frozen=True)
class _Tensor:
    """shape: as torch has it, columns last. begin, size: bytes within the file."""

    kind: str
    shape: tuple[int, ...]
    begin: int
    size: int


class _CutError(Exception):
    """The file ends too early."""


class GgufFile:
    """metadata: by llama.cpp's names. kinds: the type of each tensor, by the tensor's name in the file."""

    def __init__(self, path: Path) -> None:
        """Raises ModelError if the file is damaged, not GGUF, a part of a model, or has types that are not served."""
        self.path = path
        try:
            # Copy-on-write, because torch takes no read-only arrays.
            self._bytes: NDArray[np.uint8] = np.memmap(path, np.uint8, mode="c")
        except (OSError, ValueError) as error:
            raise ModelError(f"cannot read the model {path}: {first_line(error)}") from error
        try:
            self.metadata, self._tensors = _Header(self._bytes).read()
        except _CutError as error:
            raise ModelError(
                f"the GGUF file {path} is cut off after {len(self._bytes)} bytes, {error}: download it again"
            ) from error
        except ValueError as error:
            raise ModelError(f"cannot read the model {path}: {error}") from error
        self._check()

    @property
    def kinds(self) -> Mapping[str, str]:
        return {name: tensor.kind for name, tensor in self._tensors.items()}

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a tensor, columns last."""
        return self._tensors[name].shape

    def matrix(self, name: str, order: torch.Tensor | None = None) -> StoredMatrix:
        """Returns a matrix as it is stored. order: [n] int64, which of the stored rows is row i."""
        tensor = self._tensors[name]
        rows, columns = tensor.shape
        data = torch.from_numpy(self._bytes[tensor.begin : tensor.begin + tensor.size]).view(rows, -1)
        return StoredMatrix(StoredRows(data, tensor.kind, columns, order))

    def vector(self, name: str) -> torch.Tensor:
        """Returns a tensor of one dimension: [n] float32."""
        tensor = self._tensors[name]
        data = torch.from_numpy(self._bytes[tensor.begin : tensor.begin + tensor.size]).view(1, -1)
        return StoredMatrix(StoredRows(data, tensor.kind, tensor.shape[-1])).floats(torch.float32)[0]

    def _check(self) -> None:
        parts = self.metadata.get("split.count", 1)
        if isinstance(parts, int) and parts > 1:
            raise ModelError(
                f"the GGUF file {self.path} is part {self.metadata.get('split.no', 0) + 1} of {parts}, and the "
                "executor serves whole files: merge them with llama.cpp's `llama-gguf-split --merge`"
            )
        if not self._tensors:
            raise ModelError(f"the GGUF file {self.path} has no weights, only metadata: serve one with tensors")
        for name, tensor in self._tensors.items():
            if tensor.kind not in SERVED:
                raise ModelError(
                    f"the GGUF file {self.path} stores {name} in {tensor.kind}, which the executor does not serve: "
                    f"take a file in {', '.join(SERVED[:-1])} (and {SERVED[-1]} for some matrices)"
                )
            if tensor.begin + tensor.size > len(self._bytes):
                raise ModelError(
                    f"the GGUF file {self.path} is cut off after {len(self._bytes)} bytes, in or before {name}, which "
                    f"ends at byte {tensor.begin + tensor.size}: download it again"
                )


class _Header:
    """Reads what precedes the tensors. Raises ValueError, or _CutError if the file ends too early."""

    def __init__(self, data: NDArray[np.uint8]) -> None:
        self._data = data.data
        self._at = 0

    def read(self) -> tuple[dict[str, Any], dict[str, _Tensor]]:
        magic = bytes(self._data[:4])
        if magic != _MAGIC:
            raise ValueError(
                f"it is no GGUF file: it begins with {magic!r}, not {_MAGIC!r}; of other formats, name the folder"
            )
        self._at = 4
        version = self._number("<I", "in its version")
        if version not in _VERSIONS:
            swapped = " with swapped bytes (big-endian)" if version.to_bytes(4, "little")[:3] == b"\0\0\0" else ""
            raise ValueError(f"it is GGUF of version {version}{swapped}; the executor reads versions 2 and 3")
        count, fields = self._number("<Q", "in its header"), self._number("<Q", "in its header")
        metadata: dict[str, Any] = {}
        for number in range(fields):
            name = self._string(f"before field {number + 1} of {fields} of its metadata")
            where = f"in the field {name} of its metadata"
            metadata[name] = self._value(self._number("<I", where), where)
        tensors = [self._tensor(number, count) for number in range(count)]
        alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 8 or alignment % 8:
            raise ValueError(f"general.alignment is {alignment}, which must be a multiple of 8: the file is damaged")
        data = -(-self._at // alignment) * alignment
        found: dict[str, _Tensor] = {}
        for name, kind, shape, offset in tensors:
            if name in found:
                raise ValueError(f"it has the tensor {name} twice: the file is damaged")
            if offset % alignment:
                raise ValueError(f"the tensor {name} is not aligned: the file is damaged")
            found[name] = _Tensor(kind, shape, data + offset, _size(name, kind, shape))
        return metadata, found

    def _tensor(self, number: int, count: int) -> tuple[str, str, tuple[int, ...], int]:
        where = f"in the list of its tensors ({number} of {count} read)"
        name = self._string(where)
        dimensions = self._number("<I", where)
        if not 1 <= dimensions <= _MOST_DIMENSIONS:
            raise ValueError(f"the tensor {name} has {dimensions} dimensions: the file is damaged")
        # The file has columns first.
        shape = tuple(reversed([self._number("<Q", where) for _ in range(dimensions)]))
        kind, offset = self._number("<I", where), self._number("<Q", where)
        try:
            return name, GGMLQuantizationType(kind).name, shape, offset
        except ValueError:
            raise ValueError(f"the tensor {name} is of the type {kind}, which nothing here knows") from None

    def _value(self, kind: int, where: str) -> Any:
        if kind in _NUMBERS:
            return self._numbers(GGUFValueType(kind), 1, where)[0]
        if kind == GGUFValueType.STRING:
            return self._string(where)
        if kind != GGUFValueType.ARRAY:
            raise ValueError(f"a value of the unknown type {kind} {where}: the file is damaged")
        element, count = self._number("<I", where), self._number("<Q", where)
        if element in _NUMBERS:
            return self._numbers(GGUFValueType(element), count, where)
        if element != GGUFValueType.STRING:
            raise ValueError(f"a list of the type {element} {where}, which nothing here knows")
        return [self._string(where) for _ in range(count)]

    def _numbers(self, kind: GGUFValueType, count: int, where: str) -> list[Any]:
        numbers = np.dtype(_NUMBERS[kind])
        return list(np.frombuffer(self._take(count * numbers.itemsize, where), numbers).tolist())

    def _string(self, where: str) -> str:
        length = self._number("<Q", where)
        try:
            return str(self._take(length, where), "utf-8")
        except UnicodeDecodeError:
            raise ValueError(f"a text that is no UTF-8 {where}: the file is damaged") from None

    def _number(self, form: str, where: str) -> int:
        [number] = struct.unpack(form, self._take(struct.calcsize(form), where))
        return int(number)

    def _take(self, size: int, where: str) -> memoryview:
        if self._at + size > len(self._data):
            raise _CutError(where)
        self._at += size
        return memoryview(self._data[self._at - size : self._at])


def _size(name: str, kind: str, shape: tuple[int, ...]) -> int:
    """Returns the bytes of a tensor. Raises ValueError if rows do not consist of whole blocks."""
    together, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    if shape[-1] % together or not math.prod(shape):
        raise ValueError(f"the tensor {name} in {kind} has the shape {list(shape)}: the file is damaged")
    return math.prod(shape) // int(together) * int(size)
