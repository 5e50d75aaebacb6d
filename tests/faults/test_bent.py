"""Descriptions and configs bent a little: what is refused, and what is computed all the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tpkit
from tests import small_experts
from tests.small import CONFIG, on_rank, weights, write
from tpkit import CheckpointError, SpecError, UsageError
from tpkit.layers import ColumnParallelExperts, ForwardContext
from tpkit.params import LinearSpec, Out, ParamSpec
from tpkit.quant import QuantMethod
from tpkit.quant.target import Target

MOE = "tree.model.layers.block_sparse_moe"
ROUTER = {"role": "router", "style": "replicated"}


@pytest.mark.parametrize(
    ("path", "node", "problem"),
    [
        (f"{MOE}.gate", {**ROUTER, "stacked": 4}, "'router' of module 'moe' takes a single one, not 4"),
        (f"{MOE}.gate", {**ROUTER, "out_features": 7}, "the module around this one says its sizes"),
        (f"{MOE}.bias", {"role": "correction_bias", "parameter": [7]}, r"sizes \[7\], but .* needs \[8\]"),
        (
            f"{MOE}.extra",
            {"role": "shared", "module": "moe", "activation": "silu", "routing": {"score": "none", "top_k": 1},
             "gate": ROUTER, "experts": {"repeat": 2, "up": {"style": "column"}, "down": {"style": "row"}}},
            "'shared' of module 'moe' takes module mlp, not 'moe'",
        ),
        ("tree.model.embed_tokens", {"module": "embedding", "style": "vocab", "repeat": 2}, "looked up once"),
    ],
)  # fmt: skip
def test_a_part_that_cannot_be_meant_is_refused_before_anything_is_built(
    path: str, node: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    folder = small_experts.write(tmp_path / "model")
    with pytest.raises(SpecError, match=problem):
        tpkit.plan_model(tpkit.load_spec("mixtral", config=folder, overrides={path: node}), ranks=2)


def test_a_child_with_a_name_that_its_module_uses_itself_is_refused(tmp_path: Path) -> None:
    experts = {
        "repeat": "num_local_experts",
        "gate_up_proj": {"style": "merged_column", "packs": ["w1", "w3"]},
        "w2": {"style": "row"},
    }
    block = {
        "module": "moe", "activation": "hidden_act", "gate": ROUTER, "tp": experts,
        "routing": {"score": "softmax", "top_k": "num_experts_per_tok", "renormalize": True},
    }  # fmt: skip
    spec = tpkit.load_spec("mixtral", config=small_experts.write(tmp_path / "model"), overrides={MOE: block})
    with pytest.raises(SpecError, match="block_sparse_moe: Moe uses the name 'tp' itself"):
        tpkit.build(spec, dummy_weights=True)


def test_another_family_inside_a_wrapper_is_refused() -> None:
    inner = {**CONFIG, "model_type": "ministral3"}
    outer = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "text_config": inner}
    with pytest.raises(SpecError, match=r"text_config\.model_type: has a language model of ministral3"):
        tpkit.load_spec("mistral", config=outer)
    with pytest.raises(SpecError, match="text_config is 3; a mapping"):
        tpkit.load_spec("mistral", config={**outer, "text_config": 3})


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 4.0}}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "llama_4_scaling_beta": 0.1}},
    ],
)
def test_rope_of_some_layers_and_growing_queries_are_read_or_refused(rope: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match="this description does not read it"):
        tpkit.load_spec("llama", config={**CONFIG, **rope})


class Powers(QuantMethod):
    """Whole numbers with an exponent of two for each row, stored as bytes."""

    def create_weights(self, layer: LinearSpec) -> dict[str, ParamSpec]:
        from tpkit.params import In

        return {
            "weight": ParamSpec("int8", dims=(Out(), In())),
            "scale": ParamSpec("uint8", dims=(Out(),), powers=True),
        }


def test_an_exponent_that_is_no_number_is_refused_whatever_it_is_stored_as() -> None:
    layer = ColumnParallelExperts(4, 6, 3, bias=False, quant=Powers(), tp_rank=0, tp_size=1)
    scale = torch.full((3, 6), 127, dtype=torch.uint8)
    layer.load({"up_proj.weight": torch.ones(3, 6, 4, dtype=torch.int8), "up_proj.scale": scale})
    scale[2, 5] = 255
    with pytest.raises(CheckpointError, match=r"1 of 6 values on rank 0 are NaN or infinite \(stored as "):
        layer.load({"up_proj.weight": torch.ones(3, 6, 4, dtype=torch.int8), "up_proj.scale": scale})


@pytest.mark.parametrize(
    "pattern", ["*.5.gate_proj", "*.5.*", "e*.5", "exp?rts.5.gate_proj", "*s.5.gate_proj", "[5].up"]
)
def test_a_rule_that_may_mean_one_expert_is_compared_with_all(pattern: str) -> None:
    target = Target(name="model.layers.0.mlp.experts.*.gate_proj")
    assert 5 in target._told_apart(pattern, "component", 8)


def test_no_sink_at_all_is_minus_infinity(tmp_path: Path) -> None:
    sinks = {f"model.layers.{n}.self_attn.sinks": torch.full((4,), -torch.inf) for n in range(2)}
    words = {"tree.model.layers.self_attn.sinks": {"parameter": ["num_attention_heads"], "style": "per_head"}}
    ids = torch.tensor([[3, 1, 2]])
    with torch.inference_mode():
        plain = on_rank(write(tmp_path / "plain"))(ids)
        sunk = on_rank(write(tmp_path / "sunk", weights() | sinks), overrides=words)(ids)
    assert torch.allclose(plain, sunk, atol=1e-5)


def test_no_sequences_at_all_give_no_logits(tmp_path: Path) -> None:
    model = tpkit.build(
        tpkit.load_spec("mixtral", config=small_experts.write(tmp_path / "m")), checkpoint=tmp_path / "m"
    )
    assert model(torch.zeros(0, 3, dtype=torch.int64)).shape[:2] == (0, 3)


@pytest.mark.parametrize("ep", [None, "2", 2.0, True, 0])
def test_groups_are_counted_in_whole_numbers(ep: Any, tmp_path: Path) -> None:
    spec = tpkit.load_spec("mixtral", config=small_experts.write(tmp_path / "model"))
    with pytest.raises(UsageError, match=r"ep|groups"):
        tpkit.plan_model(spec, ranks=2, ep=ep)


def test_a_wrong_number_of_experts_does_not_spoil_the_right_one() -> None:
    with pytest.raises(tpkit.TpkitError, match="whole numbers are needed"):
        ColumnParallelExperts(8, 8, 5.0, bias=False, tp_rank=0, tp_size=1)  # type: ignore[arg-type]
    assert len(ColumnParallelExperts(8, 8, 5, bias=False, tp_rank=0, tp_size=1)) == 5


def test_an_expert_that_was_replaced_by_something_else_is_named() -> None:
    layer = ColumnParallelExperts(8, 8, 2, bias=False, tp_rank=0, tp_size=1)
    layer.add_module("1", torch.nn.Linear(8, 8))
    with pytest.raises(UsageError, match="expert 1 is a Linear"):
        list(layer)


def test_a_pass_keeps_what_is_left_to_itself() -> None:
    context = ForwardContext(1, torch.device("cpu"))
    with pytest.raises(tpkit.TpkitError):
        context.left("nothing")
