"""config.json from GGUF's metadata. A key that may change what is computed, and is not understood, is refused."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tpkit import CheckpointError
from tpkit_gguf.container import Array
from tpkit_gguf.names import ARCHITECTURES

__all__ = ["Fields", "config_of", "llama3_scaling"]

#: keys of an architecture that change no value: they tell of training, pooling after the last layer, or pth files
_WITHOUT_EFFECT = ("vocab_size", "tensor_data_layout", "pooling_type", "rope.scaling.finetuned", "rope.dimension_count")
_TOKENS = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}


@dataclass(kw_only=True)
class Fields:
    """The keys of one architecture, and which of them were read."""

    file: Path
    arch: str
    metadata: Mapping[str, Any]
    read: set[str] = field(default_factory=set)

    def get(self, key: str) -> Any:
        """Returns a value or None. A number for each layer counts as one if all are the same."""
        full = f"{self.arch}.{key}"
        self.read.add(full)
        value = self.metadata.get(full)
        if isinstance(value, Array):
            if not value.values or len(set(value.values)) > 1:
                raise CheckpointError(f"{self.file}: {full} differs from layer to layer, which is not supported")
            return value.values[0]
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """Returns a positive integer."""
        value = self.get(key)
        value = default if value is None else value
        if value is None or not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise CheckpointError(f"{self.file}: {self.arch}.{key} is {value!r}, not a positive integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Returns a positive number."""
        value = self.get(key)
        value = default if value is None else value
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value) or value <= 0:
            raise CheckpointError(f"{self.file}: {self.arch}.{key} is {value!r}, not a positive number")
        return float(value)

    def check_all_read(self) -> None:
        """Checks that no key is left that may change what the model computes."""
        known = self.read | {f"{self.arch}.{key}" for key in _WITHOUT_EFFECT}
        left = sorted(key for key in self.metadata if key.startswith(f"{self.arch}.") and key not in known)
        if left:
            told = ", ".join(f"{key} = {self.metadata[key]!r:.60}" for key in left)
            raise CheckpointError(f"{self.file}: metadata that may change what is computed is not understood: {told}")


def config_of(
    fields: Fields, shapes: Mapping[str, tuple[int, ...]], frequencies: Sequence[float] | None
) -> dict[str, Any]:
    """Returns what config.json would say.

    Args:
        fields: the metadata.
        shapes: of the tensors, by their Hugging Face names, in logical elements.
        frequencies: what the rotary frequencies are divided by, where the file has a tensor of that.

    Raises:
        CheckpointError: for metadata that is missing, senseless, or not understood.
    """
    model_type, architecture = ARCHITECTURES[fields.arch]
    hidden, heads = fields.count("embedding_length"), fields.count("attention.head_count")
    head_dim = _head_dim(fields, hidden, heads)
    theta = fields.number("rope.freq_base", 10000.0)
    embedding = shapes.get("model.embed_tokens.weight")
    if embedding is None:
        raise CheckpointError(f"{fields.file}: there is no token_embd.weight, so it is no whole language model")
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": hidden,
        "num_hidden_layers": fields.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": fields.count("feed_forward_length"),
        "vocab_size": embedding[0],
        "max_position_embeddings": fields.count("context_length"),
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": theta,
        "rope_scaling": _scaling(fields, frequencies, theta, head_dim),
        "hidden_act": "silu",
        "tie_word_embeddings": "lm_head.weight" not in shapes,
    }
    if fields.arch != "qwen2":  # whose biases are not a matter of config.json
        biased = any("self_attn." in name and name.endswith("_proj.bias") for name in shapes)
        config["qkv_bias" if fields.arch == "qwen2moe" else "attention_bias"] = biased
    if fields.arch == "llama":
        config["mlp_bias"] = any(".mlp." in name and name.endswith("_proj.bias") for name in shapes)
    config |= _variants(fields) | _experts(fields)
    fields.check_all_read()
    return config | _tokens(fields.metadata)


