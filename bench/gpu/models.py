"""Whole models on a CUDA device, in this process: correctness, steps of an 8B model, and a load of requests."""

from __future__ import annotations

import gc
import inspect
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, PretrainedConfig, Qwen2Config

from bench.gpu.parts import Bench, CannotRunError, Figure, WrongError, note
from bench.workloads import chosen
from executor.batch import DeviceBatch
from executor.cache.pool import KvPools
from executor.cache.tiers.files import FileSettings
from executor.cache.tiers.tiers import open_tiers
from executor.core.runner import LaunchedStep, Runner
from executor.models.attention import NAME
from executor.models.cuda import CudaGraphRunner, GraphBuffers, GraphSize
from executor.models.forward import Forward, Model
from executor.models.llama import probe, with_fallback
from executor.models.load import model_of
from executor.models.torch import TorchForward
from executor.step import Copy, NewSequence, Step, Tier
from tests.support.reference import first_mismatch, greedy
from tests.support.worker_loop import WorkerLoop

_NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_SMALL = {
    **_NO_TOKENS,
    "vocab_size": 2048,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
}
SMALL = {
    "Llama": LlamaConfig(**_SMALL),
    "Qwen2 with windows": Qwen2Config(**_SMALL, use_sliding_window=True, sliding_window=50, max_window_layers=2),
}
# Llama 3 8B.
LARGE = LlamaConfig(
    **_NO_TOKENS,
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=8192,
    rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
)
PROMPTS, OUTPUT = (1, 3, 16, 45, 100, 171), 24
BLOCK = 16
BATCHES, CONTEXT, STEPS, WARM = (1, 64, 256), 1024, 60, 10
(W1,) = chosen(["W1"])
# Blocks that are copied between tiers: 2 GB.
TRANSFERRED = 1000
# Tokens of a step with prompts.
BUDGET = 2048


class WithoutGraphs(CudaGraphRunner):
    """Launches every step piece by piece."""

    def _run(self, buffers: GraphBuffers, batch: DeviceBatch, size: GraphSize) -> None:
        self._launch(buffers, batch, size)


Fused = TypeVar("Fused", bound=CudaGraphRunner)
KINDS: dict[str, type[CudaGraphRunner]] = {"graphs": CudaGraphRunner, "no graphs": WithoutGraphs}
# The error in bfloat16 may be at most this multiple of the error of transformers.
ROUNDING = 1.5


def build(config: PretrainedConfig, dtype: torch.dtype, device: str) -> Any:
    """A model with random weights."""
    torch.manual_seed(1)
    with torch.device(device):
        module = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=NAME)
    return module.eval().requires_grad_(False)


def check(_: Bench) -> Sequence[Figure]:
    """Raises WrongError unless every runner gives generate()'s tokens, and bfloat16 is as close as torch's."""
    for name, config in SMALL.items():
        check_on("cuda", name, config)
    return []


