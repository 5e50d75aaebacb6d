"""Every described family and its variants by flags: the logits of transformers, at once and piece by piece."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
import torch

import tpkit
from tests.families import Families, Made, Tiny
from tests.model.test_families_tp import off
from tests.ranks import Ranks
from tests.tiny_configs import GROUPED, WHOLE

#: relative to the largest logit, in float32
TOLERANCE = 1e-4
#: what released models of a family do
TIED = {
    "gemma", "gemma2", "gemma3_text", "cohere", "cohere2", "gpt2", "opt", "bloom", "falcon", "mpt", "gpt_bigcode",
    "granite", "smollm3", "ernie4_5", "hunyuan_v1_dense", "starcoder2",
}  # fmt: skip
ROPE = {"rope_theta": 1000.0}
YARN = {**ROPE, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    **ROPE, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
LONG = {
    **ROPE, "rope_type": "longrope", "short_factor": [1.0 + n / 8 for n in range(8)],
    "long_factor": [2.0 + n for n in range(8)],
}  # fmt: skip
LOCAL_GLOBAL = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "linear", "factor": 8.0, **ROPE},
}
#: name -> family, fields of its config
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon-40b": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 3}),
    "falcon-11b": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 3, "num_ln_in_parallel_attn": 1}),
    "falcon-rw": ("falcon", {"alibi": True, "bias": True, "parallel_attn": False, "multi_query": False}),
    "opt-350m": ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 48}),
    "gpt_neox-sequential": ("gpt_neox", {"use_parallel_residual": False}),
    "stablelm-parallel": ("stablelm", {"use_parallel_residual": True, "use_qkv_bias": True}),
    "bloom-residual-after-norm": ("bloom", {"apply_residual_connection_post_layernorm": True}),
    "cohere-qk_norm": ("cohere", {"use_qk_norm": True}),
    "mpt-clip": ("mpt", {"attn_config": {"clip_qkv": 0.5}}),
    "olmo-clip": ("olmo", {"clip_qkv": 0.5}),
    "gemma2-caps": ("gemma2", {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 2.0}),
    "gemma3-linear": ("gemma3_text", {"rope_parameters": LOCAL_GLOBAL}),
    "gemma3-local": (
        "gemma3_text",
        {"rope_parameters": {**LOCAL_GLOBAL, "sliding_attention": {**LOCAL_GLOBAL["full_attention"], "factor": 4.0}}},
    ),
    "olmo3-local": (
        "olmo3",
        {"rope_parameters": {**LOCAL_GLOBAL, "sliding_attention": {**LOCAL_GLOBAL["full_attention"], "factor": 4.0}}},
    ),
    "gemma-relu": ("gemma", {"hidden_act": "relu"}),
    "gemma-legacy-gelu": ("gemma", {"hidden_act": "gelu"}),
    "cohere2-wide-heads": ("cohere2", {"head_dim": 24}),
    "exaone4-default-window": ("exaone4", {"sliding_window": 4096}),
    "olmo3-yarn": ("olmo3", {"rope_parameters": {**LOCAL_GLOBAL, "full_attention": YARN}}),
    "exaone4-no-window": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "phi3-longrope-short": (
        "phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 32, "sliding_window": None},
    ),
    "phi3-longrope-long": (
        "phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 4, "sliding_window": None},
    ),
    "phi3-partial": ("phi3", {"partial_rotary_factor": 0.75, "sliding_window": None}),
    "phi-qk_norm": ("phi", {"qk_layernorm": True}),
    "llama-biased": ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    "llama-linear": ("llama", {"rope_parameters": {**ROPE, "rope_type": "linear", "factor": 4.0}}),
    "llama-yarn": ("llama", {"rope_parameters": YARN}),
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama-dynamic": ("llama", {"rope_parameters": {**ROPE, "rope_type": "dynamic", "factor": 4.0}}),
    "hunyuan-alpha": (
        "hunyuan_v1_dense", {"rope_parameters": {**ROPE, "rope_type": "dynamic", "factor": 1.0, "alpha": 50.0}},
    ),
    "gpt_bigcode-heads": ("gpt_bigcode", {"multi_query": False}),
    "gpt2-inverse-layer": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    "starcoder2-no-bias": ("starcoder2", {"use_bias": False, "sliding_window": None}),
}  # fmt: skip


def tiny(family: str, fields: dict[str, Any]) -> Tiny:
    return Tiny(
        family=family, heads=9, kv=3, ffn=136, vocab=257, hidden=144, tied=family in TIED, fields=json.dumps(fields)
    )


def differences(made: Made, description: str = "", ep: int = 1) -> tuple[float, float]:
    """Builds the model on all ranks; returns the differences at once, and with a cache one by one after 5 tokens."""
    spec = tpkit.load_spec(description or made.tiny.description, config=made.folder)
    model = tpkit.build(spec, checkpoint=made.folder, ep=ep)
    with torch.inference_mode():
        cache = model.new_cache(*made.ids.shape)
        pieces = [model(piece, cache) for piece in made.ids.split([5, *[1] * 9], dim=1)]
        return off(model(made.ids), made.logits), off(torch.cat(pieces, dim=1), made.logits)


def cases(families: Iterable[str], variants: Mapping[str, tuple[str, dict[str, Any]]]) -> list[Any]:
    """On 3 ranks always, on other numbers in the whole suite."""
    plain: dict[str, tuple[str, dict[str, Any]]] = {family: (family, {}) for family in families}
    return [
        pytest.param(tiny(*case), tp, marks=[] if tp == 3 else [pytest.mark.slow], id=f"{name}-tp{tp}")
        for name, case in (plain | dict(variants)).items()
        for tp in (3, 1, 2, 4, 5)
    ]


@pytest.mark.parametrize("family", ["qwen3", "falcon", "glm", "olmoe"])
def test_frequencies_follow_the_length(family: str, families: Families, ranks: Ranks) -> None:
    """At once: with a cache, keys keep the frequencies of the length at which they were computed."""
    rope = {**ROPE, "rope_type": "dynamic", "factor": 4.0}
    made = families.make(tiny(family, {"rope_parameters": rope, "max_position_embeddings": 8}))
    for plain, _ in ranks(3).run(differences, made):
        assert plain < TOLERANCE


@pytest.mark.parametrize(("case", "tp"), cases(GROUPED | WHOLE, VARIANTS))
def test_logits_are_those_of_transformers(case: Tiny, tp: int, families: Families, ranks: Ranks) -> None:
    for plain, cached in ranks(tp).run(differences, families.make(case)):
        assert max(plain, cached) < TOLERANCE, f"{plain:.1e} at once, {cached:.1e} with a cache"
