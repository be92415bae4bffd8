"""Cost of a step that computes several tokens of one sequence, compared with a step of one token.

The cost shows how many drafted tokens a step can verify. Both CPU decoders compute six layers of SmolLM2-135M's sizes
with random weights. They have a fifth of its vocabulary, so that each part of the model takes the same share of a step
as with thirty layers. The cost is the processor time of one thread, the least of many turns: other work on the machine
hardly affects it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench.result import Result, add_json_argument
from executor.batch import SequenceState, build_batch
from executor.cache.pool import KvPools
from executor.models.attention import NAME
from executor.models.forward import Model
from executor.models.load import model_of
from executor.step import NewSequence
from tests.stack import model_cache

ROWS = (1, 2, 4, 8, 16)
LENGTH = 800
BLOCK_SIZE = 16
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
DECODERS = {"compiled": model_cache() / "compiled", "torch": None}
_CONFIG = {
    "vocab_size": 9830,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
}


def load(decoder: str, dtype: torch.dtype) -> Model:
    """Loads a model with random weights into one of the CPU decoders."""
    torch.manual_seed(5)
    module = LlamaForCausalLM._from_config(LlamaConfig(**_CONFIG), dtype=dtype, attn_implementation=NAME)
    return model_of(module, decoder, DECODERS[decoder])


@torch.inference_mode()
def seconds(model: Model, rows: Sequence[int], turns: int) -> list[float]:
    """Processor seconds of a step for each number of tokens; after the step, the sequence has LENGTH tokens."""
    blocks = -(-LENGTH // BLOCK_SIZE)
    pools = KvPools(model.groups, blocks, BLOCK_SIZE, model.dtype, model.device)
    ids = torch.randint(model.vocab_size, (LENGTH,)).tolist()
    table = tuple(range(1, blocks + 1))
    last_tokens = torch.zeros(1, dtype=torch.int64)

    def step(computed: int) -> float:
        sequence = SequenceState.of(NewSequence(1, tuple(ids), LENGTH, computed, (table,)), 0)
        count = LENGTH - computed
        batch = build_batch([sequence], [count], last_tokens, BLOCK_SIZE, 1)
        every = np.arange(count, dtype=np.int64)
        run = model.forward.prepare(replace(batch, rows=every, output_token_rows=np.zeros_like(every)), pools)
        begin = time.process_time()
        run()
        return time.process_time() - begin

    step(0)
    least = [float("inf")] * len(rows)
    for turn in range(-1, turns):
        for index, count in enumerate(rows):
            taken = step(LENGTH - count)
            # The first turn allocates memory.
            if turn >= 0:
                least[index] = min(least[index], taken)
    return least


def main(arguments: list[str]) -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--turns", type=int, default=25, help="steps of each kind (%(default)s)")
    add_json_argument(parser)
    given = parser.parse_args(arguments)
    figures: list[dict[str, Any]] = []
    torch.set_num_threads(1)
    print("| decoder | one token | " + " | ".join(f"{count} tokens" for count in ROWS[1:]) + " |")
    print("| --- |" + " --- |" * len(ROWS))
    for decoder in DECODERS:
        for name, dtype in DTYPES.items():
            least = seconds(load(decoder, dtype), ROWS, given.turns)
            taken = dict(zip(map(str, ROWS), least, strict=True))
            figures.append({"decoder": decoder, "dtype": name, "seconds_by_tokens": taken})
            shares = " | ".join(f"{each / least[0]:.2f}" for each in least[1:])
            print(f"| {decoder}, {name} | {least[0] * 1e3:.2f} ms | {shares} |", flush=True)
    Result("draft_cost", {"steps": figures}, {"turns": given.turns, "length": LENGTH}).write(given.json)


if __name__ == "__main__":
    main(sys.argv[1:])
