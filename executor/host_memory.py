"""What the C library keeps of memory that nobody uses any more. Only glibc can be told; others keep little."""

import ctypes
import gc


def release_unused() -> None:
    """Gives back what transformers' modules held, once nothing refers to them any more."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
