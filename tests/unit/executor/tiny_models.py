"""Configurations of every architecture that exactness is proved for, small enough for a test."""

from collections.abc import Callable

from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

VOCAB = 97
WINDOW = 9

_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}

CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_SIZES),
    "qwen2": lambda: Qwen2Config(**_SIZES),
    "qwen3": lambda: Qwen3Config(**_SIZES, head_dim=16),
    "mistral": lambda: MistralConfig(**_SIZES, sliding_window=WINDOW, head_dim=8),
    "gemma2": lambda: Gemma2Config(**_SIZES, sliding_window=WINDOW, head_dim=8, query_pre_attn_scalar=8),
    "gemma3": lambda: Gemma3TextConfig(
        **{**_SIZES, "num_hidden_layers": 6}, sliding_window=WINDOW, head_dim=8, query_pre_attn_scalar=8
    ),
    "phi3": lambda: Phi3Config(**_SIZES),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCAB, n_positions=256, n_embd=32, n_layer=3, n_head=4, bos_token_id=None, eos_token_id=None
    ),
    "gpt_oss": lambda: GptOssConfig(
        **_SIZES, sliding_window=WINDOW, head_dim=8, num_local_experts=4, num_experts_per_tok=2
    ),
}
