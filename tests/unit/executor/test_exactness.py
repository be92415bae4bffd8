"""Greedy output of the runner equals transformers' generate(), token for token, for every architecture."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from executor.models.cuda import CudaGraphRunner
from executor.models.forward import Model
from executor.models.llama import FAMILIES
from tests.support.reference import first_mismatch, greedy
from tests.unit.executor.conftest import Driver, load, load_fused
from tests.unit.executor.tiny_models import COMPILED_CONFIGS, CONFIGS, VOCAB

LENGTHS = (1, 3, 8, 17, 30, 41)
OUTPUT = 24


def _prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(VOCAB, (length,), generator=generator).tolist() for length in LENGTHS]


def _run_all(driver: Driver, prompts: list[list[int]], chunk: int) -> list[list[int]]:
    """All sequences in one running set: each joins two steps after the one before and leaves when it is done."""
    left = [len(prompt) for prompt in prompts]
    outputs: list[list[int]] = [[] for _ in prompts]
    done: set[int] = set()
    clock = 0
    while len(done) < len(prompts):
        ended = tuple(i for i, output in enumerate(outputs) if len(output) == OUTPUT and i not in done)
        done.update(ended)
        joining = tuple(driver.new_sequence(i, prompts[i], room=OUTPUT) for i in range(len(prompts)) if clock == 2 * i)
        live = [i for i in range(len(prompts)) if 2 * i <= clock and i not in done]
        # Every third step another sequence sits out.
        idle = {i for i in live if left[i] <= 0 and (clock + i) % 7 == 0}
        chunks = {i: min(chunk + i % 2, left[i]) for i in live if left[i] > 0}
        outcome = driver.step(removed=ended, new_sequences=joining, chunks=chunks, idle=frozenset(idle))
        for i, count in chunks.items():
            left[i] -= count
        for sampled in outcome.sampled:
            outputs[sampled.sequence].append(sampled.token_id)
        clock += 1
    return outputs


NAMES = sorted(CONFIGS | COMPILED_CONFIGS)


@pytest.mark.parametrize("name", NAMES)
def test_greedy_output_equals_generate(name: str, model_folder: Callable[[str], Path]) -> None:
    _check(name, model_folder(name), load(model_folder(name)))


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith(FAMILIES)])
def test_greedy_output_of_fused_layers_equals_generate(name: str, model_folder: Callable[[str], Path]) -> None:
    model = load_fused(model_folder(name))
    assert isinstance(model.forward, CudaGraphRunner)
    _check(name, model_folder(name), model)


def _check(name: str, folder: Path, model: Model) -> None:
    prompts = _prompts()
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    expected = [greedy(reference, prompt, OUTPUT) for prompt in prompts]
    outputs = _run_all(Driver(model), prompts, chunk=5)
    mismatches = {i: first_mismatch(*pair) for i, pair in enumerate(zip(expected, outputs, strict=True))}
    found = {i: mismatch for i, mismatch in mismatches.items() if mismatch is not None}
    for i, mismatch in found.items():
        print(f"{name}: prompt {i} leaves its reference at {mismatch}")
    assert not [mismatch for mismatch in found.values() if not mismatch.is_tie]
    assert len(found) <= 1, "ties are rare"
    assert len({token for output in outputs for token in output}) > 10, "the outputs must vary to prove anything"


@pytest.mark.parametrize(
    ("name", "windows"),
    [("llama", {None}), ("mistral", {9}), ("gemma2", {9, None}), ("gemma3", {9, None}), ("gpt_oss", {9, None})],
)
def test_layers_are_grouped_by_window(name: str, windows: set[int | None], model_folder: Callable[[str], Path]) -> None:
    groups = load(model_folder(name)).groups
    assert {group.shape.window for group in groups} == windows
    assert len(groups) == len(windows)
    assert sorted(layer for group in groups for layer in group.layers) == list(
        range(sum(len(group.layers) for group in groups))
    )
