"""Experts in GGUF files: names, and what config.json would say of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tpkit import CheckpointError
from tpkit_gguf.config import Fields, config_of
from tpkit_gguf.names import hf_name

gguf = pytest.importorskip("gguf")

PARTS = {
    "ffn_gate_inp": "mlp.gate", "ffn_gate_exps": "mlp.experts.gate_proj", "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj", "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj", "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}  # fmt: skip


@pytest.mark.parametrize("arch", ["qwen2moe", "qwen3moe", "olmoe"])
def test_every_tensor_of_an_architecture_has_its_name(arch: str) -> None:
    known = gguf.MODEL_TENSORS[gguf.MODEL_ARCH[arch.upper()]]
    names = [gguf.TENSOR_NAMES[tensor].format(bid=3) for tensor in known]
    library = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], 4)
    for name in names:
        found = hf_name(f"{name}.weight", arch)
        assert library.get_name(found, (".weight",)) == f"{name}.weight"
        part = name.rpartition(".")[2]
        assert part not in PARTS or found == f"model.layers.3.{PARTS[part]}.weight"


def test_a_llama_with_experts() -> None:
    assert hf_name("blk.2.ffn_gate_inp.weight", "llama") == "model.layers.2.block_sparse_moe.gate.weight"
    for part, last in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
        stem = "model.layers.2.block_sparse_moe.experts"
        assert hf_name(f"blk.2.ffn_{part}_exps.weight", "llama") == f"{stem}.{last}.weight"
        assert hf_name(f"blk.2.ffn_{part}.5.weight", "llama") == f"{stem}.5.{last}.weight"
    assert hf_name("blk.2.ffn_norm.5.weight", "llama") == "blk.2.ffn_norm.5.weight"
    assert hf_name("output.5.weight", "llama") == "output.5.weight"


def config(arch: str, **more: Any) -> dict[str, Any]:
    keys = {
        "block_count": 2, "context_length": 32, "embedding_length": 32, "feed_forward_length": 96,
        "attention.head_count": 4, "attention.layer_norm_rms_epsilon": 1e-6, "expert_count": 8, "expert_used_count": 3,
    } | {key.replace("__", "."): value for key, value in more.items()}  # fmt: skip
    metadata = {f"{arch}.{key}": value for key, value in keys.items() if value is not None}
    fields = Fields(file=Path("m.gguf"), arch=arch, metadata=metadata)
    return config_of(fields, {"model.embed_tokens.weight": (7, 32)}, None)


@pytest.mark.parametrize(
    ("arch", "keys", "wanted"),
    [
        ("qwen3moe", {"expert_feed_forward_length": 48}, {"moe_intermediate_size": 48, "norm_topk_prob": True}),
        ("qwen3moe", {"expert_weights_norm": False}, {"moe_intermediate_size": 32, "norm_topk_prob": False}),
        ("qwen3moe", {"expert_gating_func": 1}, {"num_experts": 8, "num_experts_per_tok": 3, "mlp_only_layers": []}),
        (
            "qwen2moe",
            {"expert_shared_feed_forward_length": 64},
            {"shared_expert_intermediate_size": 64, "norm_topk_prob": False, "qkv_bias": False},
        ),
        ("olmoe", {}, {"intermediate_size": 96, "norm_topk_prob": False, "model_type": "olmoe"}),
        ("llama", {}, {"num_local_experts": 8, "num_experts_per_tok": 3, "model_type": "mixtral"}),
    ],
)
def test_metadata_becomes_config(arch: str, keys: dict[str, Any], wanted: dict[str, Any]) -> None:
    found = config(arch, **keys)
    assert {key: found.get(key) for key in wanted} == wanted


@pytest.mark.parametrize(
    ("arch", "keys", "message"),
    [
        ("qwen3moe", {"expert_gating_func": 2}, "expert_gating_func 2"),
        ("qwen3moe", {"expert_weights_scale": 2.5}, "expert_weights_scale 2.5"),
        ("llama", {"expert_weights_norm": False}, "expert_weights_norm False"),
        ("qwen3moe", {"expert_count": None}, "expert_count is missing"),
        ("olmoe", {"attention__clamp_kqv": 8.0}, "not understood: olmoe.attention.clamp_kqv"),
        ("qwen2moe", {"expert_group_count": 2}, "not understood: qwen2moe.expert_group_count"),
        ("olmoe", {"expert_used_count": None}, "expert_used_count is None"),
    ],
)
def test_metadata_that_is_not_understood_is_refused(arch: str, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        config(arch, **keys)
