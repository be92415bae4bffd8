"""Flash attention over a paged cache: one program per tile of one sequence's queries, KV head and share of the keys.

A tile's rows are (query token, query head of the group) pairs, so that the heads that share a KV head share its loads
and a single new token still fills a matrix row per head. Keys come in tiles of any size: each key looks up its block.
A long sequence's keys can be divided among programs (Dao et al. 2023, "Flash-Decoding"); a second kernel merges the
partial results. If no sequence has more than one query, `share_out_kernel` runs first and divides each sequence by its
length, so that one long sequence among short sequences keeps the whole device busy. This kernel reads the lengths on
the device, because a CUDA graph is replayed with other lengths.

Softmax is taken in powers of two, the factor log2(e) being part of the logits' scale, as the hardware has no other
exponential (Dao 2023, "FlashAttention-2", section 3.1).
"""

import triton
import triton.language as tl

from kernels.device_functions import LN_2, LOG2_E, scaled, sequence_of_tile, tanh

# Triton reads the signature by its own rules.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, misc"


@triton.jit
def _attend_to_tiles(
    softmax,  # running (largest logit [ROWS], sum [ROWS], weighted values [ROWS, HEAD_DIM_PADDED])
    begin,
    end,
    first_key,
    last_key,
    query,
    position,
    k_cache_ptr,
    v_cache_ptr,
    table,
    kv_head,
    window,
    scale,
    softcap,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,  # some row does not see some key, or some slot holds no key
    DTYPE: tl.constexpr,  # of the query, in which weights are rounded
):
    """The softmax after the keys [begin, end), begin a multiple of TILE_KEYS; the rows see none before first_key."""
    largest, total, weighted = softmax
    dim = tl.arange(0, HEAD_DIM_PADDED)
    key = tl.arange(0, TILE_KEYS)
    # Looked up one tile ahead: loads whose addresses are loaded in the same iteration are not pipelined.
    next_block = tl.load(table + tl.minimum(begin + key, last_key) // BLOCK_SIZE)
    for tile_start in range(begin, end, TILE_KEYS):
        block = next_block
        next_block = tl.load(table + tl.minimum(tile_start + TILE_KEYS + key, last_key) // BLOCK_SIZE)
        key_position = tile_start + key
        if MASKED:
            # Other slots are not read: they may hold NaN, and 0 times NaN is NaN.
            key_used = (key_position >= first_key) & (key_position <= last_key)
        at = block.to(tl.int64) * (BLOCK_SIZE * KV_HEADS * HEAD_DIM)
        at += (key_position % BLOCK_SIZE) * (KV_HEADS * HEAD_DIM) + kv_head * HEAD_DIM
        cell = at[:, None] + dim[None, :]
        if MASKED:
            cell_used = key_used[:, None] & (dim < HEAD_DIM)[None, :]
            keys = tl.load(k_cache_ptr + cell, mask=cell_used, other=0.0)
        elif HEAD_DIM < HEAD_DIM_PADDED:
            keys = tl.load(k_cache_ptr + cell, mask=(dim < HEAD_DIM)[None, :], other=0.0)
        else:
            keys = tl.load(k_cache_ptr + cell)
        logits = tl.dot(query, tl.trans(keys.to(query.dtype)), input_precision="ieee")
        if HAS_SOFTCAP:
            logits = tanh(logits * (scale / softcap))
            factor = softcap * LOG2_E
        else:
            factor = scale * LOG2_E
        if MASKED:
            seen = key_used[None, :] & (key_position[None, :] <= position[:, None])
            if HAS_WINDOW:
                seen = seen & (key_position[None, :] > position[:, None] - window)
            logits = tl.where(seen, logits, float("-inf"))
        larger = tl.maximum(largest, tl.max(logits, 1) * factor)
        base = larger
        if MASKED:
            # A row that has seen no key yet has no maximum to subtract.
            base = tl.where(larger == float("-inf"), 0.0, larger)
        weights = tl.exp2(logits * factor - base[:, None])
        shrink = tl.exp2(largest - base)
        if MASKED:
            values = tl.load(v_cache_ptr + cell, mask=cell_used, other=0.0)
        elif HEAD_DIM < HEAD_DIM_PADDED:
            values = tl.load(v_cache_ptr + cell, mask=(dim < HEAD_DIM)[None, :], other=0.0)
        else:
            values = tl.load(v_cache_ptr + cell)
        total = total * shrink + tl.sum(weights, 1)
        weights = weights.to(DTYPE).to(query.dtype)
        weighted = tl.dot(weights, values.to(query.dtype), weighted * shrink[:, None], input_precision="ieee")
        largest = larger
    return largest, total, weighted


@triton.jit
def _seen_by_all(begin, end, first_position, last_position, window, TILE_KEYS: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """Of the tiles [begin, end), the range in which every row sees every key."""
    full_begin = begin
    if HAS_WINDOW:
        seen_by_last = tl.maximum(last_position - window + 1, begin)
        full_begin = tl.cdiv(tl.minimum(seen_by_last, end), TILE_KEYS) * TILE_KEYS
    return full_begin, tl.maximum(tl.minimum(end, first_position + 1) // TILE_KEYS * TILE_KEYS, full_begin)


@triton.jit(do_not_specialize=["sequences", "splits", "window", "entries"])
def share_out_kernel(
    query_start_ptr,
    seq_lens_ptr,
    entry_sequence_ptr,
    first_entry_ptr,
    sequences,
    splits,
    window,
    entries,
    LEAST_KEYS: tl.constexpr,
    MOST_KEYS: tl.constexpr,
    MOST_SHARES: tl.constexpr,
    SEQUENCES_PADDED: tl.constexpr,
    ENTRIES_PADDED: tl.constexpr,
):
    """The shares of sequences of at most one query each: an entry for each share, -1 after the last share.

    A sequence has `splits` shares, but at most one per LEAST_KEYS keys, rounded up. It has more if a share would have
    more than MOST_KEYS keys, up to MOST_SHARES. The number depends only on the sequence's own length, unless there
    would be more shares than entries: then MOST_KEYS is doubled until all fit. `entries` must be at least
    splits * sequences. window: 0 for none.
    """
    sequence = tl.arange(0, SEQUENCES_PADDED)
    inside = sequence < sequences
    start = tl.load(query_start_ptr + sequence, mask=inside, other=0)
    end = tl.load(query_start_ptr + sequence + 1, mask=inside, other=0)
    keys = tl.load(seq_lens_ptr + sequence, mask=inside & (end > start), other=0)
    keys = tl.where(window > 0, tl.minimum(keys, window), keys)
    few = tl.minimum(tl.cdiv(keys, LEAST_KEYS), splits)
    most = MOST_KEYS
    shares = tl.minimum(tl.maximum(few, tl.cdiv(keys, most)), MOST_SHARES)
    while tl.sum(shares, 0) > entries:
        most *= 2
        shares = tl.minimum(tl.maximum(few, tl.cdiv(keys, most)), MOST_SHARES)
    first = tl.cumsum(shares, 0) - shares
    tl.store(first_entry_ptr + sequence, first, mask=inside)
    count = tl.sum(shares, 0)
    tl.store(first_entry_ptr + sequences, count)
    entry = tl.arange(0, ENTRIES_PADDED)
    nothing = tl.full([ENTRIES_PADDED], -1, tl.int32)
    tl.store(entry_sequence_ptr + entry, nothing, mask=(entry >= count) & (entry < entries))
    for number in range(tl.max(shares, 0)):
        tl.store(entry_sequence_ptr + first + number, sequence, mask=number < shares)


# Variants of these for 1 or multiples of 16 would compile in the middle of serving, and gain nothing.
@triton.jit(do_not_specialize=["sequences", "splits", "table_stride"])
def paged_attention_kernel(  # noqa: C901
    query_ptr,
    k_cache_ptr,
    v_cache_ptr,
    out_ptr,
    lse_ptr,
    sinks_ptr,
    k_scale_ptr,
    v_scale_ptr,
    query_start_ptr,
    seq_lens_ptr,
    block_tables_ptr,
    entry_sequence_ptr,
    first_entry_ptr,
    sequences,
    splits,
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
    DECODE_ONLY: tl.constexpr,  # no sequence has more than one query; its keys are in as many shares as entries say
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    QUANTIZED: tl.constexpr,
    STORE_LSE: tl.constexpr,
    INTERPRETER: tl.constexpr,  # multiply in float32, for the interpreter, which cannot multiply bfloat16 matrices
):
    # Heads of a sequence run at the same time, as their keys lie side by side in memory; a prompt's last tile, which
    # has the most keys, comes first, so that no long tile is left at the end.
    kv_head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    split = tl.program_id(2)
    if DECODE_ONLY:
        sequence = tl.load(entry_sequence_ptr + tile)
        if sequence < 0:
            return
        first_entry = tl.load(first_entry_ptr + sequence)
        split = tile - first_entry
        splits = tl.load(first_entry_ptr + sequence + 1) - first_entry
    else:
        sequence = sequence_of_tile(query_start_ptr, tile, sequences, TILE_TOKENS)
    row_start = tl.load(query_start_ptr + sequence)
    # A tile after the last sequence has no queries.
    query_len = tl.load(query_start_ptr + tl.minimum(sequence + 1, sequences)) - row_start
    first_token = 0 if DECODE_ONLY else (tile - row_start // TILE_TOKENS - sequence) * TILE_TOKENS
    if first_token >= query_len:
        return
    first_position = tl.load(seq_lens_ptr + sequence) - query_len + first_token
    last_position = first_position + tl.minimum(TILE_TOKENS, query_len - first_token) - 1

    row = tl.arange(0, ROWS)
    token = first_token + row // GROUP
    head = kv_head * GROUP + row % GROUP
    position = first_position + row // GROUP
    row_used = (row < TILE_TOKENS * GROUP) & (token < query_len)
    packed_row = (row_start + token).to(tl.int64)
    if DECODE_ONLY:
        out_row = tile.to(tl.int64) * (KV_HEADS * GROUP) + head
    else:
        out_row = (packed_row * (KV_HEADS * GROUP) + head) * splits + split

    first_key = 0
    if HAS_WINDOW:
        first_key = tl.maximum(first_position - window + 1, 0)
    tiles_begin = first_key // TILE_KEYS
    share = tl.cdiv(tl.cdiv(last_position + 1, TILE_KEYS) - tiles_begin, splits)
    begin = (tiles_begin + split * share) * TILE_KEYS
    end = tl.minimum(last_position + 1, begin + share * TILE_KEYS)
    if begin >= end:
        if STORE_LSE:
            tl.store(lse_ptr + out_row, tl.full([ROWS], float("-inf"), tl.float32), mask=row_used)
        return

    dim = tl.arange(0, HEAD_DIM_PADDED)
    query = tl.load(
        query_ptr
        + packed_row[:, None] * query_token_stride
        + head[:, None] * query_head_stride
        + dim[None, :] * query_dim_stride,
        mask=row_used[:, None] & (dim < HEAD_DIM)[None, :],
        other=0.0,
    )
    DTYPE: tl.constexpr = query_ptr.dtype.element_ty
    if QUANTIZED:
        query = scaled(query, k_scale_ptr + kv_head * HEAD_DIM, HEAD_DIM, HEAD_DIM_PADDED).to(DTYPE)
    if INTERPRETER:
        query = query.to(tl.float32)

    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if HAS_SINKS:
        # A sink is a key that every row sees, with a value of zero; only the first share counts the sink.
        largest = tl.load(sinks_ptr + head, mask=row_used, other=0.0).to(tl.float32) * LOG2_E
        total += tl.where(split == 0, 1.0, 0.0)
    softmax = (largest, total, tl.zeros([ROWS, HEAD_DIM_PADDED], tl.float32))

    # Only at the ends of what the rows see are there keys that not all of them see.
    table = block_tables_ptr + sequence.to(tl.int64) * table_stride
    full_begin, full_end = _seen_by_all(begin, end, first_position, last_position, window, TILE_KEYS, HAS_WINDOW)
    edges = (begin, full_begin, full_end, end)
    for part in tl.static_range(0 if HAS_WINDOW else 1, 3):
        softmax = _attend_to_tiles(
            softmax,
            edges[part],
            edges[part + 1],
            first_key,
            end - 1,
            query,
            position,
            k_cache_ptr,
            v_cache_ptr,
            table,
            kv_head,
            window,
            scale,
            softcap,
            KV_HEADS,
            HEAD_DIM,
            HEAD_DIM_PADDED,
            BLOCK_SIZE,
            TILE_KEYS,
            HAS_WINDOW,
            HAS_SOFTCAP,
            part != 1,
            DTYPE,
        )
    largest, total, weighted = softmax

    result = weighted / tl.where(total == 0.0, 1.0, total)[:, None]
    if QUANTIZED:
        result = scaled(result, v_scale_ptr + kv_head * HEAD_DIM, HEAD_DIM, HEAD_DIM_PADDED)
    tl.store(
        out_ptr + out_row[:, None] * HEAD_DIM + dim[None, :],
        result.to(out_ptr.dtype.element_ty),
        mask=row_used[:, None] & (dim < HEAD_DIM)[None, :],
    )
    if STORE_LSE:
        tl.store(lse_ptr + out_row, (largest + tl.log2(total)) * LN_2, mask=row_used)


@triton.jit
def merge_shares_kernel(
    parts_ptr,
    parts_lse_ptr,
    out_ptr,
    lse_ptr,
    query_start_ptr,
    first_entry_ptr,
    MOST_SHARES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    STORE_LSE: tl.constexpr,
):
    """One program per head and sequence of one query merges all shares of this sequence, in their order."""
    sequence, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    first = tl.load(first_entry_ptr + sequence)
    count = tl.load(first_entry_ptr + sequence + 1) - first
    if count == 0:
        return
    out_row = tl.load(query_start_ptr + sequence).to(tl.int64) * heads + head
    share = tl.arange(0, MOST_SHARES)
    part = (first + share).to(tl.int64) * heads + head
    _merge(
        parts_ptr, parts_lse_ptr, part, share < count, out_ptr, lse_ptr, out_row, HEAD_DIM, HEAD_DIM_PADDED, STORE_LSE
    )


@triton.jit
def _merge(
    parts_ptr,
    parts_lse_ptr,
    part,
    there,
    out_ptr,
    lse_ptr,
    out_row,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    STORE_LSE: tl.constexpr,
):
    """Writes the mean of the parts, weighted by their sums of exp(logits).

    part: [N], rows of the parts. there: [N], which of these rows exist.
    """
    dim = tl.arange(0, HEAD_DIM_PADDED)
    lse = tl.load(parts_lse_ptr + part, mask=there, other=float("-inf"))
    # A share without keys was never written. A share whose sum is NaN counts, so that the result is NaN.
    used = (lse != float("-inf"))[:, None] & (dim < HEAD_DIM)[None, :]
    parts = tl.load(parts_ptr + part[:, None] * HEAD_DIM + dim[None, :], mask=used, other=0.0)
    largest = tl.max(lse, 0)
    weights = tl.exp(lse - largest)
    total = tl.sum(weights, 0)
    result = tl.sum(parts * weights[:, None], 0) / total
    tl.store(out_ptr + out_row * HEAD_DIM + dim, result.to(out_ptr.dtype.element_ty), mask=dim < HEAD_DIM)
    if STORE_LSE:
        tl.store(lse_ptr + out_row, largest + tl.log(total))


@triton.jit(do_not_specialize=["sequences"])
def merge_splits_kernel(
    parts_ptr,
    parts_lse_ptr,
    out_ptr,
    lse_ptr,
    query_start_ptr,
    sequences,
    SPLITS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    STORE_LSE: tl.constexpr,
):
    """One program per row and head merges all shares, also those that had no keys, so that the order never changes."""
    row = tl.program_id(0)
    if row >= tl.load(query_start_ptr + sequences):
        return
    out_row = row.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    split = tl.arange(0, SPLITS)
    part = out_row * SPLITS + split
    _merge(
        parts_ptr, parts_lse_ptr, part, split < SPLITS, out_ptr, lse_ptr, out_row, HEAD_DIM, HEAD_DIM_PADDED, STORE_LSE
    )
