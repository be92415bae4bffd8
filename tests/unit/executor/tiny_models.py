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
    # Its widths are no multiples of any processor's tile.
    "qwen3": lambda: Qwen3Config(**{**_SIZES, "intermediate_size": 44}, head_dim=16),
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

_COMPILED_SIZES = {**_SIZES, "hidden_size": 64, "intermediate_size": 96, "head_dim": 32}

# Large enough for the compiled decoder, each with a special feature.
COMPILED_CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama, compiled": lambda: LlamaConfig(**_COMPILED_SIZES, tie_word_embeddings=True),
    "llama 3 rope, compiled": lambda: LlamaConfig(
        **_COMPILED_SIZES,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "mistral, compiled": lambda: MistralConfig(**_COMPILED_SIZES, sliding_window=WINDOW),
    "qwen2, compiled": lambda: Qwen2Config(
        **{**_COMPILED_SIZES, "hidden_size": 128},
        use_sliding_window=True,
        sliding_window=WINDOW,
        max_window_layers=2,
    ),
    "qwen3, compiled": lambda: Qwen3Config(**_COMPILED_SIZES),
}
