"""No speed without correctness: greedy output is compared with transformers' generate() before anything is measured.

In float32 every token must equal the reference's, except for the ties of tests.support.reference. In bfloat16, rounding
moves the logits, so that two tokens with close logits may be exchanged. How close is measured: transformers' own
bfloat16 model reads the reference's tokens. The largest change of a difference between two logits, over all tokens, is
the error of a correct bfloat16 computation. An output may differ from its float32 reference only if the reference's
margin is smaller than this error. A wrong computation moves logits by whole units, and fails at the first token with a
clear winner.
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
# Number of best tokens whose logits are compared: all other logits are far from the best.
CANDIDATES = 8

Answer = TypeVar("Answer")


def apart(call: Callable[..., Answer], *arguments: Any) -> Answer:
    """Calls a function in a separate process, so that torch's memory and threads are gone before measuring."""
    context = multiprocessing.get_context("spawn")
    # Ctrl-C ends the child without a traceback.
    with ProcessPoolExecutor(1, context, signal.signal, (signal.SIGINT, signal.SIG_DFL)) as pool:
        return pool.submit(call, *arguments).result()


def sample(case: Case) -> list[int]:
    """Indices of the compared requests, spread over all requests."""
    return list(range(0, case.requests, max(1, case.requests // SAMPLE)))


def tokens_compared(case: Case) -> int:
    """Number of compared output tokens of each request."""
    return min(case.output_tokens, TOKENS)


def allowed_margin(model: Path, prompts: Sequence[Sequence[int]], count: int, cache: Path) -> float:
    """Tokens may differ in bfloat16 if their margin is below this value. Runs in a separate process."""
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
    """Returns errors in words, and the margins at allowed differences."""
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
