"""How the Triton kernel splits its work: chosen by rule, since autotuning needs a driver even in the interpreter."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TileSizes:
    """Rows (pairs of a query token and a head), query tokens and keys of a tile, and how it is launched.

    splits: programs among which a tile's keys are divided, a power of two. If each sequence has one query, a sequence
    has at most one share per least_keys keys, rounded up, and a long sequence has more than `splits` shares.
    """

    rows: int
    tokens: int
    keys: int
    num_warps: int
    num_stages: int
    splits: int = 1
    least_keys: int = 1


# Rows of a prompt's tile, keys, warps and stages by head size, for 16-bit activations. Those of sm_90 for heads of 128
# are the fastest of a sweep on an H100. The others were not measured on any device: they are the largest tiles that
# compile without spilling registers and keep enough loads in flight.
Table = dict[int, tuple[int, int, int, int]]
PROMPT_SM_80: Table = {64: (128, 64, 8, 3), 128: (128, 32, 8, 3), 256: (64, 32, 8, 2)}
PROMPT_SM_90: Table = {64: (128, 64, 8, 3), 128: (64, 64, 4, 3), 256: (64, 64, 8, 2)}
# For single tokens, with the fewest rows that a matrix instruction takes.
SINGLE_SM_80: Table = {64: (16, 128, 4, 3), 128: (16, 64, 4, 3), 256: (16, 32, 4, 3)}
SINGLE_SM_90: Table = {64: (16, 128, 4, 3), 128: (16, 64, 4, 2), 256: (16, 32, 4, 3)}
# Products in float32 have no matrix instruction; small tiles stay in registers.
FLOAT32: Table = {64: (64, 32, 8, 1), 128: (32, 32, 8, 1), 256: (32, 32, 8, 1)}
# Major compute capabilities with the shared memory and the matrix instructions that the tables of sm_90 are for.
LARGE = (9, 10)

# Programs per multiprocessor up to which keys are divided into shares, and how many keys justify one more share.
SINGLE_PROGRAMS = 3
PROMPT_PROGRAMS = 1
SPLIT_KEYS = 256
MAX_SPLITS = 64
# Most keys of a share of a sequence with one query. A sequence with four times as many keys takes as long as its
# neighbours, because its shares run in parallel.
MOST_KEYS = 2048
# Room for additional shares of long sequences in any batch; one per sequence if there are more sequences than this.
MORE_SHARES = 128


def choose_sizes(
    capability: tuple[int, int],
    multiprocessors: int,
    *,
    rows: int,
    sequences: int,
    kv_heads: int,
    group: int,
    head_dim: int,
    element_size: int,
    cache_element_size: int,
    max_query_len: int,
    max_seq_len: int,
    window: int | None,
) -> TileSizes:
    """Returns sizes for `rows` packed query tokens of `sequences`, which depend on shapes and bounds, never on lengths.

    group: query heads per KV head. element_size, cache_element_size: bytes of a query's and of a key's element.
    """
    head_class = max(64, power_of_two(head_dim))
    tile_rows = max(16, power_of_two(group))
    single = max_query_len * group <= tile_rows
    large = capability[0] in LARGE
    if element_size > 2:
        prompt_rows, keys, num_warps, num_stages = _of(FLOAT32, head_class)
        num_warps = 4 if single else num_warps
    elif single:
        _, keys, num_warps, num_stages = _of(SINGLE_SM_90 if large else SINGLE_SM_80, head_class)
        # Half the bytes per tile: one more tile in flight.
        num_stages += cache_element_size < element_size
        prompt_rows = tile_rows
    else:
        prompt_rows, keys, num_warps, num_stages = _of(PROMPT_SM_90 if large else PROMPT_SM_80, head_class)
    tile_rows = tile_rows if single else max(tile_rows, prompt_rows)
    tokens = tile_rows // group
    programs = kv_heads * (sequences if single else -(-rows // tokens))
    wanted = multiprocessors * (SINGLE_PROGRAMS if single else PROMPT_PROGRAMS)
    most_keys = max_seq_len if window is None else min(max_seq_len, window + tokens)
    splits = 1
    while programs * splits < wanted and 2 * splits * SPLIT_KEYS <= most_keys and splits < MAX_SPLITS:
        splits *= 2
    return TileSizes(tile_rows, tokens, keys, num_warps, num_stages, splits, SPLIT_KEYS)


def _of(table: Table, head_class: int) -> tuple[int, int, int, int]:
    # Heads larger than any known size take the smallest tiles.
    return table[min(head_class, max(table))]


def power_of_two(size: int) -> int:
    """Returns the least power of two that is not less than `size`."""
    return 1 << (size - 1).bit_length()