def _head_dim(fields: Fields, hidden: int, heads: int) -> int:
    # as llama.cpp does: without key_length the heads share the width
    head_dim = fields.count("attention.key_length", hidden // heads)
    rotated = fields.count("rope.dimension_count", head_dim)
    values = fields.count("attention.value_length", head_dim)
    if rotated != head_dim or values != head_dim or head_dim % 2:
        raise CheckpointError(
            f"{fields.file}: heads with {head_dim} key features, {rotated} of them rotated, and {values} value "
            "features are not supported: all must be one even number"
        )
    return head_dim


def _variants(fields: Fields) -> dict[str, Any]:
    """Returns what makes a llama a Mistral or a Mixtral."""
    changed: dict[str, Any] = {}
    if fields.get("attention.sliding_window"):
        window = fields.count("attention.sliding_window")
        if fields.arch != "llama":
            raise CheckpointError(
                f"{fields.file}: {fields.arch}.attention.sliding_window is {window}; GGUF does not say of which layers"
            )
        changed = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
    if fields.arch == "llama" and fields.get("expert_count"):
        changed |= {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
        changed["num_local_experts"] = fields.count("expert_count")
    if fields.get("attention.causal") is False:
        raise CheckpointError(f"{fields.file}: {fields.arch}.attention.causal is false; only causal attention is known")
    return changed


def _experts(fields: Fields) -> dict[str, Any]:
    """Returns how many experts there are, how wide, and how their weights are made.

    What the file does not say is as llama.cpp does it: weights of a softmax, which are divided by their sum or not.
    """
    arch, renormalised = fields.arch, {"llama": True, "qwen2moe": False, "qwen3moe": True, "olmoe": False}
    if not fields.get("expert_count"):
        fields.get("expert_used_count")
        if ARCHITECTURES[arch][0] not in ("llama", "qwen2", "qwen3"):
            raise CheckpointError(f"{fields.file}: {arch}.expert_count is missing; a {arch} has experts")
        return {}
    norm, scale = fields.get("expert_weights_norm"), fields.get("expert_weights_scale")
    norm = renormalised.get(arch) if norm is None else norm
    if fields.get("expert_gating_func") not in (None, 1) or scale not in (None, 0, 1) or (arch == "llama" and not norm):
        raise CheckpointError(
            f"{fields.file}: experts weighed otherwise than by a softmax are not supported: {arch}.expert_gating_func "
            f"{fields.get('expert_gating_func')}, expert_weights_scale {scale}, expert_weights_norm {norm}"
        )
    used, width = fields.count("expert_used_count"), fields.count("feed_forward_length")
    found: dict[str, Any] = {"num_experts_per_tok": used}
    if arch != "llama":
        found |= {"num_experts": fields.count("expert_count"), "norm_topk_prob": bool(norm)}
    if arch in ("qwen2moe", "qwen3moe"):
        found["moe_intermediate_size"] = fields.count("expert_feed_forward_length", width // used)
        found |= {"decoder_sparse_step": 1, "mlp_only_layers": []}
    if arch == "qwen2moe":
        found["shared_expert_intermediate_size"] = fields.count("expert_shared_feed_forward_length", width)
    return found


def _scaling(fields: Fields, frequencies: Sequence[float] | None, theta: float, head_dim: int) -> dict[str, Any] | None:
    kind, factor = fields.get("rope.scaling.type"), fields.get("rope.scaling.factor")
    old = fields.get("rope.scale_linear")
    original = fields.get("rope.scaling.original_context_length")
    factor = old if factor is None else factor
    scales = kind != "none" and factor not in (None, 0, 1)  # a factor without a kind is linear, as in llama.cpp
    if frequencies is not None:
        if scales:
            raise CheckpointError(f"{fields.file}: rope_freqs.weight and {fields.arch}.rope.scaling at once")
        return llama3_scaling(fields.file, frequencies, theta, head_dim)
    if not scales and kind in (None, "none", "linear"):
        return None
    if kind in (None, "linear"):
        return {"rope_type": "linear", "factor": float(factor)}
    if kind == "yarn" and factor and original:
        return {"rope_type": "yarn", "factor": float(factor), "original_max_position_embeddings": original}
    raise CheckpointError(
        f"{fields.file}: rope scaling {kind!r} with factor {factor} and original context {original} is not supported; "
        "known: none, linear, and yarn with both"
    )


def llama3_scaling(file: Path, divisors: Sequence[float], theta: float, head_dim: int) -> dict[str, Any] | None:
    """Returns the scaling that ``rope_freqs.weight`` was made from, proved by making it again.

    GGUF keeps no parameters of Llama 3.1's scaling, only what each frequency is divided by. All models of that family
    were made with the same parameters but for the factor, which the slowest frequency shows.

    Raises:
        CheckpointError: it was made in another way.
    """
    if all(value == 1 for value in divisors):
        return None
    numbers = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    factor, context = float(max(divisors)), numbers["original_max_position_embeddings"]
    made = []
    for index in range(0, head_dim, 2):
        turns = context / (2 * math.pi) * theta ** (-index / head_dim)  # within the context it was trained with
        smooth = min(1.0, max(0.0, (turns - 1.0) / (4.0 - 1.0)))
        made.append(1 / ((1 - smooth) / factor + smooth))
    if len(made) != len(divisors) or any(abs(a - b) > 1e-3 * b for a, b in zip(made, divisors, strict=True)):
        raise CheckpointError(
            f"{file}: rope_freqs.weight is not what Llama 3.1's scaling by {factor:g} makes of {head_dim} features; "
            "other scalings cannot be told from it"
        )
    return {"rope_type": "llama3", "factor": factor, **numbers}


def _tokens(metadata: Mapping[str, Any]) -> dict[str, Any]:
    found = {f"{hf}_token_id": metadata.get(f"tokenizer.ggml.{gguf}_token_id") for gguf, hf in _TOKENS.items()}
    return {key: value for key, value in found.items() if value is not None}
