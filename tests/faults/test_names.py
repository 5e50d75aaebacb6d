"""Faults of mapping names on disk to packed layers, and of words and rules that mean nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.families import fuse
from tests.small import description, on_rank, plan, weights, write
from tpkit import LoadError, SpecError

L0 = "model.layers.0"


# names ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "vision.mm_up_proj.weight",
        "mtp.seq_proj.weight",
        f"{L0}.mlp.mm_up_proj.weight",
        f"{L0}.self_attn.v_proj_2.weight",
        f"{L0}.self_attn.x_q_proj.weight",
        "q_proj.weight",
        f"x.{L0}.self_attn.q_proj.weight",
    ],
)
def test_a_name_that_only_contains_another_is_left_alone(name: str, tmp_path: Path) -> None:
    tensors = weights() | {name: torch.zeros(32, 32)}
    with pytest.raises(LoadError) as caught:
        plan(write(tmp_path, tensors))
    assert caught.value.groups.keys() == {"not in the description"}
    assert caught.value.groups["not in the description"][0].startswith(f"{name} float32")
    planned = plan(write(tmp_path, tensors), source=description(ignore=[name]))
    assert planned.load.ignored.keys() == {name}


@pytest.mark.parametrize("last", ["weight.absmax", "weight_scale", "k_scale"])
def test_what_lies_below_a_projection_cannot_be_ignored(last: str, tmp_path: Path) -> None:
    name = f"{L0}.self_attn.q_proj.{last}"
    tensors = weights() | {name: torch.zeros(32, 32)}
    with pytest.raises(LoadError, match=r"cannot leave out what belongs to a projection"):
        plan(write(tmp_path, tensors), source=description(ignore=[f"model.layers.*.self_attn.q_proj.{last}"]))


def test_packed_names_that_contain_each_other(tmp_path: Path) -> None:
    """Parts called proj, q_proj and proj_q: none is taken for another."""
    names = dict(zip(("q", "k", "v"), ("proj", "q_proj", "qkv_proj_v"), strict=True))
    tensors = {}
    for name, tensor in weights().items():
        for part, other in names.items():
            if f".self_attn.{part}_proj." in name:
                name = name.replace(f"{part}_proj", other)
                break
        tensors[name] = tensor
    overrides = {"tree.model.layers.self_attn.qkv_proj.packs": list(names.values())}
    model = on_rank(write(tmp_path, tensors), 1, 2, overrides=overrides)
    wanted = on_rank(write(tmp_path / "b"), 1, 2)
    for name, parameter in wanted.named_parameters():
        assert torch.equal(model.get_parameter(name), parameter), name


@pytest.mark.parametrize("tp", [1, 2])
def test_what_was_saved_from_the_packed_model_is_loaded_again(tp: int, tmp_path: Path) -> None:
    saved = {name: tensor.clone() for name, tensor in on_rank(write(tmp_path)).state_dict().items()}
    assert saved.keys() == fuse(weights()).keys()
    again = write(tmp_path / "again", saved)
    for rank in range(tp):
        model = on_rank(again, rank, tp)
        for name, parameter in on_rank(tmp_path, rank, tp).named_parameters():
            assert torch.equal(model.get_parameter(name), parameter), name


def test_a_part_stored_beside_the_fused_tensor_names_both(tmp_path: Path) -> None:
    tensors = fuse(weights()) | {f"{L0}.self_attn.v_proj.weight": weights()[f"{L0}.self_attn.v_proj.weight"]}
    with pytest.raises(LoadError) as caught:
        plan(write(tmp_path, tensors))
    (line,) = caught.value.groups["stored both fused and apart"]
    assert f"{L0}.self_attn.v_proj" in line and f"{L0}.self_attn.qkv_proj" in line


def test_a_layer_that_packs_what_is_not_there_is_not_taken_for_loaded(tmp_path: Path) -> None:
    """One layer without gate and up: nothing of it counts as loaded, and nothing else goes in their place."""
    tensors = {name: tensor for name, tensor in weights().items() if f"{L0}.mlp." not in name or "down" in name}
    tensors[f"{L0}.mlp.fc1.weight"] = torch.zeros(128, 32)
    with pytest.raises(LoadError) as caught:
        plan(write(tmp_path, tensors))
    assert [line.split()[0] for line in caught.value.groups["missing"]] == [
        f"{L0}.mlp.gate_proj.weight",
        f"{L0}.mlp.up_proj.weight",
    ]
    assert f"{L0}.mlp.gate_up_proj.weight" in caught.value.groups["missing"][0]
    assert caught.value.groups["not in the description"][0].startswith(f"{L0}.mlp.fc1.weight")


def test_only_a_part_of_a_packed_tensor_is_missing(tmp_path: Path) -> None:
    tensors = weights()
    del tensors[f"{L0}.self_attn.v_proj.weight"]
    with pytest.raises(LoadError) as caught:
        plan(write(tmp_path, tensors))
    assert caught.value.groups.keys() == {"missing"} and len(caught.value.groups["missing"]) == 1


def test_ignore_rules_speak_of_names_on_disk(tmp_path: Path) -> None:
    """A rule for the packed name covers declared tensors as one for a part does, whatever form is stored."""
    for rule in (f"{L0}.self_attn.q_proj.weight", "model.layers.*.self_attn.k_proj.*"):
        with pytest.raises(SpecError, match="declared parameter"):
            plan(write(tmp_path), source=description(ignore=[rule]))


# plan and tree --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"tree.model.layers.self_attn.o_proj": {"stlye": "row"}}, "stlye"),
        ({"tree.model.layers.self_attn.o_proj": {"style": "row", "biass": True}}, "biass"),
        ({"tree.model.layers.self_attn.o_proj": {"style": "rwo"}}, "rwo"),
    ],
)
def test_a_word_that_means_nothing_is_refused(overrides: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=said) as caught:
        plan(write(tmp_path), overrides=overrides)
    assert "o_proj" in str(caught.value) and "did you mean" in str(caught.value)


def test_a_top_level_key_that_means_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="tp_plan"):
        plan(write(tmp_path), source=description(tp_plan={"blah": "row"}))


def test_a_rule_for_a_name_that_is_not_stored_is_both_missing_and_unexpected(tmp_path: Path) -> None:
    packs = {"tree.model.layers.self_attn.qkv_proj.packs": ["q_prj", "k_proj", "v_proj"]}
    with pytest.raises(LoadError) as caught:
        plan(write(tmp_path), overrides=packs)
    assert "q_prj.weight" in caught.value.groups["missing"][0] and "q_proj" in caught.value.groups["missing"][0]
    assert "q_proj.weight" in caught.value.groups["not in the description"][0]
    assert "did you mean" in caught.value.groups["not in the description"][0]


def test_a_layer_without_a_rule_is_unexpected(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"model.layers.1.linear_attn.in_proj.weight float32 \[8, 32\]"):
        plan(write(tmp_path, weights() | {"model.layers.1.linear_attn.in_proj.weight": torch.zeros(8, 32)}))


def test_a_module_that_no_formula_uses_is_refused(tmp_path: Path) -> None:
    tree = description()["tree"]
    tree["model"]["layers"]["forward"] = ["x + self_attn(input_layernorm(x))"]
    with pytest.raises(SpecError, match="mlp"):
        plan(write(tmp_path), source=description(tree=tree))
