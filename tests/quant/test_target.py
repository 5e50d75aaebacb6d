"""Rules of quantisers name modules in several dialects: each as its writer means it."""

from __future__ import annotations

import pytest

from tpkit.errors import PluginError
from tpkit.quant import Target

QKV = "model.layers.1.self_attn.qkv_proj"
Q = Target(
    name="model.layers.1.self_attn.q_proj",
    aliases=(QKV,),
    siblings=("model.layers.1.self_attn.k_proj", "model.layers.1.self_attn.v_proj"),
)
UP = Target(
    name="model.layers.1.mlp.up_proj",
    aliases=("model.layers.1.mlp.gate_up_proj",),
    siblings=("model.layers.1.mlp.gate_proj",),
)


@pytest.mark.parametrize(
    ("pattern", "dialect", "hit"),
    [
        ("model.layers.1.self_attn.q_proj", "exact", True),
        ("q_proj", "exact", False),
        ("q_proj", "component", True),
        (".layers.1.self_attn.qkv_proj", "component", True),
        ("model.layers.*.self_attn", "component", True),
        ("layers.1", "component", True),
        ("ayers.1", "component", False),
        ("_proj", "component", False),
        ("self_attn.q", "component", False),
        ("self_attn.q", "substring", True),
        ("model.layers.1.", "prefix", True),
        ("layers.1.", "prefix", False),
        ("model.layers.1*", "glob", True),
        ("*q_proj", "glob", True),
        ("q_proj", "glob", False),
        ("re:.*q_proj", "exact", True),
        ("re:q_proj", "exact", False),
        ("re:.*qkv_proj", "component", True),
        (QKV, "exact", True),
    ],
)
def test_dialects(pattern: str, dialect: str, hit: bool) -> None:
    assert Q.matches([pattern], dialect) is hit  # type: ignore[arg-type]
    assert Q.match(["nothing", pattern], dialect) == (pattern if hit else None)  # type: ignore[arg-type]


def test_a_layer_is_not_one_whose_number_starts_alike() -> None:
    assert not Target(name="model.layers.10.mlp.up_proj").matches(["layers.1"])


def test_a_rule_for_one_part_is_not_one_for_the_packed_projection_that_contains_its_name() -> None:
    """ "gate" by substring means gate_proj (or a router), though up_proj is packed into gate_up_proj."""
    assert not UP.matches(["gate"], "substring")
    assert not UP.matches(["re:.*gate"], "exact")
    assert UP.matches(["gate_up_proj"], "substring")
    assert UP.matches(["re:.*gate_up"], "exact")


def test_lists_may_be_absent_and_expressions_broken() -> None:
    assert not Q.matches(None)
    with pytest.raises(PluginError, match=r"no regular expression"):
        Q.matches(["re:("])
