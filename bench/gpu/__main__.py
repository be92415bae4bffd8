"""Speed of the GPU path on this CUDA device, beside the limits of the device.

Run it with `make bench-gpu`. Correctness comes first: each kernel is compared with its reference, and greedy output of
small models with generate(), with and without graphs and through transformers' modules. A part whose check fails is
not measured. Each part has a time limit, and all parts end within nine minutes. Prints one table and keeps
everything as JSON. The status is 0 when all parts were done or cannot run here, whatever their figures, and 1
otherwise. Without a CUDA device there is nothing to measure, and the status is 0.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from bench.gpu.parts import OUT_OF_TIME, Bench, Figure, Part, Result, exit_status, note, run_all, show, values
from bench.result import Result as Kept
from bench.result import add_json_argument

# Seconds for all parts, and further seconds after which this process ends even if no signal interrupts a part.
SECONDS, GRACE = 500.0, 25.0


def _late(module: str, name: str) -> Callable[[Bench], Sequence[Figure]]:
    """Imports a part's function only when the part runs: a missing package must not stop all other parts."""
    return lambda bench: getattr(importlib.import_module(f"bench.gpu.{module}"), name)(bench)  # type: ignore[no-any-return]


KERNELS, MODELS, BANDWIDTH, DECODE = "kernels", "models", "copy bandwidth", "8B decode"
PARTS = (
    Part(KERNELS, _late("kernels", "check"), 150),
    Part(BANDWIDTH, _late("kernels", "bandwidth"), 20),
    Part("decode attention", _late("kernels", "decode_attention"), 100, (KERNELS, BANDWIDTH)),
    Part("uneven attention", _late("kernels", "uneven_attention"), 40, (KERNELS, BANDWIDTH)),
    Part("sampling", _late("kernels", "sampling"), 30, (KERNELS,)),
    Part("prefill attention", _late("kernels", "prefill_attention"), 80, (KERNELS,)),
    Part(MODELS, _late("models", "check"), 100, (KERNELS,)),
    Part(DECODE, _late("models", "decode_steps"), 100, (MODELS, BANDWIDTH)),
    Part("mixed steps", _late("models", "mixed_steps"), 40, (DECODE,)),
    Part("worker", _late("models", "through_the_worker"), 30, (DECODE,)),
    Part("transfers", _late("models", "transfers"), 60, (DECODE,)),
    Part("8B throughput", _late("models", "throughput"), 60, (DECODE,)),
    Part("stack", _late("stack", "serve"), 120, (MODELS,)),
    # This part takes the memory of earlier parts' pools.
    Part("generate_batch", _late("models", "beside_transformers"), 180, ("8B throughput",)),
)


def facts() -> dict[str, Any]:
    """Device and versions that the figures come from. Raises ModuleNotFoundError."""
    import torch
    import transformers
    import triton

    properties = torch.cuda.get_device_properties(0)
    return {
        "device": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "memory_gb": round(properties.total_memory / 1e9, 1),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "transformers": transformers.__version__,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and reports."""
    begin = time.monotonic()
    parser = argparse.ArgumentParser(prog="bench-gpu", description=__doc__)
    add_json_argument(parser)
    parser.add_argument("--parts", nargs="+", choices=[part.name for part in PARTS], help="these and the needed parts")
    given = parser.parse_args(arguments)
    try:
        import torch

        if not torch.cuda.is_available():
            print("There is no CUDA device on this machine, so nothing is measured.")
            return 0
        where = facts()
    except ModuleNotFoundError as error:
        print(f"The Python package {error.name} is missing; this needs torch, triton, transformers and numpy.")
        return 1
    parts = chosen(given.parts) if given.parts else PARTS
    results: dict[str, Result] = {}

    def finish() -> int:
        print(f"\n{where['device']}, torch {where['torch']}, triton {where['triton']}\n\n{show(results)}", flush=True)
        figures = values(results, where | {"seconds": round(time.monotonic() - begin, 1)})
        note(f"everything is in {Kept('gpu', figures).write(given.json)}")
        return exit_status(results, parts)

    def give_up() -> None:
        for part in parts:
            results.setdefault(part.name, Result(*OUT_OF_TIME))
        finish()
        os._exit(1)

    watch = threading.Timer(SECONDS + GRACE, give_up)
    watch.daemon = True
    watch.start()
    run_all(parts, results, begin + SECONDS)
    watch.cancel()
    return finish()


def chosen(names: Sequence[str]) -> tuple[Part, ...]:
    """These parts and all parts that they need, in the usual order."""
    wanted = set(names)
    for part in reversed(PARTS):
        if part.name in wanted:
            wanted.update(part.needs)
    return tuple(part for part in PARTS if part.name in wanted)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    # Does not wait for threads: a thread of transformers may still run after a part was broken off.
    os._exit(status)
