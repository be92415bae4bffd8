"""A wrong argument is refused by name before anything is written, and nothing to do is no error."""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from kernels.attention_scores.launch import attention_scores
from kernels.compact_kv.launch import compact_kv
from kernels.copy_blocks.launch import copy_blocks
from kernels.paged_attention.launch import AttentionArgs, PagedBatch, paged_attention
from kernels.rms_norm.launch import rms_norm
from kernels.rotary_store.launch import HeadNorms, rotary_store
from kernels.rotate_keys.launch import rotate_keys
from kernels.store_kv.launch import store_kv
from tests.kernels.attention_cases import Case, build

CACHE = torch.zeros(4, 8, 2, 16)
CACHES = {"k_cache": CACHE, "v_cache": CACHE.clone()}
LAYERS = {"k_cache": CACHE[None], "v_cache": CACHE[None]}
INT8 = torch.zeros(4, 8, 2, 16, dtype=torch.int8)
ODD_BLOCKS = torch.zeros(4, 6, 2, 16)
SCATTERED = CACHE.transpose(0, 1).contiguous().transpose(0, 1)
KEY = torch.ones(3, 2, 16)
KV = {"key": KEY, "value": KEY}
SLOTS = torch.tensor([0, 1, 2])
OWN_SLOTS = torch.tensor([[[0, 1, 2], [3, 4, 5]]])
NARROW = torch.zeros(2, 2, dtype=torch.int32)
CASE = Case((2, 1), (6, 9))
PROBLEM = build(CASE)
BATCH = PROBLEM.batch(CASE, "cpu")
ATTEND = {"query": PROBLEM.query, "k_cache": PROBLEM.k_cache}


def attend(**given: Any) -> None:
    """paged_attention, whose batch and AttentionArgs differ in the fields that are given beside its arguments."""
    of_batch, of_args = (
        {one.name: given.pop(one.name) for one in fields(kind) if one.name in given}
        for kind in (PagedBatch, AttentionArgs)
    )
    args = replace(AttentionArgs(1.0), **of_args)
    paged_attention(batch=replace(BATCH, **of_batch), args=args, **given)


