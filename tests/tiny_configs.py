"""Arguments of transformers' configuration classes that make each family tiny and its peculiarities visible."""

from __future__ import annotations

from typing import Any

__all__ = ["EXPERTS", "GROUPED", "WHOLE", "arguments", "attention"]

#: how a family calls its sizes, where that is not the usual name; None: it has no such field
_NAMES: dict[str, dict[str, str | None]] = {
    "gpt2": {"hidden": "n_embd", "ffn": "n_inner", "layers": "n_layer", "heads": "n_head", "length": "n_positions"},
    "bloom": {"ffn": None, "layers": "n_layer", "heads": "n_head", "length": None},
    "falcon": {"ffn": "ffn_hidden_size", "kv": "num_kv_heads"},
    "mpt": {"hidden": "d_model", "ffn": None, "layers": "n_layers", "heads": "n_heads", "length": "max_seq_len"},
    "opt": {"ffn": "ffn_dim"},
}
_NAMES["gptj"] = _NAMES["gpt_bigcode"] = _NAMES["gpt2"]
_USUAL = {
    "vocab": "vocab_size", "hidden": "hidden_size", "ffn": "intermediate_size", "layers": "num_hidden_layers",
    "heads": "num_attention_heads", "kv": "num_key_value_heads", "length": "max_position_embeddings",
}  # fmt: skip
_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
#: a head size that is not hidden_size // heads
_WIDE = {"head_dim": 24}
#: a window shorter than the input in the first of two layers
_MIXED = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}

#: what a family with fewer key/value heads than heads needs beside the sizes
GROUPED: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"head_dim": 16, "sliding_window": 8},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "ministral3": {
        **_WIDE, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 8,
            "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32.0, "beta_slow": 1.0, "llama_4_scaling_beta": 0.5,
        },
    },
    "smollm3": {"no_rope_layers": [1, 0]},
    "seed_oss": {**_WIDE, "attention_bias": True},
    "ernie4_5": {**_WIDE, "use_bias": True},
    "hunyuan_v1_dense": _WIDE,
    "granite": {
        "attention_multiplier": 0.1, "embedding_multiplier": 2.0, "logits_scaling": 2.0, "residual_multiplier": 0.5,
        "attention_bias": True, "mlp_bias": True,
    },
    "gemma": _WIDE,
    "gemma2": {**_WIDE, **_MIXED, "query_pre_attn_scalar": 20},
    "gemma3_text": {**_WIDE, **_MIXED, "query_pre_attn_scalar": 20},
    "olmo": {},
    "olmo2": {},
    "olmo3": _MIXED,
    "exaone4": _MIXED,
    "cohere": {"logit_scale": 0.25},
    "cohere2": {**_MIXED, "logit_scale": 0.25},
    "glm": _WIDE,
    "glm4": _WIDE,
    "stablelm": {},
    "nemotron": _WIDE,
    "starcoder2": {"sliding_window": 8},
    "apertus": {},
    "phi3": {"sliding_window": 8},
}  # fmt: skip
#: the same for a family whose heads each have a key and a value, or all share one
WHOLE: dict[str, dict[str, Any]] = {
    "phi": {},
    "gpt2": {},
    "gpt_neox": {},
    "gptj": {"rotary_dim": 8},
    "opt": {},
    "bloom": {},
    "falcon": {"bias": False},
    "mpt": {},
    "gpt_bigcode": {},
}
#: the same for a family of experts
EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "sliding_window": 8},
    "olmoe": {"num_experts": 7, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "num_experts": 7, "num_experts_per_tok": 2, "moe_intermediate_size": 34, "shared_expert_intermediate_size": 51,
    },
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 35, **_WIDE},
    "granitemoe": {
        "num_local_experts": 4, "attention_multiplier": 0.1, "embedding_multiplier": 2.0, "logits_scaling": 2.0,
        "residual_multiplier": 0.5,
    },
    "granitemoeshared": {
        "num_local_experts": 4, "attention_multiplier": 0.1, "embedding_multiplier": 2.0, "logits_scaling": 2.0,
        "residual_multiplier": 0.5, "shared_intermediate_size": 52,
    },
    "gpt_oss": {"num_local_experts": 5, "num_experts_per_tok": 2, **_WIDE, **_MIXED},
    "minimax_m2": {"num_local_experts": 5, "num_experts_per_tok": 2, **_WIDE},
    "glm4_moe": {
        "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 36, "num_hidden_layers": 3, **_WIDE,
    },
    "llama4_text": {
        "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size_mlp": 100, "num_hidden_layers": 4, **_WIDE,
        "attention_chunk_size": 8, "floor_scale": 4,
    },
}  # fmt: skip


def arguments(family: str, sizes: dict[str, int], fields: dict[str, Any]) -> dict[str, Any]:
    """Returns a family's arguments.

    Args:
        family: a model_type.
        sizes: vocab, hidden, ffn, layers, heads, kv, length.
        fields: further ones; they go before the family's own.
    """
    if family in WHOLE:
        sizes = {**sizes, "kv": sizes["heads"]}
    named = {(_USUAL | _NAMES.get(family, {}))[key]: size for key, size in sizes.items()}
    named.pop(None, None)
    if family in {"opt"}:
        named["word_embed_proj_dim"] = sizes["hidden"]
    return {**named, **_TOKENS, **(GROUPED | WHOLE | EXPERTS)[family], **fields}


def attention(family: str, fields: dict[str, Any]) -> str:
    """Returns the implementation of attention that serves as reference.

    transformers 5.24 adds Falcon's ALiBi to the mask and, where it is eager, once more to the scores.
    """
    return "sdpa" if family == "falcon" and fields.get("alibi") else "eager"
