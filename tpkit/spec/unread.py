"""Fields of config.json that change what a model computes. A description that does not read one must not meet it.

A checkpoint whose config.json asks for, say, a soft cap would load without complaint into a description that knows of
none, and give wrong text. So these fields stop the build where they are set and not declared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

__all__ = ["unread_fields"]


def _set(value: Any) -> bool:
    return value is not None and value is not False


def _not_one(value: Any) -> bool:
    return value is not None and value != 1


def _is_false(value: Any) -> bool:
    return value is False


def _not_full(value: Any) -> bool:
    return isinstance(value, list) and any(entry != "full_attention" for entry in value)


_TELLING: dict[str, Callable[[Any], bool]] = {
    "alibi": _set,
    "attention_chunk_size": _set,
    "attention_multiplier": _set,
    "attention_sink": _set,
    "attn_logit_softcapping": _set,
    "clip_qkv": _set,
    "dim_model_base": _set,
    "embedding_multiplier": _not_one,
    "final_logit_softcapping": _set,
    "is_causal": _is_false,
    "layer_types": _not_full,
    "logit_scale": _not_one,
    "logits_scaling": _not_one,
    "n_routed_experts": _set,
    "num_experts": _set,
    "num_local_experts": _set,
    "parallel_attn": _set,
    "partial_rotary_factor": _not_one,
    "qk_layernorm": _set,
    "qkv_bias": _set,
    "query_pre_attn_scalar": _set,
    "residual_multiplier": _not_one,
    "rope_interleaved": _set,
    "rotary_pct": _not_one,
    "scale_depth": _not_one,
    "scale_emb": _not_one,
    "use_bidirectional_attention": _set,
    "use_mrope": _set,
    "use_parallel_residual": _set,
    "use_qk_norm": _set,
    "no_rope_layers": lambda value: isinstance(value, list) and not all(value),
    "rope_scaling": lambda value: (
        isinstance(value, Mapping) and value.get("rope_type", value.get("type")) not in (None, "default")
    ),
}
#: the newer home of rope settings
_NESTED = {
    "rope_scaling": ("rope_parameters",),
    "partial_rotary_factor": ("rope_parameters.partial_rotary_factor", "rope_scaling.partial_rotary_factor"),
}


def unread_fields(config: Mapping[str, Any], keys: Iterable[str]) -> list[tuple[str, Any]]:
    """Returns the fields, with their values, that a config.json sets and a description does not read.

    Args:
        config: the language model's part of config.json.
        keys: all keys of config.json that the description reads, nested ones dotted.
    """
    read = set(keys)
    found: list[tuple[str, Any]] = []
    for name, tells in _TELLING.items():
        unread = [key for key in (name, *_NESTED.get(name, ())) if key not in read]
        found.extend((key, value) for key in unread if (value := _at(config, key)) is not None and tells(value))
    return [*found, *_unread_of_rope(config, read), *_unread_of_layers(config, read)]


def _unread_of_rope(config: Mapping[str, Any], read: set[str]) -> list[tuple[str, Any]]:
    """Returns settings of rope that some layers have of their own, and a growing query scale, that are not read."""
    found: list[tuple[str, Any]] = []
    for name in ("rope_parameters", "rope_scaling"):
        rope = config.get(name)
        for key, value in rope.items() if isinstance(rope, Mapping) else ():
            path = f"{name}.{key}"
            if isinstance(value, Mapping) and value.get("rope_type", "default") != "default" and path not in read:
                found.append((path, value))
            if key == "llama_4_scaling_beta" and value and path not in read:
                found.append((path, value))
    return found


def _unread_of_layers(config: Mapping[str, Any], read: set[str]) -> list[tuple[str, Any]]:
    """Returns what ``per_layer_config`` says of layers, and a description does not read: each field's first layer."""
    layers = config.get("per_layer_config")
    if not isinstance(layers, Mapping) or not all(isinstance(fields, Mapping) for fields in layers.values()):
        return [("per_layer_config", layers)] if layers else []
    found: dict[str, tuple[str, Any]] = {}
    for number, fields in layers.items():
        for name, value in fields.items():
            if f"per_layer_config.*.{name}" not in read:
                found.setdefault(name, (f"per_layer_config.{number}.{name}", value))
    return list(found.values())


def _at(config: Mapping[str, Any], key: str) -> Any:
    head, _, rest = key.partition(".")
    value = config.get(head)
    if not rest:
        return value
    return _at(value, rest) if isinstance(value, Mapping) else None
