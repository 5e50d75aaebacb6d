"""Every family of experts and its variants by flags: the logits of transformers, with and without groups of ranks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tpkit
from tests.families import Families, Made, Tiny, rewrite, tensors_of
from tests.model.test_families import LLAMA3, ROPE, YARN, cases, differences, tiny
from tests.model.test_families_tp import TOLERANCE, off
from tests.ranks import Ranks
from tests.tiny_configs import EXPERTS

GROUPS = {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 3}
#: name -> family, fields of its config
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral-no-window": ("mixtral", {"sliding_window": None, "num_experts_per_tok": 1}),
    "olmoe-renormalized": ("olmoe", {"norm_topk_prob": True}),
    "olmoe-biased": ("olmoe", {"attention_bias": True}),
    "olmoe-clip": ("olmoe", {"clip_qkv": 0.5}),
    "qwen2_moe-renormalized": ("qwen2_moe", {"norm_topk_prob": True, "qkv_bias": False}),
    "qwen2_moe-every-second": ("qwen2_moe", {"decoder_sparse_step": 2}),
    "qwen2_moe-some-dense": ("qwen2_moe", {"mlp_only_layers": [1], "norm_topk_prob": True}),
    "qwen2_moe-windows": (
        "qwen2_moe", {
            "use_sliding_window": True, "sliding_window": 6, "layer_types": ["full_attention", "sliding_attention"],
        },
    ),
    "qwen3_moe-renormalized": ("qwen3_moe", {"norm_topk_prob": True, "attention_bias": True}),
    "qwen3_moe-every-second": ("qwen3_moe", {"decoder_sparse_step": 2, "mlp_only_layers": [3], "num_hidden_layers": 4}),
    "qwen3_moe-window": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 8}),
    "granitemoe-biased": ("granitemoe", {"attention_bias": True, "num_experts_per_tok": 3, "residual_multiplier": 0.7}),
    "granitemoeshared-none": ("granitemoeshared", {"shared_intermediate_size": 0}),
    "granitemoe-one": ("granitemoe", {"num_local_experts": 1, "num_experts_per_tok": 1}),
    "gpt_oss-narrow": ("gpt_oss", {"intermediate_size": 2}),
    "qwen2_moe-narrow": ("qwen2_moe", {"moe_intermediate_size": 1, "shared_expert_intermediate_size": 2}),
    "gpt_oss-swiglu": ("gpt_oss", {"swiglu_alpha": 0.7, "swiglu_limit": 0.5, "sliding_window": 3}),
    "gpt_oss-rope": (
        "gpt_oss", {"rope_parameters": {**YARN, "truncate": False}, "attention_bias": False, "num_experts_per_tok": 4},
    ),
    "minimax_m2-partial": ("minimax_m2", {"rotary_dim": 12, "num_experts_per_tok": 3}),
    "minimax_m2-partial-rope": ("minimax_m2", {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}}),
    "glm4_moe-groups": ("glm4_moe", {**GROUPS, "routed_scaling_factor": 2.5}),
    "glm4_moe-groups-plain": ("glm4_moe", {**GROUPS, "norm_topk_prob": False, "topk_group": 3}),
    "glm4_moe-shared": ("glm4_moe", {"n_shared_experts": 2, "use_qk_norm": True, "attention_bias": True}),
    "glm4_moe-dense-first": ("glm4_moe", {"first_k_dense_replace": 2, "partial_rotary_factor": 0.25}),
    "llama4-every-second": ("llama4_text", {"interleave_moe_layer_step": 2}),
    "llama4-listed": ("llama4_text", {"moe_layers": [0, 3], "no_rope_layers": [1, 0, 0, 1], "num_experts_per_tok": 1}),
    "llama4-plain": ("llama4_text", {"use_qk_norm": False, "attn_temperature_tuning": False, "attention_bias": True}),
    "llama4-rope": ("llama4_text", {"rope_parameters": LLAMA3, "attn_scale": 0.5, "attention_chunk_size": 5}),
}  # fmt: skip


@pytest.mark.parametrize(("case", "tp"), cases(EXPERTS, VARIANTS))
def test_logits_are_those_of_transformers(case: Tiny, tp: int, families: Families, ranks: Ranks) -> None:
    for plain, cached in ranks(tp).run(differences, families.make(case)):
        assert max(plain, cached) < TOLERANCE, f"{plain:.1e} at once, {cached:.1e} with a cache"


#: number of ranks, of groups; 3 divides the number of experts nowhere
SHARED = [(2, 2), (4, 2), (3, 2), (3, 3), (5, 3), (5, 5)]
#: of each kind of experts one in the fast suite: shared ones, shared ones behind a gate, biases, groups, weighed inputs
FAST = {
    ("mixtral", 2, 2), ("qwen2_moe", 3, 2), ("gpt_oss", 4, 2), ("gpt_oss", 3, 3), ("glm4_moe", 4, 2),
    ("llama4_text", 3, 2), ("qwen3_moe", 3, 3),
}  # fmt: skip


def shared_cases() -> list[Any]:
    return [
        pytest.param(family, tp, ep, marks=[] if (family, tp, ep) in FAST else [pytest.mark.slow])
        for family in EXPERTS
        for tp, ep in SHARED
    ]


@pytest.mark.parametrize(("family", "tp", "ep"), shared_cases())
def test_groups_of_ranks_that_share_the_experts(
    family: str, tp: int, ep: int, families: Families, ranks: Ranks
) -> None:
    for plain, cached in ranks(tp).run(differences, families.make(tiny(family, {})), "", ep):
        assert max(plain, cached) < TOLERANCE, f"{plain:.1e} at once, {cached:.1e} with a cache"


@pytest.mark.parametrize(("tp", "ep"), [(5, 5), pytest.param(5, 4, marks=pytest.mark.slow)])
def test_groups_without_any_expert(tp: int, ep: int, families: Families, ranks: Ranks) -> None:
    """Three experts, each behind a bias, for more groups than that."""
    case = tiny("gpt_oss", {"num_local_experts": 3})
    for plain, cached in ranks(tp).run(differences, families.make(case), "", ep):
        assert max(plain, cached) < TOLERANCE, f"{plain:.1e} at once, {cached:.1e} with a cache"


@pytest.mark.parametrize("family", ["glm4_moe", "minimax_m2"])
def test_the_corrections_in_the_checkpoints_are_not_zero(family: str, families: Families) -> None:
    tensors = tensors_of(families.make(tiny(family, {})).folder)
    found = [tensor for name, tensor in tensors.items() if name.endswith("e_score_correction_bias")]
    assert found and all(tensor.abs().min() > 0 for tensor in found)


def test_windows_of_a_config_without_a_list_of_layers(tmp_path: Path, families: Families) -> None:
    """Every second layer below max_window_layers, as transformers then lists them."""
    fields = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 3, "num_hidden_layers": 5}
    case = tiny("qwen2_moe", fields)
    folder = rewrite(families.copy(case, tmp_path / "unlisted"), layer_types=...)
    assert "layer_types" in json.loads((families.make(case).folder / "config.json").read_text())
    made = replace(families.make(case), folder=folder)
    assert max(differences(made)) < TOLERANCE


def test_experts_that_no_token_chooses(families: Families, ranks: Ranks) -> None:
    """One token alone goes to two of eight experts: most groups have nothing to multiply."""
    made = families.make(tiny("qwen3_moe", {}))
    one = replace(made, ids=made.ids[:1, :1], logits=made.logits[:1, :1])
    for found in ranks(3).run(single, one, 3):
        assert found < TOLERANCE


def single(made: Made, ep: int) -> float:
    spec = tpkit.load_spec(made.tiny.description, config=made.folder)
    model = tpkit.build(spec, checkpoint=made.folder, ep=ep)
    with torch.inference_mode():
        return off(model(made.ids), made.logits)
