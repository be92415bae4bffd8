"""Flash attention over a paged cache: one program per tile of one sequence's queries and per KV head.

A tile's rows are (query token, query head of the group) pairs, so that the heads that share a KV head share its loads
and a single new token still fills a matrix row per head. Keys come in tiles of any size: each looks up its own block.
"""

import triton
import triton.language as tl

# Triton reads the signature by its own rules.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, misc"


@triton.jit
def _sequence_of_tile(query_start_ptr, tile, sequences, TILE_TOKENS: tl.constexpr):
    """Sequence s owns the tiles from query_start[s] // TILE_TOKENS + s on, as many as it needs or one more."""
    low = 0
    high = sequences
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start_ptr + middle) // TILE_TOKENS + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _tanh(x):
    # The quotient loses its digits near zero, where the series has them.
    e = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - e) / (1.0 + e)
    square = x * x
    near = x * (1.0 - square * (1.0 / 3.0 - square * (2.0 / 15.0 - square * (17.0 / 315.0))))
    return tl.where(tl.abs(x) < 0.1, near, tl.where(x < 0, -far, far))


# Variants of these two for 1 or multiples of 16 would compile in the middle of serving, and gain nothing.
@triton.jit(do_not_specialize=["sequences", "table_stride"])
def paged_attention_kernel(
    query_ptr,
    k_cache_ptr,
    v_cache_ptr,
    out_ptr,
    sinks_ptr,
    query_start_ptr,
    seq_lens_ptr,
    block_tables_ptr,
    sequences,
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
    ROWS: tl.constexpr,
    TILE_TOKENS: tl.constexpr,  # query tokens per tile, TILE_TOKENS * GROUP <= ROWS
    TILE_KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    WIDEN: tl.constexpr,  # multiply in float32, for the interpreter, which cannot multiply bfloat16 matrices
):
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    sequence = _sequence_of_tile(query_start_ptr, tile, sequences, TILE_TOKENS)
    row_start = tl.load(query_start_ptr + sequence)
    query_len = tl.load(query_start_ptr + sequence + 1) - row_start
    first_token = (tile - row_start // TILE_TOKENS - sequence) * TILE_TOKENS
    if first_token >= query_len:
        return
    first_position = tl.load(seq_lens_ptr + sequence) - query_len + first_token
    last_position = first_position + tl.minimum(TILE_TOKENS, query_len - first_token) - 1

    row = tl.arange(0, ROWS)
    token = first_token + row // GROUP
    head = kv_head * GROUP + row % GROUP
    position = first_position + row // GROUP
    row_used = (row < TILE_TOKENS * GROUP) & (token < query_len)
    dim = tl.arange(0, HEAD_DIM_PADDED)
    dim_used = dim < HEAD_DIM
    packed_row = (row_start + token).to(tl.int64)
    query = tl.load(
        query_ptr
        + packed_row[:, None] * query_token_stride
        + head[:, None] * query_head_stride
        + dim[None, :] * query_dim_stride,
        mask=row_used[:, None] & dim_used[None, :],
        other=0.0,
    )

    if WIDEN:
        query = query.to(tl.float32)

    if HAS_SINKS:
        # A sink is a key seen by every row whose value is zero.
        largest = tl.load(sinks_ptr + head, mask=row_used, other=0.0).to(tl.float32)
        total = tl.full([ROWS], 1.0, tl.float32)
    else:
        largest = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
    weighted = tl.zeros([ROWS, HEAD_DIM_PADDED], tl.float32)

    first_key = 0
    if HAS_WINDOW:
        first_key = tl.maximum(first_position - window + 1, 0)
    table = block_tables_ptr + sequence.to(tl.int64) * table_stride
    for tile_start in range((first_key // TILE_KEYS) * TILE_KEYS, last_position + 1, TILE_KEYS):
        key_position = tile_start + tl.arange(0, TILE_KEYS)
        # Nothing else is read: those places may hold anything, and 0 times NaN is NaN.
        key_used = (key_position >= first_key) & (key_position <= last_position)
        block = tl.load(table + key_position // BLOCK_SIZE, mask=key_used, other=0).to(tl.int64)
        at = ((block * BLOCK_SIZE + key_position % BLOCK_SIZE) * KV_HEADS + kv_head) * HEAD_DIM
        cell = at[:, None] + dim[None, :]
        cell_used = key_used[:, None] & dim_used[None, :]
        keys = tl.load(k_cache_ptr + cell, mask=cell_used, other=0.0)
        if WIDEN:
            keys = keys.to(tl.float32)
        logits = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
        if HAS_SOFTCAP:
            logits = softcap * _tanh(logits / softcap)
        seen = key_used[None, :] & (key_position[None, :] <= position[:, None])
        if HAS_WINDOW:
            seen = seen & (key_position[None, :] > position[:, None] - window)
        logits = tl.where(seen, logits, float("-inf"))
        larger = tl.maximum(largest, tl.max(logits, 1))
        # A row that has seen no key yet has no maximum to subtract.
        base = tl.where(larger == float("-inf"), 0.0, larger)
        weights = tl.exp(logits - base[:, None])
        shrink = tl.exp(largest - base)
        values = tl.load(v_cache_ptr + cell, mask=cell_used, other=0.0)
        weighted = weighted * shrink[:, None]
        total = total * shrink + tl.sum(weights, 1)
        weights = weights.to(values.dtype)
        if WIDEN:
            weights = weights.to(tl.float32)
            values = values.to(tl.float32)
        weighted = tl.dot(weights, values, weighted, input_precision="ieee")
        largest = larger

    result = weighted / tl.where(total == 0.0, 1.0, total)[:, None]
    out_row = (packed_row * (KV_HEADS * GROUP) + head) * HEAD_DIM
    tl.store(
        out_ptr + out_row[:, None] + dim[None, :],
        result.to(out_ptr.dtype.element_ty),
        mask=row_used[:, None] & dim_used[None, :],
    )
