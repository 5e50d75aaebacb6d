"""The layer against transformers' own, and the plan for many ranks; tests/model/test_recurrent.py has real ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import tpkit
from tpkit import SpecError
from tpkit.distributed.group import TensorParallel

HIDDEN, VOCAB = 20, 11
FUSED = {
    "in_proj_qkvz": {"style": "merged_column", "fused": {"per": "key_head", "order": ["q", "k", "v", "z"]}},
    "in_proj_ba": {"style": "merged_column", "fused": {"per": "key_head", "order": ["b", "a"]}},
}
APART = {
    "in_proj_qkvz": {"style": "merged_column", "packs": {"in_proj_qkv": ["q", "k", "v"], "in_proj_z": ["z"]}},
    "in_proj_ba": {"style": "merged_column", "packs": {"in_proj_b": ["b"], "in_proj_a": ["a"]}},
}


def described(key_heads: int, value_heads: int, **replaced: Any) -> dict[str, Any]:
    """Returns a model of nothing but the layer between an embedding and a head."""
    mixer = {
        "module": "gated_delta_net",
        "key_heads": "key_heads",
        "value_heads": "value_heads",
        "key_head_dim": 8,
        "value_head_dim": 6,
        "conv_kernel": 4,
        "conv1d": {"style": "merged_column", "fused": ["q", "k", "v"], "quant": "none"},
        "A_log": {"parameter": ["value_heads"], "style": "per_head"},
        "dt_bias": {"parameter": ["value_heads"], "style": "per_head"},
        "norm": {"norm": "rms", "over": "value_head", "eps": 1e-6},
        "out_proj": {"style": "row"},
        **FUSED,
        **replaced,
    }
    sizes = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "key_heads": key_heads, "value_heads": value_heads}
    return {
        "schema": 1,
        "family": "delta",
        "architectures": ["Delta"],
        "model_types": ["delta"],
        "config": sizes,
        "tree": {"embed": {"module": "embedding", "style": "vocab"}, "mixer": mixer, "head": {"style": "vocab"}},
    }


def theirs(key_heads: int, value_heads: int, apart: bool = False) -> torch.nn.Module:
    from transformers import Qwen3_5TextConfig, Qwen3NextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    torch.manual_seed(0)
    sizes = {"linear_num_key_heads": key_heads, "linear_num_value_heads": value_heads, "linear_key_head_dim": 8}
    sizes |= {"linear_value_head_dim": 6, "linear_conv_kernel_dim": 4, "hidden_size": HIDDEN, "num_hidden_layers": 1}
    config, layer = (Qwen3_5TextConfig, Qwen3_5GatedDeltaNet) if apart else (Qwen3NextConfig, Qwen3NextGatedDeltaNet)
    made: torch.nn.Module = layer(config(**sizes, layer_types=["linear_attention"]), 0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.5)
    return made


def written(layer: torch.nn.Module, folder: Path) -> Path:
    tensors = {f"mixer.{name}": tensor.contiguous() for name, tensor in layer.state_dict().items()}
    tensors |= {"embed.weight": torch.randn(VOCAB, HIDDEN), "head.weight": torch.randn(VOCAB, HIDDEN)}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "delta"}))
    return folder


@pytest.mark.parametrize(("key_heads", "value_heads", "apart"), [(2, 4, False), (3, 9, False), (1, 3, True)])
def test_it_computes_what_transformers_does_in_any_pieces(
    key_heads: int, value_heads: int, apart: bool, tmp_path: Path
) -> None:
    layer = theirs(key_heads, value_heads, apart)
    folder = written(layer, tmp_path)
    spec = tpkit.load_spec(described(key_heads, value_heads, **(APART if apart else FUSED)), config=folder)
    model = tpkit.build(spec, checkpoint=folder)
    ids = torch.arange(200).reshape(2, 100) * 5 % VOCAB
    with torch.inference_mode():
        wanted = model.head(layer(model.embed(ids)))
        close = {"rtol": 1e-4, "atol": 1e-4 * wanted.abs().max().item()}
        torch.testing.assert_close(model(ids), wanted, **close)
        for sizes in ([70, 1, 29], [1] * 100, [1, 2, 97]):
            cache = model.new_cache(2, 100)
            found = torch.cat([model(piece, cache) for piece in ids.split(sizes, dim=1)], dim=1)
            torch.testing.assert_close(found, wanted, **close)


def test_bfloat16_keeps_its_state_in_float32(tmp_path: Path) -> None:
    layer = theirs(2, 4)
    folder = written(layer, tmp_path)
    model = tpkit.build(tpkit.load_spec(described(2, 4), config=folder), checkpoint=folder, dtype=torch.bfloat16)
    ids = torch.arange(40).reshape(1, 40) % VOCAB
    with torch.inference_mode():
        wanted = model.head(layer.bfloat16()(model.embed(ids))).float()
        cache = model.new_cache(1, 40)
        found = model(ids, cache).float()
    assert {state.dtype for state in cache.states} == {torch.bfloat16, torch.float32}
    assert (found - wanted).abs().max() < 0.02 * wanted.abs().max()


def test_value_heads_follow_their_key_head(tmp_path: Path) -> None:
    folder = written(theirs(2, 6), tmp_path)
    spec = tpkit.load_spec(described(2, 6), config=folder)
    for ranks in (1, 2, 5, 9):  # more than key heads, more than value heads
        plan = tpkit.plan_model(spec, ranks=ranks, checkpoint=tpkit.open_checkpoint(folder))
        inputs, conv, decay = (plan.layers[f"mixer.{name}"] for name in ("in_proj_qkvz", "conv1d", "A_log"))
        seen = []
        for rank in range(ranks):
            q, k, v, z = inputs.bounds(inputs.spec.out, rank)
            ((first, last),) = decay.bounds(decay.spec.out, rank)
            keys = range(first // 3, -(-last // 3)) if last > first else ()
            assert q == k
            assert [*range(*q)] == [8 * head + n for head in keys for n in range(8)]
            assert v == z == (first * 6, last * 6)
            assert conv.bounds(conv.spec.out, rank) == [q, k, v]
            seen += range(first, last)
        assert seen == list(range(6))


@pytest.mark.parametrize(
    ("replaced", "problem"),
    [
        ({"norm": {"norm": "layer", "over": "value_head", "eps": 1e-6, "bias": False}}, "its norm is"),
        ({"A_log": {"parameter": ["value_heads"]}}, "it follows its heads over the ranks: say style: per_head"),
        ({"activation": "gelu"}, "'gelu' is not"),
        ({"in_proj_ba": {"style": "merged_column", "fused": {"per": "head", "order": ["b", "a"]}}}, "per is one of"),
    ],
)
def test_what_does_not_fit_is_refused(replaced: dict[str, Any], problem: str, tmp_path: Path) -> None:
    folder = written(theirs(2, 4), tmp_path)
    with pytest.raises(SpecError, match=problem):
        spec = tpkit.load_spec(described(2, 4, **replaced), config=folder)
        tpkit.build(spec, checkpoint=folder, tp=TensorParallel(rank=0, size=2))  # where whole and divided differ