def check_on(device: str, name: str, config: PretrainedConfig) -> None:
    """The same check for one model, on any device."""
    exact, rounded = (build(config, dtype, device) for dtype in (torch.float32, torch.bfloat16))
    for parameter in exact.parameters():
        if parameter.dim() > 1:
            # Large enough that outputs vary.
            parameter.normal_(0, 0.2)
    rounded.load_state_dict(exact.state_dict())
    model = model_of(exact, name)
    if device == "cuda" and not isinstance(model.forward, CudaGraphRunner):
        raise WrongError(f"{name} runs on torch; the log says why")
    groups, vocabulary = model.groups, model.vocab_size
    ways = {way: fused(kind, exact, model) for way, kind in KINDS.items()}
    rng = random.Random(5)
    prompts = [[rng.randrange(vocabulary) for _ in range(length)] for length in PROMPTS]
    exact.set_attn_implementation("sdpa")
    expected = [greedy(exact, prompt, OUTPUT) for prompt in prompts]
    exact.set_attn_implementation(NAME)
    wrong = []
    for way, forward in {**ways, "torch": TorchForward(exact)}.items():
        pools = KvPools(groups, 100, BLOCK, torch.float32, model.device)
        outputs, _ = run_requests(Runner(replace(model, forward=forward), pools), prompts, OUTPUT, 64)
        found = [first_mismatch(*pair) for pair in zip(expected, outputs, strict=True)]
        bad = [mismatch for mismatch in found if mismatch is not None and not mismatch.is_tie]
        note(f"  {name}, {way}: {found.count(None)} of {len(found)} outputs are those of generate()")
        wrong += [f"{name}, {way}: another token at {one.position}, margin {one.margin:.2g}" for one in bad]
    truth = probe(TorchForward(exact), groups, vocabulary, torch.float32, model.device)

    def error(forward: Forward) -> float:
        logits = probe(forward, groups, vocabulary, torch.bfloat16, model.device)
        return float((logits - truth).norm() / truth.norm())

    usual = error(TorchForward(rounded))
    for way, kind in KINDS.items():
        off = error(fused(kind, rounded, model))
        note(f"  {name}, {way}, bfloat16: logits off by {off:.1e}; through transformers' modules by {usual:.1e}")
        if not off < ROUNDING * usual:
            wrong.append(f"{name}, {way}: bfloat16 is off by {off:.1e}")
    if wrong:
        raise WrongError("; ".join(wrong))


def fused(kind: type[Fused], module: Any, model: Model) -> Fused:
    """The fused forward pass of a model. Raises WrongError if the probe refuses the model."""
    groups, positions = model.groups, model.max_positions
    forward = with_fallback(
        TorchForward(module), module, groups, lambda weights: kind(weights, groups, positions), "decoder"
    )
    if not isinstance(forward, kind):
        raise WrongError(f"{model.name}: the probe refuses {kind.__name__}; the log says why")
    return forward


