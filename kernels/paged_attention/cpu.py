"""Paged attention on a CPU: gather a tile's blocks side by side, then one dense attention call.

A tile is either one new token of several sequences of similar length, each over its own blocks, or up to QUERY_TILE
tokens over common blocks: of one sequence, or of several sequences whose blocks begin alike, as with a cached prefix
(Hydragen, section 3, with one masked call instead of two merged calls).
Gathering into a small buffer that stays in the processor's cache costs less than reading in place, which would take a
call per sequence. The gathered positions and the masks are the same in every layer: they are made once per step.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.paged_attention.batch import AttentionArgs, PagedBatch
from kernels.quantization import dequantize

# More keys per call spill out of the processor's cache, fewer make the calls themselves expensive.
DECODE_KEYS = 4096
# A sequence shorter than this share of its neighbours' length gets a separate call rather than padding.
DECODE_FILL = 0.75
# Limits the size of a long prompt's masks. A tile skips the keys after its last query.
QUERY_TILE = 256
# Sequences share a tile if it takes at most this many times the multiplications that they would take alone: larger
# tiles can afford more multiplications, as they read shared keys only once.
SHARED_COST = 1.5

Blocks = np.ndarray[tuple[int, ...], np.dtype[np.int32]]


@dataclass(frozen=True)
class _Span:
    """Queries of one sequence: rows [row, row + queries), the last at position `end` - 1.

    blocks: [M] the blocks that they need; the first block begins at position `first`.
    """

    row: int
    queries: int
    end: int
    first: int
    blocks: Blocks


@dataclass(frozen=True)
class Tile:
    """Query rows computed in one call, with `columns` gathered keys for each of its `sequences`.

    sequences: the batch size of the call; 1 if several sequences share the columns.
    rows: [sequences * queries] int64; blocks: [sequences * columns / B] int64.
    mask: [sequences, 1, queries, columns], 0 or -inf.
    unseen: gathered columns that no query sees, counted through all sequences.
    members: the spans of the rows if several share the columns.
    """

    rows: Tensor
    sequences: int
    columns: int
    blocks: Tensor
    mask: Tensor
    unseen: Tensor
    members: tuple[_Span, ...] = ()


def attend(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: PagedBatch,
    args: AttentionArgs,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """Write the attention of every sequence's rows to `out`; arguments as in `launch.paged_attention`."""
    block_size, kv_heads, head_dim = k_cache.shape[1:]
    group, window, sinks = query.shape[1] // kv_heads, args.window, args.sinks
    tiles = batch.once(("tiles", window, block_size, query.dtype), lambda: plan(batch, window, block_size, query.dtype))
    most = max((tile.blocks.shape[0] for tile in tiles), default=0)
    scratch = batch.once(
        ("scratch", most, k_cache.dtype, k_cache.shape[1:]), lambda: k_cache.new_empty(2, most, *k_cache.shape[1:])
    )
    explicitly = args.softcap is not None or sinks is not None or lse is not None or args.k_scale is not None

    def compute(tile: Tile) -> tuple[Tensor, Tensor | None]:
        keys = _gather(k_cache, tile, scratch[0], args.k_scale)
        values = _gather(v_cache, tile, scratch[1], args.v_scale)
        queries = tile.mask.shape[2]
        rows = query.index_select(0, tile.rows).view(tile.sequences, queries, kv_heads, group, head_dim)
        if queries == 1:
            # The query heads that share a KV head stand in for queries: [sequences, Hkv, group, D].
            packed = rows[:, 0]
            tile_sinks = None if sinks is None else sinks.view(kv_heads, group)
        else:
            # Common columns: the group replaces the batch, over one copy of the keys:
            # [group, Hkv, queries, D].
            packed = rows[0].permute(2, 1, 0, 3)
            keys, values = (one.expand(group, -1, -1, -1) for one in (keys, values))
            tile_sinks = None if sinks is None else sinks.view(kv_heads, group).t()[:, :, None]
        if explicitly:
            result, total = _attend_explicitly(packed, keys, values, tile.mask, args, tile_sinks)
        else:
            result = F.scaled_dot_product_attention(packed, keys, values, attn_mask=tile.mask, scale=args.scale)
            total = None
        if queries > 1:
            result = result.permute(2, 1, 0, 3)
            total = None if total is None else total.permute(2, 1, 0)
        return result.reshape(-1, *query.shape[1:]), None if total is None else total.reshape(-1, query.shape[1])

    def write(tile: Tile, result: Tensor, total: Tensor | None) -> None:
        out.index_copy_(0, tile.rows, result)
        if lse is not None and total is not None:
            lse.index_copy_(0, tile.rows, total)

    for tile in tiles:
        result, total = compute(tile)
        if tile.members and not bool(result.isfinite().all()):
            # A value of some member is NaN or infinite, and its product with a weight of 0 is NaN in the rows of other
            # members. So each member is computed alone.
            for span in tile.members:
                alone = _tile([span], window, block_size, query.dtype)
                write(alone, *compute(alone))
        else:
            write(tile, result, total)


