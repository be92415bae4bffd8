"""Host time of steps for a GPU, and the idle time of a GPU of fixed speed that the real worker drives.

Needs no GPU. The executor's runner prepares, launches and collects steps, but the kernels are left out. The idle time
is measured on a simulated device, which computes each step for a fixed time, beside the host. Launching a step keeps
the host busy for a fixed time, too. A device that computes faster than the host launches is idle whatever the worker
does.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import LlamaConfig

from bench.gpu.models import build
from bench.result import Result, add_json_argument
from bench.tables import table
from executor.batch import DeviceBatch
from executor.cache.pool import KvPools
from executor.core import sampler
from executor.core.runner import Runner
from executor.core.timing import Clock, Span
from executor.models.cuda import CudaGraphRunner, GraphBuffers, GraphSize
from executor.models.llama import with_fallback
from executor.models.load import model_of
from executor.models.torch import TorchForward
from executor.step import NewSequence, Sampling, Step, StepOutput
from scheduler.core.loop import AHEAD_SECONDS, MOST_AHEAD
from tests.support.simulated_device import Timeline, TimelineEvent
from tests.support.worker_loop import WorkerLoop

BLOCK, CONTEXT, STEPS, WARM = 16, 1024, 200, 20
RANDOM = {"temperature": 0.8, "top_p": 0.95, "top_k": 50}
# Sampling parameters, decoding sequences, and tokens of a prompt in each step.
CASES: dict[str, tuple[dict[str, Any], int, int]] = {
    "1 decodes": ({}, 1, 0),
    "64 decode": ({}, 64, 0),
    "256 decode": ({}, 256, 0),
    "256 decode, top-k and top-p": (RANDOM, 256, 0),
    "63 decode beside 256 tokens": ({}, 63, 256),
    "255 decode beside 1,024 tokens": ({}, 255, 1024),
}
DEVICE_MS, LAUNCH_MS = (2.0, 5.0, 20.0), (0.5, 5.0)
# Host time of a step besides its launch, and time until the scheduler has answered an output with one more step.
PREPARE_MS, TURN_MS = 0.4, 1.0


class WithoutKernels(CudaGraphRunner):
    """Prepares steps, but launches no kernel."""

    def _run(self, buffers: GraphBuffers, batch: DeviceBatch, size: GraphSize) -> None:
        pass


def draw_nothing(_logits: Tensor, rows: Tensor, _parameters: Tensor) -> Tensor:
    """Takes the place of the kernel that draws tokens. rows: [R] int64. Returns [R] int64."""
    return torch.zeros_like(rows)


def make_runner() -> Runner:
    """A runner over a small model: what the host does depends on sequences and blocks only."""
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=8192,
    )
    module = build(config, torch.float32, "cpu")
    model = model_of(module, "small")
    # The probe needs kernels.
    fused = with_fallback(
        TorchForward(module),
        module,
        model.groups,
        lambda weights: CudaGraphRunner(weights, model.groups, model.max_positions),
        "fused decoder",
    )
    assert isinstance(fused, CudaGraphRunner)
    fused.__class__ = WithoutKernels
    blocks = -(-(CONTEXT + STEPS + WARM) // BLOCK) * 256 + -(-(CONTEXT + STEPS) // BLOCK)
    return Runner(replace(model, forward=fused), KvPools(model.groups, blocks, BLOCK, torch.float32, model.device))


def step_seconds(runner: Runner, case: tuple[dict[str, Any], int, int]) -> list[float]:
    """Host seconds of each step of a case."""
    parameters, decodes, prompt = case
    runner.clear()
    slots = itertools.count(1)

    def joining(handle: int, known: int, computed: int) -> NewSequence:
        tokens = tuple((7 * handle + place) % 32000 for place in range(known))
        blocks = tuple(itertools.islice(slots, -(-(known + STEPS + WARM) // BLOCK)))
        return NewSequence(handle, tokens, known, computed, (blocks,), Sampling(seed=handle, **parameters))

    new: tuple[NewSequence, ...] = tuple(joining(handle, CONTEXT, CONTEXT - 1) for handle in range(decodes))
    # A slot of the pool may be written again: nothing reads what a prompt has stored.
    prompts = joining(1 << 20, prompt, 0) if prompt else None
    seconds = []
    for turn in range(WARM + STEPS):
        changes: dict[str, Any] = {"new_sequences": new}
        if prompts is not None:
            last = prompts
            prompts = replace(prompts, sequence=prompts.sequence + 1)
            changes = {
                "new_sequences": (*new, prompts),
                "removed": (last.sequence,) if turn else (),
                "chunks": {prompts.sequence: prompt},
            }
        step, new = Step(runner.last_step + 1, **changes), ()
        begin = time.perf_counter()
        runner.launch(runner.prepare(step)).result()
        seconds.append(time.perf_counter() - begin)
    return seconds[WARM:]


def spin(seconds: float) -> None:
    """Keeps the host busy."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


