"""Tiny models with random weights, saved once per run, and a driver that plays the scheduler's part."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from executor.cache.pool import KvPools
from executor.cache.shares import Shares
from executor.cache.tiers.tiers import Tiers
from executor.core.draft_model import Draft, DraftModel
from executor.core.drafts import Decodes, DraftCosts, Drafter
from executor.core.grammars import Grammars
from executor.core.runner import Runner
from executor.models.attention import NAME
from executor.models.calibration import calibrate
from executor.models.cuda import CudaGraphRunner
from executor.models.files import ModelFiles, find
from executor.models.forward import Forward, Model
from executor.models.llama import with_fallback
from executor.models.load import load_model
from executor.models.tokenizer import TokenizerFiles
from executor.models.torch import TorchForward
from executor.step import Copy, NewSequence, SampledToken, Sampling, Step, StepOutput
from tests.kernels.conftest import interpreter
from tests.stack import model_cache
from tests.unit.executor.tiny_models import COMPILED_CONFIGS, CONFIGS

__all__ = ["interpreter"]

BLOCK_SIZE = 4
GREEDY = Sampling()


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    # Tiny models lose more to waking threads than they win.
    torch.set_num_threads(1)


def save_model(config: PretrainedConfig, folder: Path, seed: int = 1) -> Path:
    """Random weights, large enough that greedy outputs vary."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 or "sinks" in name or "bias" in name:
                parameter.normal_(0, 0.2)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a tiny model by its name in CONFIGS."""
    folders: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in folders:
            folders[name] = save_model((CONFIGS | COMPILED_CONFIGS)[name](), tmp_path_factory.mktemp("models") / name)
        return folders[name]

    return folder


def load(folder: Path) -> Model:
    """The model as the executor loads it."""
    files = find(str(folder), folder)
    return load_model(files, torch.device("cpu"), "float32", compiled_folder=model_cache() / "compiled")


def on_torch(folder: Path) -> Model:
    """The model as the executor runs it if it has no faster decoder."""
    return load_model(find(str(folder), folder), torch.device("cpu"), "float32")


def load_fused(folder: Path) -> Model:
    """The model as the executor loads it on a CUDA device, but for the graphs."""
    model = on_torch(folder)
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=NAME)
    return replace(model, forward=fused(TorchForward(module.eval()), module, model))


def fused(forward: Forward, module: Any, model: Model, kind: type[CudaGraphRunner] = CudaGraphRunner) -> Forward:
    """The fused layers of a model if its probe allows them, else `forward`."""
    groups, positions = model.groups, model.max_positions
    return with_fallback(forward, module, groups, lambda weights: kind(weights, groups, positions), "fused decoder")


# Every path that may serve a Llama: the compiled decoder, torch, and the fused layers of a CUDA device.
PATHS: dict[str, Callable[[Path], Model]] = {"compiled": load, "torch": on_torch, "fused": load_fused}


@pytest.fixture(scope="session")
def tiny(model_folder: Callable[[str], Path]) -> Model:
    """A tiny Llama."""
    return load(model_folder("llama"))


@pytest.fixture
def driver(tiny: Model) -> "Driver":
    """A runner over a tiny Llama, with separate block tables."""
    return Driver(tiny)


def num_accepted(outputs: Iterable[StepOutput]) -> int:
    """Counts drafts that were accepted: each made a sequence sample one more token."""
    return sum(len(output.sampled) - len({token.sequence for token in output.sampled}) for output in outputs)


class FreeDrafts(DraftCosts):
    """Every draft is worth its computation."""

    def least_chance(self, decodes: Decodes) -> float:
        return 0.1


@dataclass
class Driver:
    """Hands out blocks and builds steps, as scheduler and cache manager do together."""

    model: Model
    num_blocks: int | Shares = 200
    block_size: int = BLOCK_SIZE
    cache: torch.dtype = torch.float32
    tiers: Callable[[KvPools], Tiers] = Tiers
    copy_ended: Callable[[Copy, bool], object] = lambda _copy, _good: None
    drafter: Drafter | None = None
    draft: Model | None = None
    grammars: Grammars | None = None
    runner: Runner = field(init=False)
    lengths: dict[int, int] = field(default_factory=dict)
    tables: dict[int, list[list[int]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        groups = self.model.groups
        scales = calibrate(self.model, TokenizerFiles(), self.cache)
        beside = {}
        if self.draft is not None:
            draft = Draft.of(ModelFiles("", ""), self.draft, TokenizerFiles(), self.model, TokenizerFiles())
            own = KvPools(self.draft.groups, self.num_blocks, self.block_size, torch.float32, torch.device("cpu"))
            ahead = DraftModel(draft, own)
            beside, self.drafter = ahead.beside, Drafter(6, costs=FreeDrafts, model=ahead)
        pools = KvPools(groups, self.num_blocks, self.block_size, self.cache, torch.device("cpu"), scales, beside)
        for pool in pools.pools:
            # Bytes that were never written must not matter.
            for cache in pool.caches:
                cache[:, 1:].fill_(torch.nan if cache.is_floating_point() else 127)
        self.runner = Runner(self.model, pools, self.tiers(pools), self.copy_ended, self.drafter, self.grammars)
        # Out of order, so that slot and position differ.
        self.free = [[1 + (slot * 77) % slots for slot in range(slots)] for slots in pools.shares.slots]

    def blocks(self, tokens: int) -> tuple[tuple[int, ...], ...]:
        """Fresh slots for that many tokens, per group."""
        count = -(-tokens // self.block_size)
        return tuple(tuple(free.pop() for _ in range(count)) for free in self.free)

    def new_sequence(
        self,
        sequence: int,
        tokens: list[int],
        sampling: Sampling = GREEDY,
        *,
        prompt: int | None = None,
        room: int = 64,
    ) -> NewSequence:
        """A new sequence with blocks for itself and `room` more tokens."""
        return NewSequence(sequence, tuple(tokens), prompt or len(tokens), 0, self.blocks(len(tokens) + room), sampling)

    def step(self, **changes: object) -> StepOutput:
        """Runs the next step."""
        return self.run(Step(self.runner.last_step + 1, **changes))  # type: ignore[arg-type]

    def run(self, step: Step) -> StepOutput:
        """Runs a step to its end."""
        return self.runner.launch(self.runner.prepare(step)).result()

    def generate(
        self, sequence: int, tokens: list[int], count: int, sampling: Sampling = GREEDY, chunk: int = 1000
    ) -> list[SampledToken]:
        """Runs one sequence alone, from joining to leaving."""
        left, sampled = len(tokens), []
        new: tuple[NewSequence, ...] = (self.new_sequence(sequence, tokens, sampling, room=count),)
        while len(sampled) < count:
            granted = {sequence: min(chunk, left)} if left > 0 else {}
            outcome = self.step(new_sequences=new, chunks=granted)
            new, left = (), left - chunk
            sampled.extend(outcome.sampled)
            if sampled and sampled[-1].stopped:
                break
        self.step(removed=(sequence,))
        return sampled
