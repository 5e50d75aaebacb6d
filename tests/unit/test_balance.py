"""Nothing that can be divided is replicated, and what is divided is even to within one granule."""

from __future__ import annotations

from math import prod

import hypothesis.strategies as st
from hypothesis import given, settings

from tpkit.planning import plan_model
from tpkit.spec import BoundSpec, load_spec


@st.composite
def _specs(draw: st.DrawFn) -> BoundSpec:
    kv, ratio = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    config = {
        "num_attention_heads": kv * ratio,
        "num_key_value_heads": kv,
        "head_dim": draw(st.sampled_from([2, 6, 16])),
        "hidden_size": draw(st.integers(1, 8)) * kv * ratio,
        "intermediate_size": draw(st.integers(1, 300)),
        "vocab_size": draw(st.integers(1, 300)),
        "num_hidden_layers": 1,
        "attention_bias": True,
        "mlp_bias": True,
    }
    known = {"llama": config, "qwen3": {k: v for k, v in config.items() if k != "mlp_bias"}}
    family = draw(st.sampled_from(sorted(known)))
    return load_spec(family, config={"model_type": family, **known[family]})


@settings(max_examples=60, deadline=None)
@given(_specs(), st.integers(1, 9))
def test_only_norms_row_biases_and_kv_replicas_are_held_more_than_once(spec: BoundSpec, ranks: int) -> None:
    plan = plan_model(spec, ranks=ranks, dtype="float32")
    for layer in plan.load.layers:
        for name, _ in layer.spec.params:
            held = sum(local[name].numel for local in layer.geometry.local)
            extra = held - prod(layer.geometry.full[name])
            whole_everywhere = not layer.spec.in_ or (layer.spec.style == "row" and name == "bias")
            if whole_everywhere:
                assert extra == (ranks - 1) * prod(layer.geometry.full[name])
            elif layer.spec.style == "qkv":
                shares = [layer.shares(layer.spec.out, rank)[0] for rank in range(ranks)]
                replicas = sum(s.groups for s in shares if s is not None and not s.owner)
                row = prod(layer.geometry.full[name][1:])
                assert extra == 2 * replicas * spec.values["head_dim"] * row  # k and v of a replicated head
                assert ranks > spec.values["num_key_value_heads"] or replicas == 0
            else:
                assert extra == 0


@settings(max_examples=60, deadline=None)
@given(_specs(), st.integers(1, 9))
def test_width_and_vocabulary_are_even_to_one_unit_and_heads_to_one_group(spec: BoundSpec, ranks: int) -> None:
    plan = plan_model(spec, ranks=ranks, dtype="float32")
    for layer in plan.load.layers:
        for axis in layer.spec.axes():
            sizes = [share.units for share in layer.division[axis]]
            groups = axis.groups or axis.units
            step = 1 if axis.groups is None else axis.units // groups if ranks <= groups else None
            if step is not None:
                assert max(sizes) - min(sizes) <= step