QUANTIZED = {"k_scale": torch.ones(2, 16), "v_scale": torch.ones(2, 16), "k_cache": INT8, "v_cache": INT8.clone()}
SIXTEENS = torch.ones(9, 16)
RIGHT: dict[Callable[..., object], dict[str, Any]] = {
    store_kv: {**KV, **CACHES, "slot_mapping": SLOTS},
    rms_norm: {"x": torch.ones(2, 16), "weight": torch.ones(16), "eps": 1e-6},
    copy_blocks: {**LAYERS, "sources": SLOTS, "targets": SLOTS + 3},
    compact_kv: {**LAYERS, "sources": OWN_SLOTS, "targets": OWN_SLOTS + 3},
    rotate_keys: {"k_cache": CACHE[None], "slots": OWN_SLOTS, "deltas": OWN_SLOTS, "frequencies": torch.ones(8)},
    attend: {**ATTEND, "v_cache": PROBLEM.v_cache},
    rotary_store: {
        **KV,
        **CACHES,
        "query": torch.ones(3, 4, 16),
        "cos": SIXTEENS,
        "sin": SIXTEENS,
        "positions": SLOTS,
        "slot_mapping": SLOTS,
    },
    attention_scores: {
        **ATTEND,
        "batch": BATCH,
        "lse": torch.zeros(6, 6),
        "args": AttentionArgs(1.0),
        "counts": torch.ones(2, dtype=torch.int32),
    },
}
# For each operation, the replacements of right arguments, and the resulting messages.
WRONG: dict[Callable[..., object], list[tuple[dict[str, Any], str]]] = {
    store_kv: [
        ({"key": torch.ones(3, 2, 8)}, r"key: expected \[T, Hkv, D\] = \[any, 2, 16\], got \[3, 2, 8\]"),
        ({"key": KEY.half()}, "key: expected the dtype of k_cache"),
        ({"value": torch.ones(4, 2, 16)}, "value: expected"),
        ({"value": KEY.to("meta")}, "value: expected the device of k_cache"),
        ({"slot_mapping": SLOTS[:2]}, r"slot_mapping: expected \[T\] = \[3\], got \[2\]"),
        ({"slot_mapping": SLOTS.int()}, "slot_mapping: expected torch.int64"),
        ({"v_cache": CACHE[:2]}, "v_cache: expected"),
        ({"v_cache": CACHE.double()}, "v_cache: expected the dtype of k_cache"),
        ({"v_cache": SCATTERED}, "v_cache: expected a contiguous tensor"),
        ({"k_cache": ODD_BLOCKS, "v_cache": ODD_BLOCKS}, "k_cache: expected a block size"),
        (QUANTIZED | {"k_scale": None}, "k_scale: expected scales of a torch.int8 cache"),
        (QUANTIZED | {"v_scale": torch.ones(2)}, r"v_scale: expected \[Hkv, D\] = \[2, 16\], got \[2\]"),
        (QUANTIZED | {"v_scale": torch.ones(2, 16).half()}, "v_scale: expected torch.float32"),
        (QUANTIZED | {"key": KEY.double()}, "key: expected torch.float32 or torch.bfloat16"),
        (QUANTIZED | {"k_cache": CACHE, "v_cache": CACHE}, "k_scale: only int8 and float8_e4m3fn caches have scales"),
    ],
    rms_norm: [
        ({"x": torch.tensor(1.0)}, r"x: expected \[..., N\]"),
        ({"x": torch.ones(16, 2).t()}, "x: expected rows at even distances"),
        ({"x": torch.ones(2, 3, 4, 16).transpose(0, 1)}, "x: expected rows at even distances"),
        ({"weight": torch.ones(8)}, r"weight: expected \[N\] = \[16\]"),
        ({"weight": torch.ones(16).half()}, "weight: expected the dtype of x"),
        ({"residual": torch.ones(3, 16)}, "residual: expected"),
        ({"out": torch.ones(2, 16).half()}, "out: expected the dtype of x"),
    ],
    copy_blocks: [
        ({"k_cache": CACHE}, r"k_cache: expected \[L, N, B, Hkv, D\]"),
        ({"sources": SLOTS[:2]}, "targets: expected"),
        ({"sources": SLOTS[None]}, "sources: expected"),
        ({"targets": SLOTS.int()}, "targets: expected torch.int64"),
    ],
    compact_kv: [
        ({"k_cache": CACHE}, r"k_cache: expected \[L, N, B, Hkv, D\]"),
        ({"v_cache": CACHE[None].half()}, "v_cache: expected the dtype of k_cache"),
        ({"v_cache": SCATTERED[None]}, "v_cache: expected a contiguous tensor"),
        ({"sources": SLOTS}, r"sources: expected \[1 or L, 1 or Hkv, n\] = \[1 or 1, 1 or 2, any\], got \[3\]"),
        ({"sources": OWN_SLOTS[:0]}, "sources: expected"),
        ({"targets": OWN_SLOTS.expand(2, -1, -1)}, "targets: expected"),
        ({"targets": OWN_SLOTS.mT}, "targets: expected"),
        ({"targets": OWN_SLOTS.int()}, "targets: expected torch.int64"),
        ({"sources": OWN_SLOTS.to("meta")}, "sources: expected the device of k_cache"),
        ({"targets": OWN_SLOTS[..., :2]}, "targets: expected as many slots as sources, 3, got 2"),
    ],
    rotate_keys: [
        ({"k_cache": CACHE}, r"k_cache: expected \[L, N, B, Hkv, D\]"),
        ({"k_cache": SCATTERED[None]}, "k_cache: expected a contiguous tensor"),
        ({"k_cache": torch.zeros(1, 4, 8, 2, 15)}, "k_cache: expected an even head size, got 15"),
        ({"slots": SLOTS}, "slots: expected"),
        ({"deltas": OWN_SLOTS.int()}, "deltas: expected torch.int64"),
        ({"deltas": OWN_SLOTS[:, :1]}, r"deltas: expected \[1 or L, 1 or Hkv, n\] = \[1, 2, 3\], got \[1, 1, 3\]"),
        ({"frequencies": torch.ones(16)}, r"frequencies: expected \[D / 2\] = \[8\]"),
        ({"frequencies": torch.ones(8).double()}, "frequencies: expected torch.float32"),
        ({"frequencies": torch.ones(8, device="meta")}, "frequencies: expected the device of k_cache"),
    ],
    attend: [
        ({"query": PROBLEM.query[..., :8]}, "query: expected"),
        ({"query": PROBLEM.query.half()}, "query: expected the dtype of k_cache"),
        ({"query": PROBLEM.query[:, :5]}, "query: expected a multiple of 2 heads, got 5"),
        ({"scale": 0.0}, "scale: expected more than 0"),
        ({"window": 0}, "window: expected at least 1"),
        ({"softcap": 0.0}, "softcap: expected more than 0"),
        ({"sinks": torch.ones(2)}, "sinks: expected"),
        ({"out": torch.empty(3, 6, 16)}, "out: expected"),
        ({"out": torch.empty(16, 6, 6).transpose(0, 2)}, "out: expected a contiguous tensor"),
        ({"lse": torch.empty(6, 3)}, "lse: expected"),
        ({"v_scale": torch.ones(2)}, "v_scale: only int8"),
        ({"query_start": torch.zeros(2, dtype=torch.int32)}, "batch.query_start: expected"),
        ({"seq_lens": torch.zeros(2)}, "batch.seq_lens: expected torch.int32"),
        ({"block_tables": NARROW.long()}, "batch.block_tables: expected torch.int32"),
        ({"block_tables": torch.zeros(5, 2, dtype=torch.int32).t()}, "batch.block_tables: expected the blocks"),
        ({"block_tables": NARROW}, "batch.block_tables: too narrow for a sequence of 9 tokens"),
        ({"query_lens": (2,)}, "batch.query_lens, batch.host_seq_lens: expected 2 lengths each"),
        ({"query_lens": (20, 1)}, "batch.query_lens: 21 rows wanted"),
        ({"host_seq_lens": (1, 9)}, "batch.query_lens: 2 queries in a sequence of 1 tokens"),
        ({"max_query_len": 1}, "batch.max_query_len, batch.max_seq_len: smaller"),
    ],
    rotary_store: [
        ({"query": torch.ones(3, 4, 8)}, "query: expected"),
        ({"query": torch.ones(3, 3, 16)}, "query: expected a multiple of 2 heads, got 3"),
        ({"query": torch.ones(3, 16, 4).transpose(1, 2)}, "query: expected its last dimension side by side"),
        ({"key": torch.ones(3, 1, 16)}, "key: expected"),
        ({"value": torch.ones(3, 2, 16).half()}, "value: expected the dtype of query"),
        ({"cos": torch.ones(9, 8)}, r"cos: expected \[P, D\]"),
        ({"sin": torch.ones(8, 16)}, r"sin: expected \[P, D\]"),
        ({"positions": torch.zeros(3, dtype=torch.int32)}, "positions: expected torch.int64"),
        ({"slot_mapping": SLOTS[:2]}, r"slot_mapping: expected \[T\] = \[3\], got \[2\]"),
        ({"slot_mapping": SLOTS.int()}, "slot_mapping: expected torch.int64"),
        ({"k_scale": torch.ones(2)}, "k_scale: only int8"),
        ({"norms": HeadNorms(query=torch.ones(8))}, r"norms.query: expected \[D\] = \[16\], got \[8\]"),
        ({"norms": HeadNorms(key=torch.ones(16).half())}, "norms.key: expected the dtype of query"),
        ({"norms": HeadNorms(key=torch.ones(32)[::2])}, "norms.key: expected"),
    ],
    attention_scores: [
        ({"lse": torch.zeros(6, 5)}, "lse: expected"),
        ({"lse": torch.zeros(6, 6).double()}, "lse: expected torch.float32"),
        ({"counts": torch.ones(2)}, "counts: expected torch.int32"),
        ({"out": torch.zeros(2, 2, 8)}, "out: expected at least 9 columns, got 8"),
        ({"squares": torch.zeros(2, 2, 8)}, "squares: expected"),
        ({"query": PROBLEM.query[:, :5]}, "query: expected a multiple of 2 heads, got 5"),
    ],
}
CASES = [(operation, wrong, message) for operation, rows in WRONG.items() for wrong, message in rows]


