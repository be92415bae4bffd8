"""The package beside others: invisible to transformers, and usable without triton."""

import os
import subprocess
import sys
from pathlib import Path

from tests.support.patience import patience

ROOT = Path(__file__).parents[2]


def python(code: str) -> str:
    """Output of a fresh interpreter that finds the repository's packages."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=patience(60)
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_package_says_nothing_of_itself() -> None:
    assert (ROOT / "kernels/__init__.py").read_bytes() == b""


def test_transformers_is_not_confused_by_a_package_of_that_name() -> None:
    code = "import transformers; from transformers import LlamaForCausalLM; import kernels; print(kernels.__file__)"
    assert python(code).strip() == str(ROOT / "kernels/__init__.py")


def test_ops_run_on_a_cpu_without_triton() -> None:
    code = """
import sys
sys.modules["triton"] = None
import torch
from kernels.compact_kv.launch import compact_kv
from kernels.copy_blocks.launch import copy_blocks
from kernels.draw_tokens.launch import draw_tokens
from kernels.paged_attention.launch import AttentionArgs, PagedBatch, paged_attention
from kernels.attention_scores.launch import attention_scores
from kernels.rms_norm.launch import rms_norm
from kernels.rotary_store.launch import rotary_store
from kernels.rotate_keys.launch import rotate_keys
from kernels.silu_mul.launch import silu_mul
from kernels.store_kv.launch import store_kv
cache = torch.zeros(2, 2, 4, 1, 8)
store_kv(torch.ones(1, 1, 8), torch.ones(1, 1, 8), *cache, torch.tensor([0]))
copy_blocks(cache[:1], cache[1:], torch.tensor([0]), torch.tensor([1]))
slots = torch.tensor([[[1, 2]]])
compact_kv(cache[:1], cache[1:], slots, slots - 1)
rotate_keys(cache[1:], slots, slots, torch.zeros(4))
one = torch.tensor([1], dtype=torch.int32)
batch = PagedBatch(torch.tensor([0, 1], dtype=torch.int32), one, one[:, None], 1, 1, (1,), (1,))
lse = torch.zeros(1, 2)
print(paged_attention(torch.ones(1, 2, 8), *cache, batch, AttentionArgs(1.0), lse=lse).eq(1).all().item())
print(attention_scores(torch.ones(1, 2, 8), cache[0], batch, lse, one, AttentionArgs(1.0)).tolist())
print(rms_norm(torch.ones(1, 8), torch.ones(8), 0.0).sum().item())
turn = torch.ones(1, 8)
rotary_store(*torch.ones(3, 1, 1, 8), turn, turn, torch.tensor([0]), torch.tensor([0]), *cache)
print(silu_mul(torch.zeros(1, 2)).tolist())
print(draw_tokens(torch.eye(2), torch.tensor([1]), torch.tensor([[1.0, 1, 1, 0, 0.5]]).double()).tolist())
"""
    assert python(code).split("\n") == ["True", "[[[2.0]]]", "8.0", "[[0.0]]", "[1]", ""]