@dataclass(frozen=True)
class TimedStep:
    """A step on the simulated device."""

    number: int
    span: Span

    num_tokens = 1

    @property
    def is_over(self) -> bool:
        return self.span.is_over

    def result(self) -> StepOutput:
        """Waits for the device."""
        return StepOutput(self.number, (), 1, *self.span.seconds())


class TimedRunner:
    """Takes the place of a Runner on a simulated device: steps take a time of the host and a time of the device."""

    overlaps = True
    tiers = SimpleNamespace(busy=False, drain=lambda _: None)

    def __init__(self, timeline: Timeline, device_seconds: float, launch_seconds: float) -> None:
        self.model = SimpleNamespace(device=SimpleNamespace(type="simulated"))
        self.last_step = 0
        self._timeline = timeline
        self._device_seconds = device_seconds
        self._launch_seconds = launch_seconds
        self._clock = Clock(torch.device("cuda"))

    def prepare(self, step: Step) -> tuple[Step, Span]:
        span = self._clock.start()
        spin(PREPARE_MS / 1e3)
        return step, span

    def launch(self, prepared: tuple[Step, Span]) -> TimedStep:
        step, span = prepared
        span.begin()
        # The device computes the first kernel while the host launches the others.
        self._timeline.compute(self._device_seconds)
        spin(self._launch_seconds)
        span.end()
        self.last_step = step.number
        return TimedStep(step.number, span)

    def clear(self) -> None:
        self._clock.clear()


def idle_share(device_seconds: float, launch_seconds: float) -> float:
    """The share of time that a simulated device is idle, with as many steps in flight as the scheduler sends."""
    in_flight = 1 + min(MOST_AHEAD, math.ceil(AHEAD_SECONDS / device_seconds))
    timeline = Timeline(time.perf_counter, time.sleep)
    event: Callable[..., TimelineEvent] = lambda *, enable_timing: TimelineEvent(timeline)  # noqa: E731
    with patch.object(torch.cuda, "Event", event):
        runner = cast(Runner, cast(Any, TimedRunner(timeline, device_seconds, launch_seconds)))
        outputs = WorkerLoop(runner, TURN_MS / 1e3, in_flight).run(WARM + STEPS)[WARM:]
    return sum(one.idle_time for one in outputs) / sum(one.compute_time + one.idle_time for one in outputs)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench host-cost", description=__doc__)
    add_json_argument(parser)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    runner = make_runner()
    figures: dict[str, Any] = {"host_ms": {}, "idle_percent": {}}
    with patch.object(sampler, "draw_tokens", draw_nothing):
        for name, case in CASES.items():
            figures["host_ms"][name] = 1e3 * statistics.median(step_seconds(runner, case))
    print(table(("step", "host ms"), [(name, f"{value:.2f}") for name, value in figures["host_ms"].items()]))
    rows = []
    for launch in LAUNCH_MS:
        for device in DEVICE_MS:
            share = 100 * idle_share(device / 1e3, launch / 1e3)
            figures["idle_percent"][f"{device:g} ms, launched in {launch:g} ms"] = share
            rows.append((f"{device:g}", f"{launch:g}", f"{share:.2f}"))
    print(table(("device ms", "launch ms", "idle %"), rows))
    result = Result("host_cost", {"steps": STEPS, "context": CONTEXT}, figures)
    print(f"\nFigures are in {result.write(options.json)}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
