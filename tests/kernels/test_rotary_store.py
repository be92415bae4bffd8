"""rotary_store against its reference and transformers' own rotation, on every backend of this machine."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from kernels.quantization import LARGEST
from kernels.rotary_store import reference
from kernels.rotary_store.launch import HeadNorms, rotary_store, rotate_with_triton

PADDED_ROWS = 2


@dataclass(frozen=True)
class Case:
    queries: tuple[int, ...] = (1, 6, 0, 3)
    computed: tuple[int, ...] = (9, 0, 5, 17)
    query_heads: int = 6
    kv_heads: int = 2
    head_dim: int = 16
    block_size: int = 4
    dtype: torch.dtype = torch.float32
    cache: torch.dtype | None = None
    tables_of: torch.dtype = torch.float32
    # Of the query, the key or both: whether heads are normed.
    normed: tuple[str, ...] = ()


EPS = 1e-5


def build(case: Case) -> tuple[dict[str, Tensor], list[int]]:
    """The op's tensors and its positions. Query, key and value are views of one product. Slots follow no order."""
    generator = torch.Generator().manual_seed(0)
    heads = case.query_heads + 2 * case.kv_heads
    rows = sum(case.queries) + PADDED_ROWS
    product = torch.randn(rows, heads * case.head_dim, generator=generator).to(case.dtype)
    parts = product.unflatten(1, (heads, case.head_dim)).split([case.query_heads, case.kv_heads, case.kv_heads], 1)
    ends = [first + count for first, count in zip(case.computed, case.queries, strict=True)]
    positions = [at for end, count in zip(ends, case.queries, strict=True) for at in range(end - count, end)]
    positions += [0] * PADDED_ROWS
    blocks = -(-rows // case.block_size) + 3
    slots = torch.randperm(blocks * case.block_size, generator=generator)[:rows]
    slots[rows - PADDED_ROWS :] = -1
    frequencies = 1.0 / (100.0 ** (torch.arange(0, case.head_dim, 2, dtype=torch.float32) / case.head_dim))
    angles = torch.arange(max(ends) + 1)[:, None].float() * frequencies
    angles = torch.cat([angles, angles], 1)
    shape = (2, blocks, case.block_size, case.kv_heads, case.head_dim)
    caches = torch.full(shape, 77, dtype=torch.int8).to(case.cache or case.dtype)
    tensors = dict(zip(("query", "key", "value"), parts, strict=True))
    tensors |= {"cos": angles.cos().to(case.tables_of), "sin": angles.sin().to(case.tables_of)}
    tensors |= {"k_cache": caches[0], "v_cache": caches[1]}
    if case.cache:
        scales = torch.rand(2, case.kv_heads, case.head_dim, generator=generator) / 20 + 0.005
        tensors |= {"k_scale": scales[0], "v_scale": scales[1]}
    for name in case.normed:
        tensors[f"{name}_norm"] = (1 + torch.randn(case.head_dim, generator=generator) / 4).to(case.dtype)
    tensors["slot_mapping"] = slots
    return tensors, positions


def run(backend: str, case: Case) -> dict[str, Tensor]:
    device = "cuda" if backend == "cuda" else "cpu"
    built, positions = build(case)
    tensors = {name: tensor.to(device) for name, tensor in built.items()}
    if device == "cpu":
        # Copies would not be views of one product.
        tensors = built
    scales = {name: tensors.pop(name, None) for name in ("k_scale", "v_scale")}
    norms = HeadNorms(tensors.pop("query_norm", None), tensors.pop("key_norm", None), EPS)
    op = rotate_with_triton if backend == "interpreter" else rotary_store
    op(**tensors, positions=torch.tensor(positions, device=device), **scales, norms=norms)
    return {name: tensor.cpu() for name, tensor in tensors.items()}


CASES = {
    "mixed": Case(),
    "9 query heads over 3, head size 64": Case(query_heads=9, kv_heads=3, head_dim=64),
    "no groups, head size 80": Case(query_heads=3, kv_heads=3, head_dim=80),
    "one KV head, group of 8": Case(query_heads=8, kv_heads=1, head_dim=128, block_size=16),
    "head size 256, blocks of 32": Case(query_heads=2, kv_heads=1, head_dim=256, block_size=32),
    "padding rows only": Case(queries=(0, 0), computed=(3, 4)),
    "bfloat16": Case(dtype=torch.bfloat16),
    "float16": Case(dtype=torch.float16),
    "bfloat16 tables": Case(dtype=torch.bfloat16, tables_of=torch.bfloat16),
    "norms of queries and keys": Case(normed=("query", "key")),
    "norm of queries, head size 80": Case(query_heads=3, kv_heads=3, head_dim=80, normed=("query",)),
    "norm of keys, bfloat16": Case(dtype=torch.bfloat16, normed=("key",)),
    "norms, bfloat16, 9 query heads over 3": Case(
        query_heads=9, kv_heads=3, head_dim=64, dtype=torch.bfloat16, normed=("query", "key")
    ),
    **{f"{cache} cache": Case(dtype=torch.bfloat16, cache=cache) for cache in LARGEST},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_it_does_what_its_reference_does(run_on: Callable[..., dict[str, Tensor]], case: Case) -> None:
    expected, positions = build(case)
    scales = {name: expected.pop(name, None) for name in ("k_scale", "v_scale")}
    weights = {f"{name[0]}_norm": expected.pop(f"{name}_norm", None) for name in ("query", "key")}
    reference.rotary_store(**expected, positions=positions, **scales, **weights, eps=EPS)
    for name, tensor in run_on(run, case).items():
        if case.normed:
            # Sums of squares are added in another order: by chance, a value is rounded to its neighbour.
            rounding = 2 * torch.finfo(case.dtype).eps
            torch.testing.assert_close(tensor.float(), expected[name].float(), rtol=rounding, atol=2 * rounding)
        else:
            assert torch.equal(tensor.float(), expected[name].float()), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_queries_and_keys_are_rotated_as_llama_rotates_them(
    run_on: Callable[..., dict[str, Tensor]], dtype: torch.dtype
) -> None:
    # Not for the processes of the kernels, which need long enough to start.
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    case = replace(CASES["9 query heads over 3, head size 64"], dtype=dtype)
    built, positions = build(case)
    rope = {"rope_type": "default", "rope_theta": 100.0}
    config = LlamaConfig(hidden_size=9 * 64, num_attention_heads=9, rope_parameters=rope)
    cos, sin = LlamaRotaryEmbedding(config)(built["query"], torch.tensor(positions)[None])
    query, key = (built[name].transpose(0, 1)[None] for name in ("query", "key"))
    query, key = (one[0].transpose(0, 1) for one in apply_rotary_pos_emb(query, key, cos, sin))
    got = run_on(run, case)
    rows = sum(case.queries)
    assert torch.equal(got["query"][:rows], query[:rows])
    stored = got["k_cache"].flatten(0, 1)[built["slot_mapping"][:rows]]
    assert torch.equal(stored, key[:rows])
