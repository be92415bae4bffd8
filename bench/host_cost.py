"""Host time of steps for a GPU, and the idle time of a GPU of fixed speed that the real worker drives.

Needs no GPU. The executor's runner prepares, launches and collects steps on tensors of the CPU, without the kernels.
The idle time is measured on a simulated device, which computes each step for a fixed time, beside the host. Launching
a step keeps the host busy for a fixed time, too. A device that computes faster than the host launches is idle
whatever the worker does.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import LlamaConfig

from bench.gpu.models import SMALL, build, fused
from bench.result import Result, add_json_argument
from bench.tables import table
from executor.batch import DeviceBatch
from executor.cache.pool import KvPools
from executor.core import sampler
from executor.core.runner import Runner
from executor.models.cuda import CudaGraphRunner, GraphBuffers, GraphSize
from executor.models.load import model_of
from executor.step import NewSequence, Sampling, Step, StepOutput
from scheduler.core.loop import AHEAD_SECONDS, MOST_AHEAD
from tests.support.simulated_device import SimulatedRunner, SimulatedStep, Timeline, TimelineEvent
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
    """Prepares steps, but launches no kernel once the model has been probed."""

    probed = False

    def _run(self, buffers: GraphBuffers, batch: DeviceBatch, size: GraphSize) -> None:
        if not self.probed:
            super()._run(buffers, batch, size)


def draw_nothing(_logits: Tensor, rows: Tensor, _parameters: Tensor) -> Tensor:
    """Takes the place of the kernel that draws tokens. rows: [R] int64. Returns [R] int64."""
    return torch.zeros_like(rows)


def make_runner() -> Runner:
    """A runner over a small model: what the host does depends on sequences and blocks only."""
    config = LlamaConfig.from_dict(SMALL["Llama"].to_dict() | {"num_hidden_layers": 1, "max_position_embeddings": 8192})
    module = build(config, torch.float32, "cpu")
    model = model_of(module, "small")
    forward = fused(WithoutKernels, module, model)
    forward.probed = True
    blocks = -(-(CONTEXT + STEPS + WARM) // BLOCK) * 256 + -(-(CONTEXT + STEPS) // BLOCK)
    return Runner(replace(model, forward=forward), KvPools(model.groups, blocks, BLOCK, torch.float32, model.device))


def step_seconds(runner: Runner, case: tuple[dict[str, Any], int, int]) -> list[float]:
    """Host seconds of each step of a case."""
    parameters, decodes, prompt = case
    runner.clear()
    slots = itertools.count(1)

    def joining(handle: int, known: int, computed: int) -> NewSequence:
        tokens = tuple((7 * handle + place) % runner.model.vocab_size for place in range(known))
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


class TimedStep(SimulatedStep):
    """A step on the simulated device. over: reached when the device has computed the step."""

    def __init__(self, number: int, over: TimelineEvent) -> None:
        super().__init__(number)
        self._over = over

    @property
    def is_over(self) -> bool:
        return self._over.query()

    def result(self) -> StepOutput:
        """Waits for the device."""
        self._over.synchronize()
        return StepOutput(self.number, (), 1, 0.0, 0.0)


class TimedRunner(SimulatedRunner):
    """Takes the place of a Runner on a simulated device: steps take a time of the host and a time of the device."""

    def __init__(self, timeline: Timeline, device_seconds: float, launch_seconds: float) -> None:
        super().__init__(WARM + STEPS)
        self._timeline = timeline
        self._device_seconds = device_seconds
        self._launch_seconds = launch_seconds

    def prepare(self, step: Step) -> Step:
        spin(PREPARE_MS / 1e3)
        return step

    def launch(self, step: Step) -> SimulatedStep:
        # The device computes the first kernel while the host launches the others.
        self._timeline.compute(self._device_seconds)
        spin(self._launch_seconds)
        over = TimelineEvent(self._timeline)
        over.record()
        self.last_step = step.number
        return TimedStep(step.number, over)


def idle_share(device_seconds: float, launch_seconds: float) -> float:
    """The share of time that a simulated device is idle, with as many steps in flight as the scheduler sends."""
    in_flight = 1 + min(MOST_AHEAD, math.ceil(AHEAD_SECONDS / device_seconds))
    timeline = Timeline(time.perf_counter, time.sleep)
    runner = cast(Runner, cast(Any, TimedRunner(timeline, device_seconds, launch_seconds)))
    WorkerLoop(runner, TURN_MS / 1e3, in_flight).run(WARM + STEPS)
    idle = sum(timeline.idle[WARM:])
    return idle / (idle + STEPS * device_seconds)


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
    result = Result("host_cost", figures, {"steps": STEPS, "context": CONTEXT})
    print(f"\nFigures are in {result.write(options.json)}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
