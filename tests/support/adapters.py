"""Adapters with random matrices that PEFT itself makes and saves, and PEFT's outputs with them."""

import warnings
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


P = ParamSpec("P")
R = TypeVar("R")


def _quiet(function: Callable[P, R]) -> Callable[P, R]:
    """PEFT reads a property whose name transformers is about to change."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
            return function(*args, **kwargs)

    return call


def base_model(source: Path | str) -> Any:
    """The model as transformers runs it, in float32."""
    return AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()


@_quiet
def save_adapter(source: Path | str, folder: Path, seed: int, size: float = 0.2, **options: Any) -> Path:
    """Saves an adapter for all linear modules of a model. size: of the matrices' values. options: of LoraConfig."""
    torch.manual_seed(seed)
    config = LoraConfig(**{"r": 8, "lora_alpha": 16, "target_modules": ALL_LINEAR, "task_type": "CAUSAL_LM"} | options)
    model = get_peft_model(base_model(source), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, size)
    model.save_pretrained(folder)
    return folder


@_quiet
def generated(source: Path | str, adapter: Path | None, prompts: list[list[int]], count: int) -> list[list[int]]:
    """The ids after each prompt by PEFT's greedy `generate`; with the base model alone if adapter is None."""
    model = base_model(source)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter).eval()

    def continued(prompt: list[int]) -> list[int]:
        ids = model.generate(
            input_ids=torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=count,
            min_new_tokens=count,
            pad_token_id=0,
        )
        return ids[0, len(prompt) :].tolist()

    with torch.inference_mode():
        return [continued(prompt) for prompt in prompts]