def _gather(cache: Tensor, tile: Tile, into: Tensor, scale: Tensor | None) -> Tensor:
    """The tile's keys or values as [sequences, Hkv, columns, D], float32 if they have a scale.

    Positions that no query sees are zero, as 0 times NaN is NaN.
    """
    into = into[: tile.blocks.shape[0]]
    if scale is None:
        torch.index_select(cache, 0, tile.blocks, out=into)
    else:
        # As bytes: torch selects no float8 by index on a CPU, and all bits zero are zero.
        torch.index_select(cache.view(torch.int8), 0, tile.blocks, out=into.view(torch.int8))
    flat = into.view(-1, *cache.shape[2:])
    if tile.unseen.shape[0]:
        (flat if scale is None else flat.view(torch.int8)).index_fill_(0, tile.unseen, 0)
    if scale is not None:
        flat = dequantize(flat, scale, torch.float32)
    return flat.view(tile.sequences, tile.columns, *cache.shape[2:]).transpose(1, 2)


def _attend_explicitly(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, args: AttentionArgs, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Computes what the dense call cannot, in float32: attention, and the logarithm of each row's sum of exp(logits).

    sinks: broadcast to [sequences, Hkv, queries].
    """
    logits = (query.float() @ keys.float().transpose(-1, -2)) * args.scale
    if args.softcap is not None:
        logits = torch.tanh(logits / args.softcap) * args.softcap
    logits = logits + mask
    total = torch.logsumexp(logits, -1)
    if sinks is not None:
        total = torch.logaddexp(total, sinks.float())
    return ((logits - total[..., None]).exp() @ values.float()).to(query.dtype), total


def plan(batch: PagedBatch, window: int | None, block_size: int, dtype: torch.dtype) -> list[Tile]:
    """Returns the tiles of a step; masks in `dtype`, the query's."""
    query_lens = batch.query_lens or tuple(batch.query_start.diff().tolist())
    seq_lens = batch.host_seq_lens or tuple(batch.seq_lens.tolist())
    tables = batch.block_tables.numpy()
    spans: list[_Span] = []
    row = 0
    for sequence, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        for start in range(0, query_len, QUERY_TILE):
            queries = min(QUERY_TILE, query_len - start)
            end = seq_len - query_len + start + queries
            first = 0 if window is None else max(0, end - queries - window + 1)
            first_block = first // block_size
            blocks = tables[sequence, first_block : -(-end // block_size)]
            spans.append(_Span(row + start, queries, end, first_block * block_size, blocks))
        row += query_len
    groups = _group_by_prefix(spans)
    alone = [group[0] for group in groups if len(group) == 1 and group[0].queries == 1]
    return [
        *(_tile(group, window, block_size, dtype) for group in groups if len(group) > 1 or group[0].queries > 1),
        *(_padded_tile(group, window, block_size, dtype) for group in _group_by_length(alone, block_size)),
    ]


def _group_by_prefix(spans: list[_Span]) -> list[list[_Span]]:
    """Groups spans whose blocks begin alike into tiles, as long as the blocks that they do not share cost little.

    Every row of a tile is multiplied with every gathered column, so a group of R rows over a union of U blocks costs
    R * U, while its members alone would cost the sum of their rows times their blocks.
    """
    groups: list[list[_Span]] = []
    rows = shared = union = alone = 0
    # Sorted by the bytes of their blocks, spans with a common beginning are neighbours.
    for span in sorted(spans, key=lambda one: one.blocks.tobytes()):
        own = len(span.blocks)
        if groups:
            common = _common(groups[-1][0].blocks[:shared], span.blocks)
            grown = union + (len(groups[-1]) - 1) * (shared - common) + own - common
            cost = alone + span.queries * own
            if common and rows + span.queries <= QUERY_TILE and (rows + span.queries) * grown <= SHARED_COST * cost:
                groups[-1].append(span)
                rows, shared, union, alone = rows + span.queries, common, grown, cost
                continue
        groups.append([span])
        rows, shared, union, alone = span.queries, own, own, span.queries * own
    return groups


def _common(one: Blocks, other: Blocks) -> int:
    """Returns how many leading blocks are the same."""
    length = min(len(one), len(other))
    differing = np.flatnonzero(one[:length] != other[:length])
    return int(differing[0]) if len(differing) else length


def _group_by_length(spans: list[_Span], block_size: int) -> list[list[_Span]]:
    """Groups spans by length, longest first, so that a group's first member determines its columns."""
    groups: list[list[_Span]] = []
    for span in sorted(spans, key=lambda one: len(one.blocks), reverse=True):
        longest = len(groups[-1][0].blocks) if groups else 0
        if (
            groups
            and len(span.blocks) >= DECODE_FILL * longest
            and (len(groups[-1]) + 1) * longest * block_size <= DECODE_KEYS
        ):
            groups[-1].append(span)
        else:
            groups.append([span])
    return groups


def _tile(group: list[_Span], window: int | None, block_size: int, dtype: torch.dtype) -> Tile:
    """Returns a tile of all rows of a group over the union of its blocks: first shared ones, then each member's own."""
    shared = len(group[0].blocks)
    for span in group[1:]:
        shared = _common(group[0].blocks[:shared], span.blocks)
    blocks = np.concatenate([group[0].blocks[:shared], *(span.blocks[shared:] for span in group)])
    seen = torch.zeros(sum(span.queries for span in group), len(blocks) * block_size, dtype=torch.bool)
    row, begin, split = 0, shared * block_size, shared * block_size
    for span in group:
        visible = _visible(span, len(span.blocks) * block_size, window)
        rows, end = slice(row, row + span.queries), begin + visible.shape[1] - split
        seen[rows, :split] = visible[:, :split]
        seen[rows, begin:end] = visible[:, split:]
        row, begin = rows.stop, end
    tile = _make_tile(group, blocks[None], seen[None], dtype)
    return replace(tile, members=tuple(group)) if len(group) > 1 else tile


def _padded_tile(group: list[_Span], window: int | None, block_size: int, dtype: torch.dtype) -> Tile:
    """Returns a tile of one new token per sequence over its own blocks, as wide as the first and longest sequence."""
    blocks = np.zeros((len(group), len(group[0].blocks)), dtype=np.int32)
    for into, span in zip(blocks, group, strict=True):
        into[: len(span.blocks)] = span.blocks
    seen = torch.stack([_visible(span, blocks.shape[1] * block_size, window) for span in group])
    return _make_tile(group, blocks, seen, dtype)


def _visible(span: _Span, columns: int, window: int | None) -> Tensor:
    """[queries, columns] bool: which columns, counted from the span's first, its queries see."""
    keys = span.first + torch.arange(columns)
    positions = torch.arange(span.end - span.queries, span.end)[:, None]
    seen = keys <= positions
    return seen if window is None else seen & (keys > positions - window)


def _make_tile(group: list[_Span], blocks: Blocks, seen: Tensor, dtype: torch.dtype) -> Tile:
    """blocks: [sequences, M]; seen: [sequences, queries, columns]."""
    return Tile(
        rows=torch.cat([torch.arange(span.row, span.row + span.queries) for span in group]),
        sequences=seen.shape[0],
        columns=seen.shape[2],
        blocks=torch.from_numpy(blocks.astype(np.int64).ravel()),
        mask=torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -torch.inf)[:, None],
        unseen=(~seen.any(1)).flatten().nonzero().flatten(),
    )
