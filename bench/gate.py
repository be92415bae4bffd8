"""No speed without correctness: greedy output is compared with transformers' generate() before anything is measured.

In float32 every token must be the reference's, but for the ties of tests.support.reference. In bfloat16 rounding moves
the logits and so may exchange two tokens whose logits are close. How close is measured, not guessed: transformers' own
bfloat16 model reads the reference's tokens. The most by which it moves a difference between two logits, over all
tokens, is the error of a correct bfloat16 computation. An output may leave its float32 reference only where the
reference's margin is smaller than this error. A wrong computation moves logits by whole units, and fails at the first
token that has a clear winner.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from bench.workloads import Case
from tests.support.reference import Reference, first_mismatch, references

SAMPLE = 4
TOKENS = 64
# Number of candidates whose logits are compared: logits of others are never near the best.
CANDIDATES = 8

Answer = TypeVar("Answer")


def apart(call: Callable[..., Answer], *arguments: Any) -> Answer:
    """Calls a function in a process of its own, so that torch's memory and threads are gone before measuring."""
    context = multiprocessing.get_context("spawn")
    # Ctrl-C ends the child without a traceback of its own.
    with ProcessPoolExecutor(1, context, signal.signal, (signal.SIGINT, signal.SIG_DFL)) as pool:
        return pool.submit(call, *arguments).result()


def sample(case: Case) -> list[int]:
    """Indices of the requests that are compared, over the whole range."""
    return list(range(0, case.requests, max(1, case.requests // SAMPLE)))


def tokens_compared(case: Case) -> int:
    """How many output tokens of each of these requests are compared."""
    return min(case.output_tokens, TOKENS)


def allowed_margin(model: Path, prompts: Sequence[Sequence[int]], count: int, cache: Path) -> float:
    """Margins below this may change in bfloat16. Runs in a process of its own."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()

    inputs = [model.name, torch.__version__, prompts, count, CANDIDATES]
    kept = cache / f"bfloat16-error-{hashlib.sha256(json.dumps(inputs).encode()).hexdigest()[:16]}.json"
    if kept.exists():
        return float(json.loads(kept.read_text()))
    answers = references(model, prompts, count, cache)
    exact, rounded = (
        AutoModelForCausalLM.from_pretrained(model, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)
    )
    worst = 0.0
    with torch.inference_mode():
        for prompt, answer in zip(prompts, answers, strict=True):
            ids = torch.tensor([[*prompt, *answer.token_ids[:-1]]])
            best = exact(ids, logits_to_keep=count).logits[0].topk(CANDIDATES)
            same = rounded(ids, logits_to_keep=count).logits[0].float().gather(1, best.indices)
            moved = (best.values - best.values[:, :1]) - (same - same[:, :1])
            worst = max(worst, moved.abs().max().item())
    kept.write_text(json.dumps(worst))
    return worst


def differences(
    label: str, answers: Sequence[Reference], outputs: Sequence[Sequence[int]], margin: float
) -> tuple[list[str], list[float]]:
    """Errors in words, and the margins at positions where outputs differ as they may."""
    wrong: list[str] = []
    near: list[float] = []
    for index, (answer, output) in enumerate(zip(answers, outputs, strict=True)):
        if len(output) != len(answer.token_ids):
            wrong.append(f"{label}, sample {index}: {len(output)} tokens instead of {len(answer.token_ids)}")
            continue
        mismatch = first_mismatch(answer, output)
        if mismatch is None:
            continue
        if mismatch.margin < margin:
            near.append(mismatch.margin)
        else:
            position = f"position {mismatch.position}, where the margin is {mismatch.margin:.3g}"
            wrong.append(f"{label}, sample {index}: another token at {position}")
    return wrong, near
