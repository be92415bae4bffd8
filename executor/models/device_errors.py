"""What an error of a computation says about its device: that memory was lacking, or that the device has failed."""

import torch

from executor.errors import ModelError, first_line

# Only PyTorch's allocator of GPU memory has an error type. These are texts of its allocator for CPUs, of CUDA and
# Triton, and of cuBLAS.
_NO_MEMORY = ("DefaultCPUAllocator", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether memory was lacking, so that less work may succeed."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _NO_MEMORY)


def check_device(device: torch.device) -> None:
    """Raises ModelError if a GPU can run nothing more: some errors of a kernel fail all later calls of the process."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        raise ModelError(f"{device} has failed and runs nothing more in this process: {first_line(error)}") from error
