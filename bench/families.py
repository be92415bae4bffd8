"""Every decoder family of transformers as a tiny model: served output against generate().

`python -m bench.families [--json FILE] [NAME ...]` builds each model with random weights, saves it, loads it as the
executor does, runs six prompts side by side in chunks, and compares greedy tokens with generate(). A family's result
is equal, refused in one sentence, untried (transformers itself cannot build or run the tiny model), wrong or traceback.
Exits with 1 if any result is wrong or traceback.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections import Counter
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from bench.result import Result as Kept
from bench.result import add_json_argument
from executor.errors import ModelError
from executor.models.llama import FAMILIES
from tests.unit.executor.conftest import Driver, on_torch, save_model

EQUAL, REFUSED, UNTRIED, WRONG, TRACEBACK = "equal", "refused", "untried", "wrong", "traceback"
VOCABULARY = 128
LENGTHS = (1, 3, 8, 17, 30, 41)
CHUNK, OUTPUT = 5, 16
# Two ids whose logits are nearer than this may come in either order.
TIE = 1e-3
LIMIT_SECONDS = 120
# Limit of weights: larger models would show nothing more.
MOST_WEIGHTS = 80_000_000

# Values for all fields of these names in a configuration.
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "n_embd": 64,
    "d_model": 64,
    "word_embed_proj_dim": 64,
    "embedding_size": 64,
    "intermediate_size": 96,
    "ffn_dim": 96,
    "n_inner": 96,
    "decoder_ffn_dim": 96,
    "encoder_ffn_dim": 96,
    "num_hidden_layers": 4,
    "n_layer": 4,
    "num_layers": 4,
    "n_layers": 4,
    "decoder_layers": 4,
    "encoder_layers": 2,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "decoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_kv_heads": 2,
    "head_dim": 16,
    "global_head_dim": 16,
    "max_position_embeddings": 256,
    "n_positions": 256,
    "sliding_window": 9,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "intermediate_size_mlp": 32,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "rotary_dim": 8,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 16,
    "query_pre_attn_scalar": 16,
    "use_cache": True,
}
SPECIAL_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
# Fields that a family needs in addition to the sizes, or that make a different variant of it: name -> fields.
VARIANTS: dict[str, dict[str, Any]] = {
    "falcon/alibi": {"alibi": True},
    "falcon/new": {"new_decoder_architecture": True},
    "bert/decoder": {"is_decoder": True},
    "roberta/decoder": {"is_decoder": True},
    "llama/bias": {"attention_bias": True, "mlp_bias": True},
    "llama/tied": {"tie_word_embeddings": True},
    "llama/dynamic": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
    "llama/yarn": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}},
    "llama/linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    "phi3/partial": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
    "llama4_text/full": {
        "layer_types": ["full_attention"] * 4,
        "no_rope_layers": [1, 0, 1, 0],
        "floor_scale": 4,
        "attn_temperature_tuning": True,
    },
    "llama4_text/published scale": {
        "layer_types": ["full_attention"] * 4,
        "no_rope_layers": [1, 0, 1, 0],
        "attn_temperature_tuning": True,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "mpt": {"n_heads": 4},
    # These families need ids of special tokens, or one kind of layer.
    "cwm": SPECIAL_TOKENS,
    "glm": SPECIAL_TOKENS,
    "glm4": SPECIAL_TOKENS,
    "phi4_multimodal": SPECIAL_TOKENS,
    "modernbert-decoder": SPECIAL_TOKENS | {"cls_token_id": 1, "sep_token_id": 2},
    "lfm2_moe": {"layer_types": ["full_attention"] * 4},
}


@dataclass(frozen=True)
class Result:
    """The result of a family. detail: refusal, or where outputs differ. tokens: distinct tokens of the output."""

    name: str
    outcome: str
    detail: str = ""
    tokens: int = 0


def names() -> list[str]:
    """Every family, families with a window a second time without it, and the variants."""
    listed = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    for name in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        with contextlib.suppress(Exception):
            if getattr(AutoConfig.for_model(name), "sliding_window", None) is not None:
                listed.add(f"{name}/no window")
    return sorted(listed | set(VARIANTS))


def configuration(name: str) -> Any:
    """A tiny configuration."""
    family, _, side = name.partition("/")
    kind = type(AutoConfig.for_model(family))
    fields = sized(kind)
    if side == "no window":
        fields["sliding_window"] = None
    return kind(**fields | VARIANTS.get(name, {}))


def sized(kind: Any) -> dict[str, Any]:
    """Fields that make a configuration class, and the configurations within it, tiny."""
    aliases = getattr(kind, "attribute_map", {})
    known = set(kind().to_dict()) | set(aliases)
    fields = {aliases.get(field, field): value for field, value in SIZES.items() if field in known}
    if "qk_rope_head_dim" in known:
        # Heads of these families have parts instead of one size.
        fields.pop(aliases.get("head_dim", "head_dim"), None)
        fields["qk_rope_head_dim"] = SIZES["qk_rope_head_dim"]
        fields["num_key_value_heads"] = SIZES["num_attention_heads"]
    for part, inner in getattr(kind, "sub_configs", {}).items():
        with contextlib.suppress(Exception):
            fields[part] = sized(type(getattr(kind(), part)) if "Auto" in inner.__name__ else inner)
    return fields


def prompts() -> list[list[int]]:
    """Prompts of various lengths."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(VOCABULARY, (length,), generator=generator).tolist() for length in LENGTHS]