class Loop:
    """Sends each step before the outcome of the previous step is known, as the scheduler does."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._pending: LaunchedStep | None = None
        self.outcomes: list[Any] = []

    def step(self, **changes: Any) -> None:
        """Launches a step, then waits for the step before."""
        launched = self._runner.launch(self._runner.prepare(Step(self._runner.last_step + 1, **changes)))
        self.finish()
        self._pending = launched
        if not self._runner.overlaps:
            self.finish()

    def finish(self) -> None:
        """Waits for the last step."""
        if self._pending is not None:
            self.outcomes.append(self._pending.result())
            self._pending = None


def run_requests(
    runner: Runner, prompts: Sequence[Sequence[int]], count: int, budget: int
) -> tuple[list[list[int]], float]:
    """Runs requests that come at once, at most `budget` tokens per step; returns greedy outputs and the time of all."""
    runner.clear()
    joining, first = [], 1
    for number, prompt in enumerate(prompts):
        blocks = -(-(len(prompt) + count) // runner.pools.block_size)
        tables = (tuple(range(first, first + blocks)),) * len(runner.pools.pools)
        joining.append(NewSequence(number, tuple(prompt), len(prompt), 0, tables))
        first += blocks
    left, launched = [len(prompt) for prompt in prompts], [0] * len(prompts)
    loop, begin, gone = Loop(runner), time.perf_counter(), 0
    while gone < len(prompts):
        # No output ends early, so the next step is known without the outcomes.
        removed = tuple(i for i, made in enumerate(launched) if made == count)
        for i in removed:
            launched[i] = -1
        gone += len(removed)
        free = budget - sum(1 for i, made in enumerate(launched) if made > 0)
        chunks = {}
        for i in (i for i, tokens in enumerate(left) if tokens):
            # A sequence with one token left computes it without a chunk.
            chunks[i] = min(left[i], max(free, 1 if left[i] == 1 else 0))
            free -= chunks[i]
        chunks = {i: tokens for i, tokens in chunks.items() if tokens}
        loop.step(removed=removed, new_sequences=tuple(joining), chunks=chunks)
        joining = []
        for i, tokens in chunks.items():
            left[i] -= tokens
        for i, tokens in enumerate(left):
            launched[i] += not tokens and launched[i] >= 0
    loop.finish()
    seconds = time.perf_counter() - begin
    outputs: list[list[int]] = [[] for _ in prompts]
    for outcome in loop.outcomes:
        for sampled in outcome.sampled:
            outputs[sampled.sequence].append(sampled.token_id)
    return outputs, seconds


@dataclass
class Large:
    """The 8B model, and a runner over pools for as many sequences as fit."""

    module: Any
    runner: Runner | None
    sequences: int

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that a step reads; of the embedding a step reads only a few rows."""
        embedding = self.module.get_input_embeddings().weight
        return sum(one.nbytes for one in self.module.parameters() if one is not embedding)

    @classmethod
    def make(cls) -> Large:
        """Raises CannotRunError without enough memory, WrongError if the model runs on torch."""
        free = torch.cuda.mem_get_info()[0]
        if free < 20e9:
            raise CannotRunError(f"an 8B model takes 20 GB of device memory, {free / 1e9:.1f} are free")
        module = build(LARGE, torch.bfloat16, "cuda")
        model = model_of(module, "8B")
        if not isinstance(model.forward, CudaGraphRunner):
            raise WrongError("the 8B model runs on torch; the log says why")
        torch.cuda.empty_cache()
        blocks = -(-(CONTEXT + STEPS + WARM) // BLOCK)
        token_bytes = 2 * LARGE.num_hidden_layers * LARGE.num_key_value_heads * LARGE.head_dim * 2
        free = int(0.9 * torch.cuda.mem_get_info()[0]) // (blocks * BLOCK * token_bytes)
        sequences = max((batch for batch in BATCHES if batch <= free), default=0)
        if not sequences:
            raise CannotRunError("there is no memory for K and V beside the 8B model")
        pools = KvPools(model.groups, sequences * blocks, BLOCK, torch.bfloat16, model.device)
        for pool in pools.pools:
            pool.k.normal_()
            pool.v.normal_()
        return cls(module, Runner(model, pools), sequences)


def decode_steps(bench: Bench) -> Sequence[Figure]:
    """Time of a step of 1, 64 and 256 sequences of 1,024 tokens, compared with the shortest time that reading takes."""
    if "8B" not in bench.kept:
        bench.kept["8B"] = Large.make()
    large: Large = bench.kept["8B"]
    assert large.runner is not None
    begin = time.perf_counter()
    large.runner.warmup()
    figures = [Figure("8B, capturing the graphs of all sizes", time.perf_counter() - begin, "s")]
    token_bytes = sum(pool.block_bytes for pool in large.runner.pools.pools) / BLOCK
    for batch in BATCHES:
        if batch > large.sequences:
            note(f"  no memory for {batch} sequences")
            continue
        outcomes = _decode(large.runner, batch)
        seconds = statistics.median(one.compute_time + one.idle_time for one in outcomes)
        idle = sum(one.idle_time for one in outcomes) / sum(one.compute_time + one.idle_time for one in outcomes)
        length = CONTEXT + WARM + len(outcomes) / 2
        least = (large.weight_bytes + batch * length * token_bytes) / (bench.value("copy bandwidth") * 1e9)
        name = f"8B decode, batch {batch}"
        figures += [
            Figure(f"{name}: step", seconds * 1e3, "ms"),
            Figure(f"{name}: step by reading weights, K and V", seconds / least, at_most=1.25),
            Figure(f"{name}: idle", 100 * idle, "%", at_most=3),
        ]
    return figures


def _decoding(runner: Runner, batch: int) -> tuple[NewSequence, ...]:
    """`batch` sequences of CONTEXT tokens, of which all but one are cached."""
    rng, groups = random.Random(batch), len(runner.pools.pools)
    each = -(-(CONTEXT + STEPS + WARM) // BLOCK)
    return tuple(
        NewSequence(
            number,
            tuple(rng.randrange(runner.model.vocab_size) for _ in range(CONTEXT)),
            CONTEXT,
            CONTEXT - 1,
            (tuple(range(1 + number * each, 1 + (number + 1) * each)),) * groups,
        )
        for number in range(batch)
    )


def _decode(runner: Runner, batch: int) -> list[Any]:
    """Outcomes of steps of `batch` sequences, without the warm-up steps."""
    runner.clear()
    joining = _decoding(runner, batch)
    loop = Loop(runner)
    for _ in range(WARM + STEPS):
        loop.step(new_sequences=joining)
        joining = ()
    loop.finish()
    return loop.outcomes[WARM:]


def mixed_steps(bench: Bench) -> Sequence[Figure]:
    """A step of 63 decodes and a chunk of a prompt, divided by the time of two separate steps."""
    large: Large = bench.kept["8B"]
    assert large.runner is not None
    runner, figures = large.runner, []
    if large.sequences < 64:
        raise CannotRunError("there is no memory for 64 sequences")
    for chunk in (256, 1024):
        times = {}
        for name, decodes, tokens in (("decodes", 63, 0), ("chunk", 0, chunk), ("both", 63, chunk)):
            seconds = [_step_seconds(runner, decodes, tokens) for _ in range(5)]
            times[name] = statistics.median(seconds[1:])
        name = f"8B, 63 decodes and {chunk:,} tokens of a prompt"
        figures += [
            Figure(f"{name}: step", times["both"] * 1e3, "ms"),
            Figure(f"{name}: by both alone", times["both"] / (times["decodes"] + times["chunk"]), at_most=1.15),
        ]
    return figures


def _step_seconds(runner: Runner, decodes: int, chunk: int) -> float:
    """Time of a step of sequences that decode after CONTEXT tokens, and of the first tokens of one more prompt."""
    runner.clear()
    joining = _decoding(runner, decodes + 1)
    runner.launch(runner.prepare(Step(runner.last_step + 1, new_sequences=joining[:-1]))).result()
    prompt = replace(joining[-1], num_computed_tokens=0)
    changes = {"new_sequences": (prompt,), "chunks": {prompt.sequence: chunk}} if chunk else {}
    return runner.launch(runner.prepare(Step(runner.last_step + 1, **changes))).result().compute_time


def through_the_worker(bench: Bench) -> Sequence[Figure]:
    """Decoding of 64 sequences through the executor's own thread, with at most two steps in flight."""
    large: Large = bench.kept["8B"]
    assert large.runner is not None
    batch = min(64, large.sequences)
    outputs = WorkerLoop(large.runner).run(WARM + STEPS, new_sequences=_decoding(large.runner, batch))[WARM:]
    idle = sum(one.idle_time for one in outputs) / sum(one.compute_time + one.idle_time for one in outputs)
    return [Figure(f"8B decode through the worker, batch {batch}: idle", 100 * idle, "%", at_most=3)]


def transfers(bench: Bench) -> Sequence[Figure]:
    """Speed of moving blocks of the 8B model to the host tier and back, compared with copies of pinned memory."""
    large: Large = bench.kept["8B"]
    assert large.runner is not None
    pools = large.runner.pools
    size = pools.pools[0].block_bytes
    count = min(TRANSFERRED, pools.pools[0].num_blocks)
    host = torch.empty(count * size, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(host, device="cuda")
    rates = {}
    for name, into, data in (("to the device", device, host), ("to the host", host, device)):
        rates[name] = count * size / min(_seconds(partial(into.copy_, data)) for _ in range(4))
    del host, device
    figures = [Figure(f"copy of pinned memory {name}", rate / 1e9, "GB/s") for name, rate in rates.items()]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        none = FileSettings(Path(folder), 0, "", "")
        memory = FileSettings(Path(folder), int((count + 8) * (size + 4096)), "", "", in_memory=True)
        for checksums in (True, False):
            tiers = open_tiers(pools, bytes(32), f"bench-{checksums}", host=memory, disk=none, checksums=checksums)
            for name, tier, source in (
                ("to the host", Tier.HOST, Tier.DEVICE),
                ("to the device", Tier.DEVICE, Tier.HOST),
            ):
                copies = [Copy(1 + slot, 0, 1 + slot, 1 + slot, source, tier) for slot in range(count)]
                failed: list[Copy] = []
                begin = time.perf_counter()
                tiers.begin(copies, lambda copy, good, failed=failed: None if good else failed.append(copy))
                tiers.drain(60)
                seconds = time.perf_counter() - begin
                if failed:
                    raise WrongError(f"{len(failed)} copies {name} failed")
                share = 100 * count * size / seconds / rates[name]
                with_or_not = "with checksums" if checksums else "without checksums"
                least = 80 if tier is Tier.DEVICE else None
                figures.append(Figure(f"blocks {name}, {with_or_not}, of pinned copies", share, "%", at_least=least))
            tiers.close()
    return figures


def _seconds(call: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def _prompts(variant: int, vocabulary: int) -> list[list[int]]:
    """Random token ids with the lengths of W1."""
    rng = random.Random(variant)
    return [[rng.randrange(vocabulary) for _ in range(length)] for length in W1.prompt_tokens]


def throughput(bench: Bench) -> Sequence[Figure]:
    """Output tokens per second of 32 requests that come at once; the better of two runs, after one to warm up."""
    large: Large = bench.kept["8B"]
    runner = large.runner
    assert runner is not None
    if sum(-(-(length + W1.output_tokens) // BLOCK) for length in W1.prompt_tokens) > runner.pools.pools[0].num_blocks:
        raise CannotRunError("there is no memory for its K and V")
    seconds = []
    for variant in range(3):
        prompts = _prompts(variant, runner.model.vocab_size)
        outputs, took = run_requests(runner, prompts, W1.output_tokens, BUDGET)
        if lengths := {len(output) for output in outputs} - {W1.output_tokens}:
            raise WrongError(f"the runner made outputs of {sorted(lengths)} tokens instead of {W1.output_tokens}")
        seconds.append(took)
    return [Figure("W1 on the 8B model", W1.requests * W1.output_tokens / min(seconds[1:]), "output tokens/s")]


def beside_transformers(bench: Bench) -> Sequence[Figure]:
    """The same load through transformers' continuous batching, with the settings that it chooses."""
    large: Large = bench.kept["8B"]
    # The pools of transformers take all free memory.
    large.runner = None
    gc.collect()
    torch.cuda.empty_cache()
    large.module.set_attn_implementation("sdpa")
    count = W1.output_tokens
    generation = GenerationConfig(max_new_tokens=count, do_sample=False, eos_token_id=-1, pad_token_id=0)
    options: dict[str, Any] = {"generation_config": generation, "progress_bar": False}
    if "persistent_manager" in inspect.signature(large.module.generate_batch).parameters:
        # Otherwise every call would capture its graphs again.
        options["persistent_manager"] = True
    seconds = []
    for variant in range(3):
        prompts = _prompts(variant, LARGE.vocab_size)
        begin = time.perf_counter()
        results = large.module.generate_batch(inputs=prompts, **options)
        seconds.append(time.perf_counter() - begin)
        lengths = {len(one.generated_tokens) for one in results.values()}
        if lengths != {count} or len(results) != len(prompts):
            raise WrongError(f"generate_batch made outputs of {sorted(lengths)} tokens instead of {count}")
    rate = W1.requests * count / min(seconds[1:])
    return [
        Figure("W1 through generate_batch", rate, "output tokens/s"),
        Figure("W1, speed by generate_batch's", bench.value("W1 on the 8B model") / rate, at_least=3),
    ]
