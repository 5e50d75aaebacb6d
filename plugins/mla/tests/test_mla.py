"""One rank's numbers against transformers, the plan of many ranks, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import tpkit
from plugins.mla.tests.tiny import CASES, DENSE, TOLERANCE, Made, cached, differences, load, off
from tpkit import CheckpointError, SpecError, UsageError
from tpkit.modules import Child, RopeOptions
from tpkit_mla import Mla, MlaOptions
from tpkit_mla.layer import LatentAttention

TURNED = "{pairs: [{when: rope_interleave, is: interleaved}, {is: half}], max_length: max_position_embeddings}"
SIZES: dict[str, Any] = {
    "heads": 6, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10,
}  # fmt: skip


def described(**replaced: str) -> dict[str, Any]:
    """Returns the description with words of its attention replaced, as YAML; "" takes one away."""
    import yaml

    tree = yaml.safe_load(DENSE.read_text())
    attention = tree["tree"]["model"]["layers"]["self_attn"]
    for word, text in replaced.items():
        attention.pop(word, None)
        if text:
            attention[word] = yaml.safe_load(text)
    return tree


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers(name: str, checkpoint: Callable[[str], Made]) -> None:
    assert max(differences(checkpoint(name))) < TOLERANCE


@pytest.mark.parametrize("absorbs", [True, False])
def test_absorbed_and_expanded_are_the_same(
    absorbs: bool, checkpoint: Callable[[str], Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LatentAttention, "_absorbs", lambda *_: absorbs)
    assert max(differences(checkpoint("v3-yarn"))) < TOLERANCE


def test_which_is_less_work(checkpoint: Callable[[str], Made]) -> None:
    layer = load(checkpoint("v3")).get_submodule("model.layers.0.self_attn")
    assert [layer._absorbs(1, total) for total in (1, 2, 100)] == [False, True, True]
    assert not layer._absorbs(50, 50)
    layer.rank, layer.nope, layer.rope, layer.value = 512, 128, 64, 128  # of the large models
    assert [layer._absorbs(new, 10_000) for new in (1, 64, 256)] == [True, True, False]


def test_the_cache_holds_the_latent_alone(checkpoint: Callable[[str], Made]) -> None:
    model = load(checkpoint("v3"))
    cache = model.new_cache(2, 20)
    assert [tuple(keys.shape) for keys in cache.keys] == [(2, 1, 20, 16 + 8)] * 2
    assert all(values.numel() == 0 for values in cache.values)


def test_a_bias_of_kv_b_is_not_lost(tmp_path: Path, checkpoint: Callable[[str], Made]) -> None:
    made = checkpoint("v3")
    tensors = load_file(made.folder / "model.safetensors")
    for layer in range(2):
        tensors[f"model.layers.{layer}.self_attn.kv_b_proj.bias"] = torch.randn(6 * 22)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((made.folder / "config.json").read_text())
    words = "{style: merged_column, fused: {per: head, order: [k_nope, v]}, bias: true}"
    spec = tpkit.load_spec(described(kv_b_proj=words), config=tmp_path)
    model = tpkit.build(spec, checkpoint=tmp_path)
    with torch.inference_mode():
        plain, single = model(made.ids), cached(model, made.ids, 5, *[1] * 9)
    assert off(plain, made.logits) > 0.01
    assert off(single, plain) < TOLERANCE


def test_bfloat16(checkpoint: Callable[[str], Made]) -> None:
    made = checkpoint("v3-yarn")
    model = load(made, dtype="bfloat16")
    with torch.inference_mode():
        assert off(model(made.ids), made.logits) < 0.05
        assert off(cached(model, made.ids, 5, *[1] * 9), made.logits) < 0.05


@pytest.mark.parametrize(("heads", "ranks"), [(6, 4), (2, 3), (7, 8)])
def test_what_each_rank_holds(heads: int, ranks: int) -> None:
    spec = tpkit.load_spec(DENSE, config={"model_type": "deepseek_v3", "num_attention_heads": heads})
    plan = tpkit.plan_model(spec, ranks=ranks)
    path = "model.layers.0.self_attn"
    layers = {name: plan.layers[f"{path}.{name}"] for name in ("q_b_proj", "kv_b_proj", "o_proj", "q_a_proj")}
    per_rank = [layers["o_proj"].sizes(layers["o_proj"].spec.in_, rank)[0] // 10 for rank in range(ranks)]
    assert sum(per_rank) == heads and max(per_rank) - min(per_rank) <= 1
    for rank, own in enumerate(per_rank):
        found = {name: layer.sizes(layer.spec.out, rank) for name, layer in layers.items()}
        assert list(found["q_b_proj"]) == [own * 12, own * 8] and list(found["kv_b_proj"]) == [own * 12, own * 10]
        assert list(found["q_a_proj"]) == [24]


def test_the_scale_of_the_scores() -> None:
    base = 20**-0.5
    assert MlaOptions(**SIZES).score_scale == pytest.approx(base)
    assert MlaOptions(**SIZES, scale=0.3).score_scale == 0.3

    def scaled(scaling: dict[str, Any], **lengths: int) -> float:
        rope = RopeOptions(pairs="half", theta=100.0, scaling={"rope_type": "yarn", **scaling}, **lengths)
        return MlaOptions(**SIZES, rope=rope).score_scale

    mscale = 1 + 0.1 * 0.9 * math.log(4)
    own = {"original_max_position_embeddings": 32, "mscale_all_dim": 0.9}
    assert scaled({**own, "factor": 4.0}) == pytest.approx(base * mscale**2)
    assert scaled(own, max_length=128) == pytest.approx(base * mscale**2)
    assert scaled({"mscale_all_dim": 0.9}, original_length=32, max_length=128) == pytest.approx(base * mscale**2)
    assert scaled({**own, "factor": 4.0, "mscale_all_dim": 0.0}) == pytest.approx(base)
    assert scaled({**own, "factor": 1.0}) == pytest.approx(base)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"q_b_proj": ""}, "with q_lora_rank 24 it needs q_b_proj"),
        ({"kv_a_layernorm": ""}, "kv_a_layernorm"),
        ({"kv_a_layernorm": "{norm: rms}"}, "say what it goes over: kv_lora or q_lora"),
        ({"kv_a_layernorm": "{norm: rms, over: head}"}, "'head' is not known"),
        ({"kv_b_proj": "{style: merged_column, fused: {per: kv_head, order: [k_nope, v]}}"}, "per is one of: head"),
        ({"kv_b_proj": "{style: merged_column, fused: {per: head, order: [k, v]}}"}, "its parts are: k_nope, v"),
        ({"kv_b_proj": "{style: column}"}, "merged_column"),
        ({"rope": TURNED.replace("}]", "}], dims: 10")}, "rope turns 10 features of a head of 8"),
        ({"kv_a_layernorm": "{norm: rms, over: q_lora}"}, "goes over q_lora, 24 features, but gets 16"),
        ({"kv_a_layernorm": "{parameter: [16]}"}, "its kv_a_layernorm is a norm, not a ShardedModule"),
        (
            {"q_proj": "{style: merged_column, fused: {per: head, order: [q_nope, q_rope]}}"},
            "nothing tells the sizes of this merged_column projection",
        ),
        ({"v_head_dim": "0"}, "v_head_dim"),
        ({"scale": "-1.0"}, "scale"),
    ],
)
def test_what_is_refused(words: dict[str, str], message: str) -> None:
    with pytest.raises((SpecError, CheckpointError), match=message):
        tpkit.build(tpkit.load_spec(described(**words), config={"model_type": "deepseek_v3"}), dummy_weights=True)


def test_queries_of_the_hidden_state_need_their_projection() -> None:
    words, config = described(q_proj=""), {"model_type": "deepseek_v3", "q_lora_rank": None}
    with pytest.raises(SpecError, match="with q_lora_rank None it needs q_proj"):
        tpkit.load_spec(words, config=config)


def test_a_layer_that_runs_twice_needs_another_cache(checkpoint: Callable[[str], Made]) -> None:
    words = described()
    words["tree"]["model"]["layers"]["forward"][0] = "x + self_attn(self_attn(input_layernorm(x)))"
    made = checkpoint("v3")
    model = tpkit.build(tpkit.load_spec(words, config=made.folder), checkpoint=made.folder)
    with torch.inference_mode():
        model(made.ids)
        with pytest.raises(UsageError, match="called twice"):
            model(made.ids, model.new_cache(2, 20))


def test_it_may_turn_nothing(checkpoint: Callable[[str], Made]) -> None:
    made, rope = checkpoint("v3-half"), f"[{TURNED.replace('{pairs', '{when: rope_interleave, pairs', 1)}]"
    model = tpkit.build(tpkit.load_spec(described(rope=rope), config=made.folder), checkpoint=made.folder)
    with torch.inference_mode():
        plain = model(made.ids)
        assert off(cached(model, made.ids, 5, *[1] * 9), plain) < TOLERANCE < off(plain, made.logits)


def test_declaring_is_pure_and_says_nothing_of_ranks() -> None:
    children = {role: Child(style="") for role in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")}
    first, second = (Mla.declare(MlaOptions(**SIZES), 96, children) for _ in range(2))
    assert first == second
    axes = {part.axis for sides in first.sides.values() for part in (*sides.in_, *sides.out)} - {None}
    assert [(axis.name, axis.units, axis.groups) for axis in axes] == [("heads", 6, None)]
    assert first.counts == {"head": 6} and first.widths == {"kv_lora": 16, "q_lora": 24}


def test_the_entry_point_is_declared() -> None:
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    assert 'mla = "tpkit_mla:Mla"' in text
