"""The truth for greedy decoding: transformers' own generate(), with the margin between its two best logits.

Only the computation of references imports torch: a program that measures can compare without it.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# Two logits closer than this may change their order by rounding alone.
TIE = 1e-4


@dataclass(frozen=True)
class Reference:
    """Greedy continuation of one prompt and, per token, the margin over the second best logit."""

    token_ids: list[int]
    margins: list[float]


@dataclass(frozen=True)
class Mismatch:
    """First position where an output differs from its reference."""

    position: int
    margin: float

    @property
    def is_tie(self) -> bool:
        return self.margin < TIE


def first_mismatch(reference: Reference, output: Sequence[int]) -> Mismatch | None:
    """None if the output equals the reference; a tie ends the comparison, as all later tokens may differ."""
    for position, (expected, margin) in enumerate(zip(reference.token_ids, reference.margins, strict=True)):
        if position >= len(output) or output[position] != expected:
            return Mismatch(position, margin)
    return None if len(output) == len(reference.token_ids) else Mismatch(len(reference.token_ids), float("inf"))


def references(
    model_path: Path,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    cache_folder: Path,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Reference]:
    """Float32 greedy references, end-of-sequence ignored.

    They are kept in `cache_folder`. They depend on the inputs, on torch and on the processor's rounding.
    """
    # Before torch is imported: spinning threads would slow down other programs on a small machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()

    made_by = [model_path.name, torch.__version__, torch.backends.cpu.get_cpu_capability(), platform.machine()]
    digest = hashlib.sha256(json.dumps([*made_by, prompts, max_tokens]).encode()).hexdigest()
    cached = cache_folder / f"references-{digest[:16]}.json"
    if cached.exists():
        return [Reference(**entry) for entry in json.loads(cached.read_text())]
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    result = []
    for index, prompt in enumerate(prompts):
        result.append(greedy(model, prompt, max_tokens))
        progress(f"reference {index + 1}/{len(prompts)} ({len(prompt)} tokens)")
    cache_folder.mkdir(parents=True, exist_ok=True)
    cached.write_text(json.dumps([asdict(entry) for entry in result]))
    return result


def greedy(model: torch.nn.Module, prompt: Sequence[int], max_tokens: int) -> Reference:
    """Exactly `max_tokens` greedy tokens after one prompt."""
    import torch

    ids = torch.tensor([list(prompt)], device=model.device)  # type: ignore[arg-type]
    answer = model.generate(  # type: ignore[operator]
        ids,
        # Without a mask, a prompt's tokens that equal the padding token are ignored.
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.stack(answer.logits).float().topk(2, dim=-1).values[:, 0]
    return Reference(answer.sequences[0, len(prompt) :].tolist(), (best[:, 0] - best[:, 1]).tolist())
