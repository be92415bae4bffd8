"""The decoder's conversions of floats are those of torch, also for NaNs and infinities."""

import ctypes
import subprocess
from pathlib import Path

import pytest
import torch

from kernels.cpu_decoder import build
from tests.kernels.decoder_cases import LANES, flags_for

SOURCE = """
#include "vector.h"
extern "C" void rounded(uint16_t *to, const float *from, int64_t n) {
  for (int64_t i = 0; i < n; i += WIDTH) store((Bfloat16 *)to + i, load(from + i));
}
"""


@pytest.mark.parametrize("lanes", [None, *LANES])
def test_bfloat16_is_that_of_torch(tmp_path: Path, lanes: int | None) -> None:
    library = tmp_path / "vectors.so"
    flags = flags_for(lanes) if lanes else build.FLAGS
    try:
        command = [build.find_compiler(), *flags, f"-I{Path(build.__file__).parent}", "-x", "c++", "-"]
    except build.NoCompilerError as error:
        pytest.skip(str(error))
    subprocess.run([*command, "-o", library], input=SOURCE.encode(), check=True)
    # Each exponent and sign, with fractions at and around ties and at their ends.
    fractions = [
        upper << 16 | lower for upper in (0, 1, 0x3F, 0x40, 0x7F) for lower in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)
    ]
    bits = torch.tensor([sign << 23 | fraction for sign in range(1 << 9) for fraction in fractions])
    values = bits.to(torch.int32).view(torch.float32)
    # Processors with bfloat16 instructions round these values to 0.
    values = values[(values.abs() >= torch.finfo(torch.float32).tiny) | values.isnan()]
    values = values[: len(values) // 16 * 16].contiguous()
    got = torch.zeros(len(values), dtype=torch.bfloat16)
    ctypes.CDLL(str(library)).rounded(
        ctypes.c_void_p(got.data_ptr()), ctypes.c_void_p(values.data_ptr()), ctypes.c_int64(len(values))
    )
    torch.testing.assert_close(got, values.bfloat16(), rtol=0, atol=0, equal_nan=True)
