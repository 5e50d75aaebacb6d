"""Shapes of real checkpoints that other loaders refuse or get wrong: planned from their config.json, without weights.

Each misfit is also computed, small, on real ranks: see `test_small_models_of_the_same_misfit`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tpkit
from tests.families import Families, Tiny
from tests.quant.formats import FORMATS
from tests.quant.test_formats_tp import check, make
from tests.ranks import Ranks
from tpkit.planning import ModelPlan, derived_checkpoint

REAL = Path(__file__).parents[3] / "shared" / "data" / "real_configs"
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
#: https://huggingface.co/Qwen/Qwen3-32B-FP8, config.json: what its shapes follow from
QWEN3_32B = {
    "model_type": "qwen3", "hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    "tie_word_embeddings": False, "rope_theta": 1e6, "quantization_config": FP8,
}  # fmt: skip
#: the llama-like projections of https://huggingface.co/Qwen/Qwen-7B-Chat-Int4: 11008 inputs in 86 groups
QWEN_7B_GPTQ = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 151936, "tie_word_embeddings": False,
    "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True},
}  # fmt: skip
#: SmolLM2 as fp8 blocks: q, k and v have 576, 192 and 192 rows, none a multiple of 128
SMOLLM2_FP8 = {
    "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True,
    "quantization_config": FP8,
}  # fmt: skip


def planned(description: str, config: Any, ranks: int) -> ModelPlan:
    """Plans without weights, and proves that the tensors it then expects are all it needs, in both directions."""
    spec = tpkit.load_spec(description, config=config)
    bare = tpkit.plan_model(spec, ranks=ranks)
    plan = tpkit.plan_model(spec, ranks=ranks, checkpoint=derived_checkpoint(bare), dtype=bare.dtype)
    assert not plan.load.ignored
    assert not plan.load.conversions
    return plan


def shapes(plan: ModelPlan, path: str, param: str) -> list[tuple[int, ...]]:
    return [local[param].shape for local in plan.layers[path].geometry.local]


@pytest.mark.parametrize("config", [QWEN3_32B, REAL / "Qwen--Qwen3-32B-FP8"], ids=["sizes", "config.json"])
def test_qwen3_32b_fp8_on_16_and_3_ranks(config: Any) -> None:
    if isinstance(config, Path) and not config.is_dir():
        pytest.skip("no real configs beside this clone")
    down = "model.layers.0.mlp.down_proj"
    plan = planned("qwen3", config, 16)  # 200 blocks for 16 ranks
    assert shapes(plan, down, "weight") == [(5120, 1664)] * 8 + [(5120, 1536)] * 8
    assert shapes(plan, down, "weight_scale") == [(40, 13)] * 8 + [(40, 12)] * 8
    assert shapes(plan, "model.layers.0.self_attn.qkv_proj", "weight_scale") == [(6, 40)] * 16  # 8 kv heads, 16 ranks
    plan = planned("qwen3", config, 3)
    assert [cut[1] for cut in shapes(plan, down, "weight")] == [8576, 8576, 8448]
    assert [cut[0] for cut in shapes(plan, "model.layers.0.self_attn.qkv_proj", "weight")] == [3840, 3840, 2560]


def test_gptq_of_86_groups_on_3_ranks() -> None:
    plan = planned("llama", QWEN_7B_GPTQ, 3)
    down = "model.layers.0.mlp.down_proj"
    assert [cut[0] for cut in shapes(plan, down, "qweight")] == [464, 464, 448]  # 29, 29 and 28 groups of 16 words
    assert [cut[0] for cut in shapes(plan, down, "scales")] == [29, 29, 28]
    assert [cut[1] for cut in shapes(plan, "model.layers.0.mlp.gate_up_proj", "qzeros")] == [928, 928, 896]
    assert sum(cut[1] for cut in shapes(plan, "model.layers.0.self_attn.qkv_proj", "scales")) == 3 * 4096


@pytest.mark.parametrize("ranks", range(1, 9))
def test_a_576_wide_fp8_block_qkv_on_any_number_of_ranks(ranks: int) -> None:
    plan = planned("llama", SMOLLM2_FP8, ranks)
    layer = plan.layers["model.layers.0.self_attn.qkv_proj"]
    held = [[stop - start for start, stop in layer.bounds(layer.spec.out, rank)] for rank in range(ranks)]
    assert sum(q for q, _, _ in held) == 576
    for rank, (q, k, v) in enumerate(held):
        weight, scale = (layer.geometry.local[rank][name].shape for name in ("weight", "weight_scale"))
        assert weight == (q + k + v, 576)
        assert k == v
        assert scale[0] >= sum(-(-rows // 128) for rows in (q, k, v))  # q, k and v have a grid of blocks each
        assert scale[1] == 5 or not rank_holds_anything(held[rank])


def rank_holds_anything(rows: list[int]) -> bool:
    return sum(rows) > 0


def test_nested_and_producer_named_configs_of_real_checkpoints() -> None:
    folder = REAL / "Qwen--Qwen3-32B-FP8-Static-PerTensor"
    if not folder.is_dir():
        pytest.skip("no real configs beside this clone")
    plan = planned("qwen3", folder, 3)
    assert plan.planned["model.layers.0.mlp.down_proj"].choice.name == "modelopt"  # type: ignore[union-attr]
    assert json.loads((folder / "config.json").read_text())["quantization_config"].get("quant_method") is None


@pytest.mark.parametrize(
    ("form", "tiny"),
    [
        # 12.5 blocks of 32 for the down projection, and q, k, v of 9/3 heads of 20: blocks end nowhere near a cut
        ("fp8_block", Tiny(heads=9, kv=3, ffn=400, vocab=131, hidden=180)),
        # 11 groups of 32, which 2, 3, 4 and 5 ranks do not divide
        ("awq", Tiny(heads=4, kv=4, ffn=352, vocab=131, hidden=64)),
        ("nf4", Tiny(heads=6, kv=2, ffn=200, vocab=131, hidden=72)),  # no row is a multiple of 64 long
    ],
)
def test_small_models_of_the_same_misfit(
    form: str, tiny: Tiny, tmp_path: Path, families: Families, ranks: Ranks
) -> None:
    chosen = FORMATS[form]
    check(make(families, tmp_path, lambda stem: chosen, tiny, quant_method=chosen.method, **chosen.config), ranks)


def test_real_gptq_names_and_types() -> None:
    """What the plan derives is what such checkpoints hold."""
    spec = tpkit.load_spec("llama", config=QWEN_7B_GPTQ)
    derived = derived_checkpoint(tpkit.plan_model(spec, ranks=1))
    stem = "model.layers.0.self_attn.q_proj"
    found = {name.removeprefix(stem + "."): (t.dtype, t.shape) for name, t in derived.tensors.items() if stem in name}
    assert found == {
        "qweight": ("int32", (512, 4096)),
        "qzeros": ("int32", (32, 512)),
        "scales": ("float16", (32, 4096)),
    }
