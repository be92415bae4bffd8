"""What a call may ask for: so much that a run of many calls ends, it fits one machine, and the stack lives.

A registration in the name of the stack's scheduler or executor with a newer epoch replaces it, as is right: it ends,
or is shut out. So their names are sent with small epochs only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf.message import Message

# Limits of tokens and samples of a request, and the number from which on every request is refused.
MAX_TOKENS, TOO_MANY_TOKENS = 4, 1 << 24
MAX_SAMPLES, TOO_MANY_SAMPLES = 4, 64
# Samples of all prompts of a body over HTTP.
MAX_PRODUCT, TOO_LARGE_PRODUCT = 16, 256
# Each slot that an executor announces takes memory of the cache manager from the start, up to 2^24 of them.
MAX_SLOTS, TOO_MANY_SLOTS = 4096, 1 << 24
OWN_SCHEDULER, OWN_EXECUTOR = "scheduler-0", "executor-0"
MAX_OWN_EPOCH = 1 << 40


def keep_within(message: Message) -> bool:
    """Changes a message that asks for more; returns whether it did."""
    match message.DESCRIPTOR.full_name:
        case "generation.v1.StreamGenerateRequest":
            return _keep_generation(message)
        case "vllm.grpc.engine.GenerateRequest":
            return _keep_generation(message.sampling_params)  # type: ignore[attr-defined]
        case "kvcache.v1.RegisterExecutorRequest":
            changed = [_keep_pool(pool) for pool in message.pools]  # type: ignore[attr-defined]
            return _keep_epoch(message, "executor", OWN_EXECUTOR) or any(changed)
        case "kvcache.v1.RegisterSchedulerRequest":
            return _keep_epoch(message, "scheduler", OWN_SCHEDULER)
    return False


def _keep_generation(request: Any) -> bool:
    changed = False
    if not request.HasField("max_tokens") or MAX_TOKENS < request.max_tokens <= TOO_MANY_TOKENS:
        request.max_tokens, changed = 1 + request.max_tokens % MAX_TOKENS, True
    if MAX_SAMPLES < request.n <= TOO_MANY_SAMPLES:
        request.n, changed = 1 + request.n % MAX_SAMPLES, True
    return changed


def _keep_pool(pool: Any) -> bool:
    changed = False
    for field in ("num_blocks", "host_blocks", "disk_blocks"):
        slots = getattr(pool, field)
        if MAX_SLOTS < slots <= TOO_MANY_SLOTS:
            setattr(pool, field, slots % MAX_SLOTS)
            changed = True
    return changed


def _keep_epoch(request: Any, who: str, own: str) -> bool:
    epoch = getattr(request, f"{who}_epoch")
    if getattr(request, f"{who}_id") != own or epoch <= MAX_OWN_EPOCH:
        return False
    setattr(request, f"{who}_epoch", epoch % MAX_OWN_EPOCH)
    return True


def keep_body(body: Any) -> Any:
    """Limits the body of a generation over HTTP in the same way; values that are no numbers stay as they are."""
    if not isinstance(body, Mapping):
        return body
    kept = dict(body)
    for field in ("max_tokens", "max_completion_tokens"):
        if _is_between(kept.get(field), MAX_TOKENS, TOO_MANY_TOKENS):
            kept[field] = 1 + kept[field] % MAX_TOKENS
    if kept.get("max_tokens") is None and kept.get("max_completion_tokens") is None:
        kept["max_tokens"] = MAX_TOKENS
    if _is_between(kept.get("n"), MAX_SAMPLES, TOO_MANY_SAMPLES):
        kept["n"] = 1 + kept["n"] % MAX_SAMPLES
    prompts, samples = kept.get("prompt"), kept.get("n", 1)
    if isinstance(prompts, list) and isinstance(samples, int) and not isinstance(samples, bool):
        # More samples than may wait are refused, so those may pass. A list of numbers is one prompt.
        are_several = not all(isinstance(one, int) for one in prompts)
        if are_several and MAX_PRODUCT < len(prompts) * samples <= TOO_LARGE_PRODUCT:
            kept["prompt"] = prompts[:MAX_SAMPLES]
    return kept


def _is_between(value: object, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low < value <= high
