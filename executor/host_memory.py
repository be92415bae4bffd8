"""What the C library keeps of memory that nobody uses any more. Only glibc can be told; others keep little."""

import ctypes
import gc

# From malloc.h.
_M_ARENA_MAX = -8


def use_one_arena() -> None:
    """All threads allocate from one heap, as each of many keeps leftovers. To be called before there are threads."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)


def release_unused() -> None:
    """Gives back what transformers' modules held, once nothing refers to them any more."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
