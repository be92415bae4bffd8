"""Argument checks that the launch modules share; every message starts with the argument's name."""

from collections.abc import Sequence

from torch import Tensor, dtype, float32


def check_shape(name: str, tensor: Tensor, expected: Sequence[int | None], layout: str) -> None:
    """Raise ValueError unless `tensor` has the expected sizes (None: any). `layout`: the shape in words."""
    fits = tensor.dim() == len(expected)
    # A plain loop: this runs for every layer of every step, and a generator takes twice as long.
    for size, want in zip(tensor.shape, expected, strict=False):
        fits = fits and (want is None or size == want)
    if not fits:
        wanted = ", ".join("any" if want is None else str(want) for want in expected)
        raise ValueError(f"{name}: expected {layout} = [{wanted}], got {list(tensor.shape)}")


def check_like(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    """Raise ValueError unless both tensors have one dtype and one device."""
    if tensor.dtype != other.dtype:
        raise ValueError(f"{name}: expected the dtype of {other_name}, {other.dtype}, got {tensor.dtype}")
    check_device(name, tensor, other_name, other)


def check_device(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    """Raise ValueError unless both tensors are on one device."""
    if tensor.device != other.device:
        raise ValueError(f"{name}: expected the device of {other_name}, {other.device}, got {tensor.device}")


def check_dtype(name: str, tensor: Tensor, *expected: dtype) -> None:
    """Raise ValueError unless `tensor` has one of the expected dtypes."""
    if tensor.dtype not in expected:
        wanted = " or ".join(str(one) for one in expected)
        raise ValueError(f"{name}: expected {wanted}, got {tensor.dtype}")


def check_contiguous(name: str, tensor: Tensor) -> None:
    """Raise ValueError unless `tensor` is contiguous."""
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: expected a contiguous tensor, got strides {tensor.stride()}")


def check_caches(k_cache: Tensor, v_cache: Tensor, layout: str) -> None:
    """Raise ValueError unless the caches are contiguous and alike, with a power of two from 2 on as block size."""
    check_shape("k_cache", k_cache, [None] * layout.count(",") + [None], layout)
    check_shape("v_cache", v_cache, k_cache.shape, layout)
    check_like("v_cache", v_cache, "k_cache", k_cache)
    check_contiguous("k_cache", k_cache)
    check_contiguous("v_cache", v_cache)
    block_size = k_cache.shape[-3]
    if block_size < 2 or block_size & (block_size - 1):
        raise ValueError(f"k_cache: expected a block size that is a power of two and at least 2, got {block_size}")


def check_query(query: Tensor, kv_heads: int, head_dim: int) -> None:
    """Raise ValueError unless `query` is [T, Hq, D] with the same number of heads for each KV head."""
    check_shape("query", query, [None, None, head_dim], "[T, Hq, D]")
    if query.shape[1] % kv_heads:
        raise ValueError(f"query: expected a multiple of {kv_heads} heads, got {query.shape[1]}")


def check_lse(lse: Tensor, query: Tensor) -> None:
    """Raise ValueError unless `lse` is [T, Hq] float32, contiguous and on the device of query [T, Hq, D]."""
    check_shape("lse", lse, query.shape[:2], "[T, Hq]")
    check_dtype("lse", lse, float32)
    check_device("lse", lse, "query", query)
    check_contiguous("lse", lse)
