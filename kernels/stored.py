"""Matrices as a GGUF file stores them: numbers, or ggml's blocks of codes, which become floats on demand."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeAlias

import torch
from gguf import GGMLQuantizationType, quants
from torch import Tensor

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Types whose blocks the compiled decoder keeps as codes.
CODES = ("Q4_0", "Q4_1", "Q8_0")
# Numbers dequantised at a time, so that the intermediate results stay in a processor's cache.
_CHUNK = 1 << 19


@dataclass(frozen=True)
class StoredRows:
    """One tensor of a file: `data` is [n, bytes of a row] uint8 in ggml's type `kind`; a row has `columns` numbers.

    order: [n] int64, row i is stored as row order[i]; None if rows are stored in order.
    """

    data: Tensor
    kind: str
    columns: int
    order: Tensor | None = None

    def at(self, begin: int, end: int) -> Tensor:
        """Stored bytes of some rows: [end - begin, bytes of a row]."""
        return self.data[begin:end] if self.order is None else self.data[self.order[begin:end]]

    def of(self, rows: Tensor) -> Tensor:
        """Stored bytes of the rows with these numbers, [R] int64."""
        return self.data[rows if self.order is None else self.order[rows]]


class StoredMatrix:
    """A matrix [n, k]: the rows of one or more tensors, one below the other."""

    def __init__(self, *parts: StoredRows) -> None:
        """Raises ValueError if the parts differ in their number of columns."""
        if len({part.columns for part in parts}) != 1:
            raise ValueError(f"parts: expected equal numbers of columns, got {[part.columns for part in parts]}")
        self.parts = parts
        self.shape = sum(len(part.data) for part in parts), parts[0].columns

    @property
    def codes(self) -> str | None:
        """The type of all blocks, if they have one type and the compiled decoder keeps its codes; else None."""
        kinds = {part.kind for part in self.parts}
        return kinds.pop() if len(kinds) == 1 and kinds <= set(CODES) else None

    def blocks(self) -> Tensor:
        """All rows as stored: [n, bytes of a row] uint8. Only for a matrix with `codes`."""
        return torch.cat([part.at(0, len(part.data)) for part in self.parts])

    def floats(self, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
        """All rows: [n, k]."""
        out = torch.empty(self.shape, dtype=dtype, device=device)
        rows = max(1, _CHUNK // self.shape[1])
        first, jobs = 0, []
        for part in self.parts:
            count = len(part.data)
            jobs += [(part, first, begin, min(begin + rows, count)) for begin in range(0, count, rows)]
            first += count

        # Inference mode is set per thread, and determines what may be written.
        inference = torch.is_inference_mode_enabled()

        def fill(job: tuple[StoredRows, int, int, int]) -> None:
            part, first, begin, end = job
            with torch.inference_mode(inference):
                out[first + begin : first + end] = _numbers(part.at(begin, end), part.kind)

        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            list(pool.map(fill, jobs))
        return out

    def rows(self, numbers: Tensor, dtype: torch.dtype) -> Tensor:
        """The rows with these numbers, [R] int64, of a matrix of one part: [R, k]."""
        [part] = self.parts
        return _numbers(part.of(numbers), part.kind).to(dtype)


Matrix: TypeAlias = Tensor | StoredMatrix


def joined(matrices: Sequence[StoredMatrix]) -> StoredMatrix:
    """Several matrices, one below the other; nothing is copied."""
    return StoredMatrix(*(part for matrix in matrices for part in matrix.parts))


def _numbers(data: Tensor, kind: str) -> Tensor:
    """[n, k] of stored rows: float32, or the type that they are stored in."""
    if kind in FLOATS:
        return data.contiguous().view(FLOATS[kind])
    return torch.from_numpy(quants.dequantize(data.numpy(), GGMLQuantizationType[kind]))
