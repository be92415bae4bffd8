"""8-bit caches: each channel of a KV head has one fixed scale for keys and one for values.

Keys have outliers: some channels of a head are many times as large as the others, in every token. What is stored is
x / scale, clamped to the range of the type and rounded to nearest, ties to even.
"""

import torch
from torch import Tensor

from kernels.checks import check_device, check_dtype, check_like, check_shape

LARGEST = {torch.int8: (-128.0, 127.0), torch.float8_e4m3fn: (-448.0, 448.0)}
# The least compute capability that converts float8_e4m3fn; Triton does not compile it for older devices.
FLOAT8_CAPABILITY = (8, 9)


def check_quantization(
    name: str, activations: Tensor, k_cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None
) -> None:
    """Raise ValueError unless activations and scales [Hkv, D] float32 fit caches [..., Hkv, D] in dtype and device.

    Also raises ValueError for float8_e4m3fn caches on a device that does not convert this type.
    """
    check_scales(k_cache, k_scale, v_scale)
    if k_cache.dtype not in LARGEST:
        check_like(name, activations, "k_cache", k_cache)
        return
    check_dtype(name, activations, torch.float32, torch.bfloat16, torch.float16)
    check_device(name, activations, "k_cache", k_cache)
    check_float8(k_cache)


def check_scales(k_cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None) -> None:
    """Raise ValueError unless 8-bit caches have scales [Hkv, D] float32 on their device, and other caches have none."""
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if k_cache.dtype not in LARGEST:
            if scale is not None:
                raise ValueError(f"{name}: only int8 and float8_e4m3fn caches have scales, not {k_cache.dtype}")
            continue
        if scale is None:
            raise ValueError(f"{name}: expected scales of a {k_cache.dtype} cache")
        check_shape(name, scale, k_cache.shape[-2:], "[Hkv, D]")
        check_dtype(name, scale, torch.float32)
        check_device(name, scale, "k_cache", k_cache)


def check_float8(k_cache: Tensor) -> None:
    """Raise ValueError if `k_cache` is float8_e4m3fn on a device that does not convert this type."""
    if k_cache.dtype == torch.float8_e4m3fn and (reason := float8_obstacle(k_cache.device)):
        raise ValueError(f"k_cache: {reason}")


def float8_obstacle(device: torch.device) -> str:
    """Returns why caches on a device cannot be float8_e4m3fn; empty if they can."""
    if device.type != "cuda" or (capability := torch.cuda.get_device_capability(device)) >= FLOAT8_CAPABILITY:
        return ""
    return (
        f"a device of compute capability {capability[0]}.{capability[1]} does not convert float8_e4m3fn, which 8.9 "
        "and later do; int8 works"
    )


def quantize(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x [..., Hkv, D] over scale [Hkv, D], clamped and rounded to `dtype`, int8 or float8_e4m3fn."""
    scaled = (x.float() / scale).clamp(*LARGEST[dtype])
    return (scaled.round() if dtype == torch.int8 else scaled).to(dtype)


def dequantize(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Undoes quantize as far as 8 bits allow: x [..., Hkv, D] times scale [Hkv, D], in `dtype`."""
    return x.to(dtype) * scale.to(dtype)
