"""``tpkit init`` drafts experts: all tensors are bound, and where guesses are right the logits are transformers'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tpkit
from tests import small
from tests.cli.test_init import Capture, fits, fitting
from tests.families import Families, Tiny, rewrite
from tpkit.drafting import draft

IDENTITY = {"architectures": ["NewForCausalLM"], "model_type": "newish"}
#: what a gpt_oss computes, in place of what is guessed; each is among the questions
ANSWERS = (
    ("activation: hidden_act", "activation: {kind: clamped_swiglu, alpha: 1.702, limit: 7.0}"),
    ("  hidden_act: silu\n", ""),
    ("fused: [gate, up]", "fused: {per: channel, order: [gate, up]}"),
)
#: what `tpkit check` refuses until a description reads it: it is no matter of experts
UNREAD = {"attention_chunk_size": ..., "layer_types": ..., "no_rope_layers": ..., "use_qk_norm": ...}


def taken(families: Families, tiny: Tiny, to: Path, **fields: Any) -> Path:
    """Returns a copy of a checkpoint that no installed description claims."""
    return rewrite(families.copy(tiny, to), **IDENTITY, **fields)


def difference(families: Families, tiny: Tiny, description: Path, folder: Path) -> float:
    made = families.make(tiny)
    model = tpkit.build(tpkit.load_spec(str(description), config=folder), checkpoint=folder)
    with torch.no_grad():
        return float((model(made.ids).float() - made.logits).abs().max())


@pytest.mark.parametrize(
    ("family", "written"),
    [
        ("mixtral", ["num_experts: {from: num_local_experts, default: 4}", "repeat: num_experts", "packs: [w1, w3]"]),
        ("olmoe", ["renormalize: norm_topk_prob", "gate: {role: router, style: replicated}"]),
        ("qwen3_moe", ["width: moe_intermediate_size", "{score: softmax, top_k: num_experts_per_tok"]),
        ("qwen2_moe", ["width: shared_expert_intermediate_size", "{role: shared_gate, style: replicated}"]),
        ("granitemoe", ["stacked: num_experts", "layer: {role: router, style: replicated}", "1 / logits_scaling"]),
        ("minimax_m2", ["{role: correction_bias, parameter: [num_experts], dtype: float32}", "score: sigmoid"]),
        ("glm4_moe", ["- when: layer >= first_k_dense_replace", "width: n_shared_experts * moe_intermediate_size"]),
    ],
)
def test_guesses_that_are_right(
    family: str, written: list[str], families: Families, tmp_path: Path, capsys: Capture
) -> None:
    tiny = Tiny(family=family)
    folder = taken(families, tiny, tmp_path / "c")
    said, text = fitting(capsys, folder, tmp_path / "out.yaml")
    assert [each for each in written if each not in text] == []
    for about in ("weighed by these scores", "apply_to: input", "compute: float32"):
        assert about in said
    assert difference(families, tiny, tmp_path / "out.yaml", folder) < 1e-4


def test_answers_to_the_questions_make_a_stack_right(families: Families, tmp_path: Path, capsys: Capture) -> None:
    tiny, out = Tiny(family="gpt_oss"), tmp_path / "out.yaml"
    folder = taken(families, tiny, tmp_path / "c")
    said, text = fitting(capsys, folder, out)
    assert "fused: [gate, up], bare: true, bias: true, transposed: true" in text
    assert "router: {style: replicated, bias: true}" in text
    assert "do both take turns" in said
    assert "swiglu_limit" in said
    for guessed, right in ANSWERS:
        assert guessed in text
        text = text.replace(guessed, right)
    out.write_text(text)
    fits(capsys, out, folder)
    assert difference(families, tiny, out, folder) < 1e-4


@pytest.mark.parametrize("step", [1, 2])
def test_a_stack_with_shared_experts(step: int, families: Families, tmp_path: Path, capsys: Capture) -> None:
    tiny = Tiny(family="llama4_text", fields=f'{{"interleave_moe_layer_step": {step}}}')
    folder = taken(families, tiny, tmp_path / "c", moe_layers=..., **UNREAD)
    said, text = fitting(capsys, folder, tmp_path / "out.yaml")
    assert "fused: [gate, up], bare: true, transposed: true" in text
    assert "role: shared" in text
    if step == 2:
        assert "- when: nth_layer" in text
        assert "nth_layer: {every: interleave_moe_layer_step}" in text
        assert "width: dense_intermediate_size" in text
    assert "renormalize: true` is guessed" in said


SPARSE = {"decoder_sparse_step": 2, "mlp_only_layers": [3]}


@pytest.mark.parametrize(
    ("fields", "condition", "asked"),
    [
        ({}, "nth_layer and layer not in mlp_only_layers", False),
        ({"mlp_only_layers": [0, 2, 3, 4]}, "layer not in mlp_only_layers", False),
        ({"decoder_sparse_step": ..., "sparse_layers": [1, 5]}, "layer in sparse_layers", False),
        ({"decoder_sparse_step": ..., "moe_layer_freq": [0, 1, 0, 0, 0, 1]}, "has_experts", False),
        ({"decoder_sparse_step": ..., "mlp_only_layers": ...}, "layer not in dense_layers", True),
    ],
)
def test_layers_that_differ(
    fields: dict[str, Any], condition: str, asked: bool, families: Families, tmp_path: Path, capsys: Capture
) -> None:
    tiny = Tiny(family="qwen3_moe", layers=6, fields='{"decoder_sparse_step": 2, "mlp_only_layers": [3]}')
    folder = taken(families, tiny, tmp_path / "c", **fields)
    said, text = fitting(capsys, folder, tmp_path / "out.yaml")
    assert f"- when: {condition}\n" in text
    assert ("layers [0, 2, 3, 4] are dense" in said) is asked
    assert "copies of model.layers have mlp" not in said
    assert difference(families, tiny, tmp_path / "out.yaml", folder) < 1e-4


def shapes(experts: dict[str, Any], **further: Any) -> dict[str, Any]:
    """Returns shapes of a model of two layers, with experts for its feed-forward."""
    found: dict[str, Any] = {n: tuple(t.shape) for n, t in small.weights().items() if ".mlp." not in n}
    for layer in range(2):
        found |= {f"model.layers.{layer}.mlp.{name}": shape for name, shape in {**experts, **further}.items()}
    return found


STACK = {"gate.weight": (4, 32), "experts.gate_up_proj": (4, 48, 32), "experts.down_proj": (4, 32, 24)}
#: last parts of the names of one quantised stack
CODED = ("blocks", "scales", "bias")


def asked(made: Any, about: str) -> bool:
    return any(about in question for question in made.questions)


@pytest.mark.parametrize(
    ("up", "down", "transposed", "square"),
    [
        ((4, 48, 32), (4, 32, 24), False, False),
        ((4, 32, 48), (4, 24, 32), True, False),
        ((4, 32, 32), (4, 16, 32), True, False),
        ((4, 32, 64), (4, 32, 32), True, False),
        (None, None, False, True),
    ],
    ids=["out-in", "in-out", "square-up", "square-down", "unknown"],
)
def test_how_a_stack_lies(up: Any, down: Any, transposed: bool, square: bool) -> None:
    stack = {"gate.weight": up and (4, 32), "experts.gate_up_proj": up, "experts.down_proj": down}
    made = draft({**small.CONFIG, **IDENTITY, "num_experts": 4}, shapes(stack), "here")
    assert ("transposed: true" in made.text.partition("tree:")[2]) is transposed
    assert asked(made, "`transposed: true`") is square
    assert "stacked: num_experts" in made.text


def test_what_config_json_tells_of_the_routing() -> None:
    routing = {
        "scoring_func": "sigmoid", "moe_topk": 2, "n_group": 2, "topk_group": 1, "norm_topk_prob": False,
        "routed_scaling_factor": 2.5, "num_experts": 4,
    }  # fmt: skip
    made = draft({**small.CONFIG, **IDENTITY, **routing}, shapes(STACK), "here")
    assert "num_experts_per_tok: {from: moe_topk, default: 2}" in made.text
    assert (
        "{score: scoring_func, top_k: num_experts_per_tok, renormalize: norm_topk_prob, groups: n_group, "
        "top_groups: topk_group, group_score: max, scale: routed_scaling_factor}"
    ) in made.text
    assert asked(made, "ranked by its best score")
    assert asked(made, "renormalised or not")
    assert not asked(made, "what do the router's logits become")
    assert made.questions[-1].endswith("the draft does not read: intermediate_size: 64")


def test_what_is_not_understood_beside_experts_is_asked() -> None:
    odd = {"gate.weight": (4, 32), "norm.weight": (32,), "scale": (4,), "second_router.weight": (4, 32)}
    made = draft({**small.CONFIG, **IDENTITY, "num_experts": 4, "top_k": 1}, shapes({**STACK, **odd}), "here")
    assert asked(made, "mlp: not understood and left out: norm, second_router, scale")
    made = draft({**small.CONFIG, **IDENTITY}, shapes(STACK), "here")
    assert asked(made, "num_experts: config.json has no such field under a known name (4 by the shapes")
    assert asked(made, "num_experts_per_tok: config.json has no such field")
    made = draft({**small.CONFIG, **IDENTITY}, shapes({k: v for k, v in STACK.items() if "gate." not in k}), "here")
    assert asked(made, "no router was recognised")


def test_names_of_packed_codes_stand_for_a_stack() -> None:
    names = ["gate.weight", *(f"experts.{name}_{last}" for name in ("gate_up_proj", "down_proj") for last in CODED)]
    made = draft({**small.CONFIG, **IDENTITY, "num_experts": 4}, shapes(dict.fromkeys(names)), "here")
    assert "gate_up_proj: {style: merged_column, fused: [gate, up], bare: true, bias: true}" in made.text
    assert asked(made, "Shapes are unknown")


def test_a_correction_in_a_module_of_its_own() -> None:
    made = draft({**small.CONFIG, **IDENTITY}, shapes(STACK, **{"statics.e_bias": (4,)}), "here")
    assert "statics:\n          e_bias: {role: correction_bias" in made.text
    assert asked(made, "correction bias: statics.e_bias is taken for one")


def test_layers_after_the_last_are_ignored_and_asked() -> None:
    tensors = shapes(STACK)
    tensors |= {n.replace("layers.1.", "layers.2."): s for n, s in tensors.items() if "layers.1." in n}
    tensors["model.layers.2.eh_proj.weight"] = (32, 64)
    made = draft({**small.CONFIG, **IDENTITY, "num_experts": 4}, tensors, "here")
    assert "model.layers.2.**" in made.text
    assert asked(made, "model.layers.2 and later have parts")
    assert not asked(made, "copies of model.layers have")