def expected(folder: Path) -> list[tuple[list[int], list[float]]]:
    """For each prompt, the greedy tokens of generate(), and the margin of each token over the second choice."""
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    found = []
    for prompt in prompts():
        with torch.inference_mode():
            out = module.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                max_new_tokens=OUTPUT,
                do_sample=False,
                pad_token_id=0,
                return_dict_in_generate=True,
                output_logits=True,
            )
        best = [logits[0].float().topk(2).values for logits in out.logits]
        found.append((out.sequences[0, len(prompt) :].tolist(), [float(pair[0] - pair[1]) for pair in best]))
    return found


def served(folder: Path) -> list[list[int]]:
    """The executor's tokens: all prompts in one running set, in chunks. Raises ModelError if the executor refuses."""
    driver = Driver(on_torch(folder))
    asked = prompts()
    left, outputs = [len(prompt) for prompt in asked], [list[int]() for _ in asked]
    joining = tuple(driver.new_sequence(i, prompt, room=OUTPUT) for i, prompt in enumerate(asked))
    while not all(len(output) >= OUTPUT for output in outputs):
        chunks = {i: min(CHUNK, count) for i, count in enumerate(left) if count > 0}
        done = frozenset(i for i, output in enumerate(outputs) if len(output) >= OUTPUT)
        outcome = driver.step(new_sequences=joining, chunks=chunks, idle=done)
        joining = ()
        for i, count in chunks.items():
            left[i] -= count
        for sampled in outcome.sampled:
            outputs[sampled.sequence].append(sampled.token_id)
    return outputs


def try_family(name: str, folder: Path) -> Result:
    """Builds a family's model and compares its output."""
    try:
        config = configuration(name)
        with torch.device("meta"):
            weights = sum(one.numel() for one in AutoModelForCausalLM.from_config(config).parameters())
        if weights > MOST_WEIGHTS:
            return Result(name, UNTRIED, f"{weights:,} weights with the tiny configuration")
        save_model(config, folder)
        reference = expected(folder)
    except Exception as error:
        reference, why = None, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    if reference is None and not (folder / "config.json").exists():
        return Result(name, UNTRIED, why)
    try:
        outputs = served(folder)
    except ModelError as error:
        if "\n" in str(error):
            return Result(name, TRACEBACK, str(error))
        # If transformers itself fails with a configuration, this proves nothing about the family.
        return Result(name, UNTRIED if reference is None else REFUSED, str(error))
    except Exception:
        return Result(name, TRACEBACK, traceback.format_exc(limit=-4))
    if reference is None:
        return Result(name, UNTRIED, f"generate(): {why}")
    return compare(name, reference, outputs)


def compare(name: str, reference: list[tuple[list[int], list[float]]], outputs: list[list[int]]) -> Result:
    """Compares outputs up to the first tie."""
    for number, ((tokens, margins), output) in enumerate(zip(reference, outputs, strict=True)):
        for position, (token, margin, own) in enumerate(zip(tokens, margins, output, strict=False)):
            if token != own:
                if margin >= TIE:
                    return Result(name, WRONG, f"prompt {number}, token {position}, margin {margin:.3g}")
                break
    return Result(name, EQUAL, tokens=len({token for output in outputs for token in output}))


def _child(name: str, answers: Connection) -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    with (
        Path(os.devnull).open("w") as nothing,
        contextlib.redirect_stderr(nothing),
        tempfile.TemporaryDirectory() as folder,
    ):
        answers.send(try_family(name, Path(folder, "model")))


def tried(name: str) -> Result:
    """Checks a family in a separate process, with a time limit."""
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(name, send))
    child.start()
    send.close()
    try:
        return receive.recv() if receive.poll(LIMIT_SECONDS) else Result(name, UNTRIED, f"{LIMIT_SECONDS} s are over")
    except EOFError:
        return Result(name, TRACEBACK, "the process died")
    finally:
        child.kill()
        child.join()


def main(arguments: list[str]) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("names", nargs="*", metavar="NAME", help="family or family/variant; all without any")
    add_json_argument(parser)
    chosen = parser.parse_args(arguments)
    results = []
    for name in chosen.names or names():
        results.append(tried(name))
        one = results[-1]
        *_, last = ["", *one.detail.strip().splitlines()]
        print(f"{one.outcome:9} {name:32} {last[:160]}", flush=True)
    counts = Counter(one.outcome for one in results)
    print(f"{len(results)} families and variants of transformers {transformers.__version__}:", dict(counts))
    # The families with a faster forward pass of our own; these figures become a table of docs/models.md.
    found: dict[str, dict[str, list[str]]] = {outcome: {} for outcome in counts}
    for one in results:
        found[one.outcome].setdefault(one.detail.removeprefix(f"{one.name.partition('/')[0]}: "), []).append(one.name)
    Kept("families", {"fast": FAMILIES, "families": found}).write(chosen.json)
    return 1 if counts[WRONG] or counts[TRACEBACK] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
