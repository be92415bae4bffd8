"""A second pass over the keys: one program owns the sums of one tile of one sequence's keys and one KV head.

The program goes through the queries that count, whose softmax denominators are known. So no two programs add to the
same sum, and the order of additions never changes.
"""

import triton
import triton.language as tl

from kernels.device_functions import LOG2_E, scaled, tanh

# Triton reads the signature by its own rules.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, misc"


# Variants for 1 or multiples of 16 would compile in the middle of serving, and gain nothing.
@triton.jit(do_not_specialize=["columns", "table_stride"])
def attention_scores_kernel(
    query_ptr,
    k_cache_ptr,
    lse_ptr,
    out_ptr,
    squares_ptr,
    k_scale_ptr,
    counted_ptr,
    query_start_ptr,
    seq_lens_ptr,
    block_tables_ptr,
    columns,
    table_stride,
    query_token_stride,
    query_head_stride,
    query_dim_stride,
    window,
    scale,
    softcap,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per KV head
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,  # pairs of a query token and a head, taken at a time
    TILE_KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    QUANTIZED: tl.constexpr,
    SQUARES: tl.constexpr,
    INTERPRETER: tl.constexpr,  # multiply in float32, for the interpreter, which cannot multiply bfloat16 matrices
):
    first_key = tl.program_id(0) * TILE_KEYS
    kv_head = tl.program_id(1)
    sequence = tl.program_id(2).to(tl.int64)
    row_start = tl.load(query_start_ptr + sequence)
    query_len = tl.load(query_start_ptr + sequence + 1) - row_start
    seq_len = tl.load(seq_lens_ptr + sequence)
    first_position = seq_len - query_len
    # Tokens of the sequence that count and see one of the keys.
    token_begin = tl.maximum(query_len - tl.load(counted_ptr + sequence), tl.maximum(first_key - first_position, 0))
    token_end = query_len
    key_position = first_key + tl.arange(0, TILE_KEYS)
    key_used = key_position < seq_len
    if HAS_WINDOW:
        key_used = key_used & (key_position > first_position + token_begin - window)
        token_end = tl.minimum(token_end, first_key + TILE_KEYS - 1 + window - first_position)
    score = tl.zeros([TILE_KEYS], tl.float32)
    square = tl.zeros([TILE_KEYS], tl.float32)
    if token_begin < token_end:
        dim = tl.arange(0, HEAD_DIM_PADDED)
        block = tl.load(
            block_tables_ptr + sequence * table_stride + key_position // BLOCK_SIZE, mask=key_used, other=0
        ).to(tl.int64)
        at = ((block * BLOCK_SIZE + key_position % BLOCK_SIZE) * KV_HEADS + kv_head) * HEAD_DIM
        keys = tl.load(
            k_cache_ptr + at[:, None] + dim[None, :], mask=key_used[:, None] & (dim < HEAD_DIM)[None, :], other=0.0
        )
        keys = keys.to(tl.float32 if INTERPRETER else query_ptr.dtype.element_ty)
        for first_row in range(token_begin * GROUP, token_end * GROUP, ROWS):
            row = first_row + tl.arange(0, ROWS)
            row_used = row < token_end * GROUP
            packed_row = (row_start + row // GROUP).to(tl.int64)
            head = kv_head * GROUP + row % GROUP
            query = tl.load(
                query_ptr
                + packed_row[:, None] * query_token_stride
                + head[:, None] * query_head_stride
                + dim[None, :] * query_dim_stride,
                mask=row_used[:, None] & (dim < HEAD_DIM)[None, :],
                other=0.0,
            )
            if QUANTIZED:
                # Rounded as in paged_attention, which has computed `lse` from the rounded query.
                query = scaled(query, k_scale_ptr + kv_head * HEAD_DIM, HEAD_DIM, HEAD_DIM_PADDED).to(query.dtype)
            logits = tl.dot(query.to(keys.dtype), tl.trans(keys), input_precision="ieee") * scale
            if HAS_SOFTCAP:
                logits = softcap * tanh(logits / softcap)
            lse = tl.load(lse_ptr + packed_row * (KV_HEADS * GROUP) + head, mask=row_used, other=0.0)
            position = first_position + row // GROUP
            seen = row_used[:, None] & key_used[None, :] & (key_position[None, :] <= position[:, None])
            if HAS_WINDOW:
                seen = seen & (key_position[None, :] > position[:, None] - window)
            weight = tl.where(seen, tl.exp2((logits - lse[:, None]) * LOG2_E), 0.0)
            score += tl.sum(weight, 0)
            if SQUARES:
                square += tl.sum(weight * weight, 0)
    at = (sequence * KV_HEADS + kv_head) * columns + key_position
    tl.store(out_ptr + at, score, mask=key_position < columns)
    if SQUARES:
        tl.store(squares_ptr + at, square, mask=key_position < columns)