@pytest.mark.parametrize(("operation", "wrong", "message"), CASES, ids=lambda one: getattr(one, "__name__", None))
def test_a_wrong_argument_is_named(operation: Callable[..., object], wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        operation(**RIGHT[operation] | wrong)
    assert not CACHE.any()


NO_OWN_SLOTS = OWN_SLOTS[..., :0]
NOTHING: dict[Callable[..., object], dict[str, Any]] = {
    store_kv: {"key": KEY[:0], "value": KEY[:0], "slot_mapping": SLOTS[:0]},
    rms_norm: {"x": torch.ones(0, 16)},
    copy_blocks: {"sources": SLOTS[:0], "targets": SLOTS[:0]},
    compact_kv: {"sources": NO_OWN_SLOTS, "targets": NO_OWN_SLOTS},
    rotate_keys: {"slots": NO_OWN_SLOTS, "deltas": NO_OWN_SLOTS},
}


@pytest.mark.parametrize("operation", NOTHING, ids=lambda one: one.__name__)
def test_nothing_to_do_changes_nothing(operation: Callable[..., Any]) -> None:
    right = RIGHT[operation]
    caches = {name: torch.ones_like(right[name]) for name in ("k_cache", "v_cache") if name in right}
    made = operation(**right | caches | NOTHING[operation])
    assert made is None or made.shape == (0, 16)
    assert all(bool(cache.eq(1).all()) for cache in caches.values())
