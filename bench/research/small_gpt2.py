"""A GPT-2 of four layers and four heads, trained on a novel in a few minutes and kept as a folder for executors."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from tokenizers import ByteLevelBPETokenizer

from bench.prose import novel
from tests.stack import model_cache

VOCABULARY, POSITIONS, WIDTH = 1024, 64, 128
STEPS, BATCH = 2_000, 8
END = "<|endoftext|>"
# Raise this number when the training changes, so that an older model is not used.
_TRAINING = 2


def small_gpt2() -> Path:
    """Folder of the model, which is trained if there is none yet. Raises NoTextError."""
    target = model_cache() / "models" / f"prose-gpt2-{_TRAINING}"
    if not target.is_dir():
        text = novel()
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".training-", dir=target.parent) as scratch:
            made = Path(scratch, "model")
            _train(text, made)
            made.rename(target)
    return target


def _train(text: str, target: Path) -> None:
    # Imported here: a run that finds the model need not wait for these imports.
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(text.split("\n\n"), vocab_size=VOCABULARY, special_tokens=[END], show_progress=False)
    ids = torch.tensor(tokenizer.encode(text).ids)
    torch.manual_seed(0)
    # Such a small step gains nothing from a second thread, and loses much if the cores are busy.
    torch.set_num_threads(1)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=POSITIONS,
            n_embd=WIDTH,
            n_layer=4,
            n_head=4,
            bos_token_id=0,
            eos_token_id=0,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=STEPS, pct_start=0.05)
    model.train()
    started, loss = time.monotonic(), 0.0
    for step in range(STEPS):
        batch = torch.stack([ids[at : at + POSITIONS] for at in torch.randint(len(ids) - POSITIONS, (BATCH,)).tolist()])
        logits = model(input_ids=batch).logits[:, :-1]
        error = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        error.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rates.step()
        loss += (error.item() - loss) * (0.02 if step else 1.0)
        if (step + 1) % 200 == 0:
            took = time.monotonic() - started
            print(f"training: {step + 1} of {STEPS} steps, loss {loss:.2f}, {took:.0f} s", file=sys.stderr, flush=True)
    model.eval().save_pretrained(target)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer._tokenizer, bos_token=END, eos_token=END, model_max_length=POSITIONS
    ).save_pretrained(target)
