"""Experts of real quantised checkpoints at sizes that blocks do not divide: planned and proved, without weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tpkit
from tests.quant.test_real_shapes import REAL
from tpkit.layers import MergedColumnParallelExperts, RowParallelExperts
from tpkit.planning import ModelPlan, derived_checkpoint
from tpkit.quant import QuantMethod

#: https://huggingface.co/openai/gpt-oss-20b, config.json
GPT_OSS_20B: dict[str, Any] = {
    "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088,
    "num_local_experts": 32, "num_experts_per_tok": 4, "tie_word_embeddings": False,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
        ],
    },
}  # fmt: skip


def planned(description: str, config: Any, *places: tuple[int, int]) -> list[ModelPlan]:
    """Plans for ranks in groups, and proves that the tensors expected are all that is needed, in both directions."""
    if isinstance(config, Path) and not config.is_dir():
        pytest.skip("no real configs beside this clone")
    spec = tpkit.load_spec(description, config=config)
    bare = tpkit.plan_model(spec, ranks=1)
    checkpoint = derived_checkpoint(bare)
    plans = [
        tpkit.plan_model(spec, ranks=ranks, ep=ep, checkpoint=checkpoint, dtype=bare.dtype) for ranks, ep in places
    ]
    assert not any(plan.load.ignored or plan.load.conversions for plan in plans)
    return plans


def shapes(plan: ModelPlan, path: str, param: str) -> list[tuple[int, ...]]:
    """Returns the shape of one expert's parameter on each rank."""
    return [local[param].shape for local in plan.layers[path].geometry.local]


def test_gpt_oss_20b_holds_what_its_index_states() -> None:
    """https://huggingface.co/openai/gpt-oss-20b, model.safetensors.index.json: 459 tensors, total_size."""
    plans = planned("gpt_oss", GPT_OSS_20B, (3, 1), (4, 1), (8, 1), (4, 2))
    checkpoint = plans[0].load.checkpoint
    assert checkpoint is not None
    assert len(checkpoint.tensors) == 459
    assert sum(stored.nbytes for stored in checkpoint.tensors.values()) == 13761264768
    stem = "model.layers.0.mlp.experts"
    blocks = checkpoint.tensors[f"{stem}.gate_up_proj_blocks"]
    assert (blocks.dtype, blocks.shape) == ("uint8", (32, 5760, 90, 16))
    wanted = {  # 90 blocks of 32 inputs
        (3, 1): [30, 30, 30], (4, 1): [23, 23, 22, 22], (8, 1): [12, 12, 11, 11, 11, 11, 11, 11], (4, 2): [45] * 4,
    }  # fmt: skip
    for plan, counts in zip(plans, wanted.values(), strict=True):
        assert shapes(plan, f"{stem}.down_proj", "blocks") == [(2880, count, 16) for count in counts]
        assert shapes(plan, f"{stem}.gate_up_proj", "bias") == [(64 * count,) for count in counts]


def test_qwen3_30b_a3b_fp8_on_4_ranks() -> None:
    """768 are 6 blocks of 128: four ranks take 192 each, and the blocks around them; two groups take 3 blocks each."""
    plans = planned("qwen3_moe", REAL / "Qwen--Qwen3-30B-A3B-FP8", (4, 1), (4, 2), (3, 2))
    down = "model.layers.0.mlp.experts.down_proj"
    assert shapes(plans[0], down, "weight") == [(2048, 192)] * 4
    assert shapes(plans[0], down, "weight_scale") == [(16, 2)] * 4
    assert shapes(plans[1], down, "weight") == [(2048, 384)] * 4
    assert shapes(plans[1], down, "weight_scale") == [(16, 3)] * 4
    assert [cut[1] for cut in shapes(plans[2], down, "weight")] == [384, 384, 768]
    assert [len(plans[2].layers[down].experts(rank) or ()) for rank in range(3)] == [85, 85, 43]
    assert all(plan.load.balance() < 1.02 for plan in plans)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("description", "name", "experts", "rows"),
    [
        ("qwen3_moe", "Qwen--Qwen3-235B-A22B-FP8", "mlp.experts.down_proj", 4096),
        ("minimax_m2", "MiniMaxAI--MiniMax-M2.5", "block_sparse_moe.experts.w2", 3072),
    ],
)
def test_1536_features_in_blocks_of_128_on_8_ranks(description: str, name: str, experts: str, rows: int) -> None:
    for plan, width in zip(planned(description, REAL / name, (8, 1), (8, 2)), (192, 384), strict=True):
        down = f"model.layers.0.{experts}"
        assert shapes(plan, down, "weight") == [(rows, width)] * 8
        assert shapes(plan, down, "weight_scale") == [(rows // 128, -(-width // 128))] * 8
        assert plan.load.balance() < 1.01
        assert len(plan.layers) < 12 * 100  # an expert's projection is planned once for all


def test_step_3_7_flash_fp8_experts_on_4_ranks() -> None:
    """1280 are 10 blocks of 128: three for two of the ranks, two for the others. Nothing is allocated."""
    fp8: QuantMethod = tpkit.Registry.default().load("quant method", "fp8")
    method = fp8(fp8.Options(weight_block_size=[128, 128]))  # type: ignore[operator]
    for rank, width in enumerate([384, 384, 256, 256]):
        place: dict[str, Any] = {"bias": False, "quant": method, "device": "meta", "tp_rank": rank, "tp_size": 4}
        up = MergedColumnParallelExperts(4096, [1280, 1280], 288, **place)
        down = RowParallelExperts(1280, 4096, 288, **place)
        assert (len(up), up.out_sizes, down.in_features) == (288, [width, width], width)
        first = next(iter(down))
        assert (tuple(first.weight.shape), tuple(first.weight_scale.shape)) == ((4096, width), (32, width // 128))
