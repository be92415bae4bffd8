"""Cost of batch-invariant computation: steps with it and without it, in turns.

Run it with `make bench-invariance`. The compiled decoder computes six layers of SmolLM2-135M's sizes with random
weights and a fifth of its vocabulary, so that each part of the model takes the same share of a step as with thirty
layers. The cost is processor time of one thread, the least of many turns: other work on the machine hardly affects it.
This does not show how several threads would divide a single long context.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch

from bench.result import Result, add_json_argument
from kernels.cpu_decoder import build
from kernels.cpu_decoder.launch import DTYPES, Decoder
from tests.kernels.decoder_cases import Case, build_world
from tests.stack import model_cache

# Tokens that each sequence computes, its length afterwards, and blocks of 16 tokens that all sequences share.
STEPS: dict[str, tuple[tuple[int, ...], tuple[int, ...], int]] = {
    "a prompt of 512 tokens": ((512,), (512,), 0),
    "256 tokens behind 2,048": ((256,), (2304,), 0),
    "1 stream of 800 tokens": ((1,), (800,), 0),
    "1 stream of 4,000 tokens": ((1,), (4000,), 0),
    "4 streams of 800 tokens": ((1,) * 4, (800,) * 4, 0),
    "32 streams of 300 tokens": ((1,) * 32, (300,) * 32, 0),
    "12 streams behind 1,024 shared tokens": ((1,) * 12, (1060,) * 12, 64),
    "32 streams behind 1,024 shared tokens": ((1,) * 32, (1060,) * 32, 64),
    "8 streams of 400 tokens, and 128 of a prompt": ((1,) * 8 + (128,), (400,) * 8 + (512,), 0),
}


def seconds(folder: Path, name: str, dtype: torch.dtype, turns: int) -> tuple[float, float]:
    """Processor seconds of a step without batch-invariant computation, and of a step with it."""
    queries, lengths, shared = STEPS[name]
    case = Case(
        queries,
        lengths,
        shared=shared,
        evicted=(0,) * len(queries),
        q_heads=9,
        kv_heads=3,
        hidden=576,
        intermediate=1536,
        vocabulary=9830,
        layers=6,
    )
    world = build_world(case, dtype)
    decoder = Decoder(build.load(folder), world.weights, dtype, 1)
    decoder.bind(world.caches)
    least = [float("inf"), float("inf")]
    for turn in range(-1, turns):
        for invariant in (False, True):
            decoder.invariant = invariant
            begin = time.process_time()
            decoder.step(*world.arguments)
            # The first turn allocates memory.
            if turn >= 0:
                least[invariant] = min(least[invariant], time.process_time() - begin)
    return least[0], least[1]


def main(arguments: list[str]) -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--turns", type=int, default=15, help="steps of each kind (%(default)s)")
    add_json_argument(parser)
    given = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    torch.set_num_threads(1)
    print("| step | float32 | bfloat16 |\n| --- | --- | --- |")
    for name in STEPS:
        columns = []
        for dtype in DTYPES:
            plain, invariant = seconds(model_cache() / "compiled", name, dtype, given.turns)
            rows.append({"step": name, "dtype": str(dtype), "plain_s": plain, "invariant_s": invariant})
            columns.append(f"{invariant / plain - 1:+.1%} of {plain * 1e3:.1f} ms")
        print(f"| {name} | {' | '.join(columns)} |", flush=True)
    Result("invariance", {"steps": rows}, {"turns": given.turns}).write(given.json)


if __name__ == "__main__":
    main(sys.argv[1:])
