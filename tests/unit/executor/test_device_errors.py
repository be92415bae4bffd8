"""What an error of a computation says about its device."""

import pytest
import torch

from executor.errors import ModelError
from executor.models.device_errors import check_device, is_out_of_memory

LACKING = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."),
    MemoryError(),
    RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"),
    RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
]
OTHERS = [
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("mat1 and mat2 shapes cannot be multiplied (1x2 and 1x2)"),
    ValueError("out of memory"),
]


@pytest.mark.parametrize(
    ("error", "lacking"), [*((one, True) for one in LACKING), *((one, False) for one in OTHERS)], ids=str
)
def test_errors_for_lack_of_memory_are_known_in_all_their_forms(error: Exception, lacking: bool) -> None:
    assert is_out_of_memory(error) == lacking


def test_a_device_that_has_failed_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def synchronize(device: torch.device) -> None:
        raise RuntimeError(f"CUDA error: an illegal memory access was encountered on {device}\nMore.")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    check_device(torch.device("cpu"))
    said = (
        "^cuda:0 has failed and runs nothing more in this process: RuntimeError: CUDA error: an illegal memory access"
    )
    with pytest.raises(ModelError, match=said):
        check_device(torch.device("cuda:0"))
