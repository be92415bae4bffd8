"""Scales of 8-bit caches, from the largest keys and values that fixed texts produce.

Keys have outliers: some of a head's numbers are many times as large as the others, in every token. So each number has
a separate scale. Only the two numbers that rotary embedding rotates into each other share a scale, because a rotation
must not change a scale. Values have no outliers, and one scale per head.
"""

from collections.abc import Iterator, Sequence

import torch
from tokenizers import Tokenizer
from torch import Tensor

from executor.batch import SequenceState, build_batch
from executor.cache.pool import KvPools, Scales
from executor.errors import ModelError
from executor.models.forward import Model
from executor.models.tokenizer import TokenizerFiles
from executor.step import NewSequence
from kernels.quantization import LARGEST

# Each is a separate sequence: the first token of a sequence has unusual keys.
TEXTS = (
    "The harbour was quiet before sunrise. Two boats had come in late with little to show for it, and their crews sat "
    "on the quay, mending nets and talking about the weather of the last three weeks. Nobody expected a new wind; "
    "when it came, at half past six, every sail in the bay filled at once. 'We should have waited,' said the oldest of "
    "them, and he was right, as he was about most things that he said in so few words.",
    """def median(values: list[float]) -> float:
    ordered = sorted(values)
    half, odd = divmod(len(ordered), 2)
    if not ordered:
        raise ValueError("no values")  # A mean would divide by zero, too.
    return ordered[half] if odd else (ordered[half - 1] + ordered[half]) / 2
""",
    """{"order": 48213, "items": [{"name": "lamp, brass", "price": 129.50, "count": 2},
 {"name": "cable 3 m", "price": 4.99, "count": 10}], "paid": true, "at": "2024-03-17T09:26:53Z", "note": null}""",
    """Question: A train leaves at 14:05 and needs 2 hours and 48 minutes. When does it arrive?
Answer: 14:05 plus 2 hours is 16:05, and 48 minutes later it is 16:53.

| year | rainfall in mm |
| --- | --- |
| 2019 | 641 |
| 2020 | 587 |
""",
    "Le marché ouvre à huit heures, et les premiers clients attendent déjà devant la porte. Das Wasser stieg bis zum "
    "Abend; am Morgen war der Weg wieder frei. 今天的会议改到下午三点。 Погода была хорошая, и мы пошли пешком.",
)
# Other texts produce some larger numbers.
MARGIN = 1.25
# Scales are powers of 2 with exponents on this grid: so rounding differences seldom change a scale, and thereby the
# meaning of stored blocks.
GRID = 0.25
_BLOCK_SIZE = 16


def calibrate(model: Model, tokenizer: TokenizerFiles, dtype: torch.dtype) -> list[Scales]:
    """Returns the scales of each layer group for pools of `dtype`; none unless it has 8 bits.

    A model without a tokenizer gets ids from all over its vocabulary. Raises ModelError if keys or values are not
    numbers.
    """
    if dtype not in LARGEST:
        return []
    prompts = [ids for text in TEXTS if (ids := _ids(text, tokenizer, model))]
    prompts = prompts or [[number * model.vocab_size // 256 for number in range(256)]]
    blocks = -(-max(map(len, prompts)) // _BLOCK_SIZE)
    pools = KvPools(model.groups, blocks, _BLOCK_SIZE, model.dtype, model.device)
    # Per prompt and group.
    seen = [list(_largest(model, pools, ids)) for ids in prompts]
    return [
        Scales(*(_scale(torch.stack(every).amax(0), LARGEST[dtype][1]) for every in zip(*of_group, strict=True)))
        for of_group in zip(*seen, strict=True)
    ]


def _ids(text: str, tokenizer: TokenizerFiles, model: Model) -> list[int]:
    if not tokenizer.json:
        return []
    ids = Tokenizer.from_str(tokenizer.json.decode()).encode(text).ids
    return [token for token in ids if token < model.vocab_size][: model.max_positions]


@torch.inference_mode()
def _largest(model: Model, pools: KvPools, ids: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields the largest key and value of each group in one sequence, [layers, kv_heads, head_dim] float32 each."""
    table = tuple(range(1, pools.pools[0].num_blocks + 1))
    new = NewSequence(0, tuple(ids), len(ids), 0, (table,) * len(pools.pools))
    last_tokens = torch.zeros(1, dtype=torch.int64, device=model.device)
    batch = build_batch([SequenceState.of(new, 0)], [len(ids)], last_tokens, pools.block_size, len(pools.pools))
    model.forward.prepare(batch, pools)()
    for pool in pools.pools:
        keys, values = (cache[:, 1:].flatten(1, 2)[:, : len(ids)].float() for cache in (pool.k, pool.v))
        # For a pair, its length, which no rotation changes; an odd last number stands alone.
        half = keys.shape[-1] // 2
        pairs = torch.hypot(keys[..., :half], keys[..., half : 2 * half])
        k = torch.cat([pairs, pairs, keys[..., 2 * half :].abs()], -1).amax(1)
        yield k, values.abs().amax((1, 3))[..., None].expand_as(k)


def _scale(largest: Tensor, most: float) -> Tensor:
    """[layers, kv_heads, head_dim] float32: scales so that `most`, the largest code, stands for more than `largest`."""
    if not bool(largest.isfinite().all()):
        raise ModelError("the model computes keys or values that are no numbers: its weights are damaged")
    # In 64 bits, so that numbers on the grid stay on it.
    exponents = (largest.double() * MARGIN / most).log2()
    scales = torch.exp2((exponents / GRID).ceil() * GRID).float()
    # If all numbers are 0, any scale will do.
    return torch.where(largest == 0, 1.0, scales)
