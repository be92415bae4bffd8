"""Cost of LoRA adapters: throughput with many adapters and with the base model alone, in turns.

Run it with `python -m bench adapters`. Adapters have random weights and the same rank, and are on all linear layers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from bench.result import Result, add_json_argument
from executor.models.adapters import CONFIG, WEIGHTS
from executor.models.files import find
from tests.stack import Stack, model_cache
from tests.support.generation import generate_all, greedy_request

TARGET = 0.8


def projections(config: Any) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of the linear modules of a Llama, by name."""
    hidden, inner, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    dim = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    queries, keys = config.num_attention_heads * dim, config.num_key_value_heads * dim
    shapes = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    return {f"model.layers.{layer}.{name}": shape for layer in range(layers) for name, shape in shapes.items()}


def write_adapter(folder: Path, shapes: Mapping[str, tuple[int, int]], rank: int, seed: int) -> None:
    """Writes a random adapter in PEFT's form. Its weights are so small that the output stays text."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (outputs, inputs) in shapes.items():
        for part, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
            values = torch.randn(shape, generator=generator) * 0.02
            tensors[f"base_model.model.{name}.lora_{part}.weight"] = values
    folder.mkdir(parents=True)
    save_file(tensors, folder / WEIGHTS)
    targets = sorted({name.rpartition(".")[2] for name in shapes})
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "target_modules": targets}
    (folder / CONFIG).write_text(json.dumps(config))


def turn(stack: Stack, names: Sequence[str], prompts: Sequence[Sequence[int]], tokens: int) -> float:
    """Output tokens per second of streams that all begin at once. names: the streams' models, in turn."""
    requests = [
        greedy_request(prompt, tokens, reuse=False, model=names[number % len(names)])
        for number, prompt in enumerate(prompts)
    ]
    outputs = asyncio.run(generate_all(stack.scheduler, requests, concurrency=len(requests), seconds=3600))
    assert all(len(output.token_ids) == tokens for output in outputs)
    begin = min(output.started for output in outputs)
    return tokens * len(outputs) / (max(output.token_times[-1] for output in outputs) - begin)


def measure(stack: Stack, names: Sequence[str], arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures throughput with and without adapters, in turns, after one warm-up run of each kind."""
    rng = random.Random(7)
    prompts = [[rng.randrange(1000, 40_000) for _ in range(arguments.prompt_tokens)] for _ in range(arguments.streams)]
    kinds: dict[str, Sequence[str]] = {"base": [""], "adapters": names, "one_adapter": names[:1]}
    rates: dict[str, list[float]] = {kind: [] for kind in kinds}
    for repeat in range(arguments.repeats + 1):
        for kind, models in kinds.items():
            rate = turn(stack, models, prompts, arguments.output_tokens if repeat else 8)
            if repeat:
                rates[kind].append(rate)
    return rates


def main() -> None:
    """Starts stacks and measures; the status is 1 if the target is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--adapters", type=int, default=16)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    add_json_argument(parser)
    arguments = parser.parse_args()
    print(f"{arguments.adapters} adapters of rank {arguments.rank}, {arguments.streams} streams: output tokens/s")
    print(f"{'':<10}{'base':>10}{'adapters':>10}{'ratio':>8}{'one adapter':>13}{'ratio':>8}")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        shapes = projections(AutoConfig.from_pretrained(find("", model_cache()).source))
        names = [f"adapter-{number}" for number in range(arguments.adapters)]
        for seed, name in enumerate(names):
            write_adapter(Path(folder, name), shapes, arguments.rank, seed)
        for dtype in arguments.dtypes:
            settings = {
                "executor_dtype": dtype,
                "executor_adapters": ",".join(f"{name}={folder}/{name}" for name in names),
                "executor_max_adapters": len(names),
                "executor_max_adapter_rank": arguments.rank,
            }
            with Stack(**settings) as stack:
                rates = measure(stack, names, arguments)
            ratios = {
                kind: statistics.median(a / b for a, b in zip(rates[kind], rates["base"], strict=True))
                for kind in ("adapters", "one_adapter")
            }
            middle = {kind: statistics.median(values) for kind, values in rates.items()}
            print(
                f"{dtype:<10}{middle['base']:10.1f}{middle['adapters']:10.1f}{ratios['adapters']:8.2f}"
                f"{middle['one_adapter']:13.1f}{ratios['one_adapter']:8.2f}",
                flush=True,
            )
            rows.append({"dtype": dtype, "output_tokens_per_s": middle, "ratios": ratios})
    asked = {name: value for name, value in vars(arguments).items() if name != "json"}
    Result("adapters", {"target": TARGET, "rows": rows}, asked).write(arguments.json)
    raise SystemExit(any(row["ratios"]["adapters"] < TARGET for row in rows))


if __name__ == "__main__":
    main()
