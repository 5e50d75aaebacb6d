"""Families that transformers has no class for: what it computes, in the names and layouts of their checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from tests.families import Families, Made, Tiny, rewrite, tensors_of
from tests.model.test_families import TOLERANCE, differences
from tests.ranks import Ranks

Tensors = dict[str, torch.Tensor]


def renamed(tensors: Mapping[str, torch.Tensor], names: Mapping[str, str]) -> Tensors:
    """Replaces parts of names, in the order given."""
    found = {}
    for name, tensor in tensors.items():
        for old, new in names.items():
            name = name.replace(old, new)
        found[name] = tensor
    return found


def internlm2(folder: Path, tiny: Tiny) -> None:
    """Makes a llama one: q, k and v of every key/value head together, its queries first."""
    tensors = tensors_of(folder)
    for layer in range(tiny.layers):
        stem = f"model.layers.{layer}.self_attn."
        parts = [tensors.pop(f"{stem}{part}_proj.weight").unflatten(0, (tiny.kv, -1)) for part in "qkv"]
        tensors[f"{stem}wqkv.weight"] = torch.cat(parts, dim=1).flatten(0, 1)
    names = {
        "embed_tokens": "tok_embeddings", "lm_head": "output", "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm", "self_attn": "attention", "o_proj": "wo", "mlp": "feed_forward",
        "gate_proj": "w1", "down_proj": "w2", "up_proj": "w3",
    }  # fmt: skip
    of = {"model_type": "internlm2", "architectures": ["InternLM2ForCausalLM"], "bias": False}
    rewrite(folder, renamed(tensors, names), **of, attention_bias=..., mlp_bias=..., head_dim=...)


def qwen(folder: Path, tiny: Tiny) -> None:
    """Makes a qwen2 one: q, k and v in blocks, names of GPT-2; its width is stated twice as large."""
    tensors = tensors_of(folder)
    for layer in range(tiny.layers):
        stem = f"model.layers.{layer}.self_attn."
        for kind in ("weight", "bias"):
            parts = [tensors.pop(f"{stem}{part}_proj.{kind}") for part in "qkv"]
            tensors[f"{stem}c_attn.{kind}"] = torch.cat(parts)
    names = {
        "model.embed_tokens": "transformer.wte", "model.layers": "transformer.h", "model.norm": "transformer.ln_f",
        "input_layernorm": "ln_1", "post_attention_layernorm": "ln_2", "self_attn": "attn", "o_proj": "c_proj",
        "gate_proj": "w2", "up_proj": "w1", "down_proj": "c_proj",
    }  # fmt: skip
    of = {"model_type": "qwen", "architectures": ["QWenLMHeadModel"], "no_bias": True, "seq_length": 128}
    of |= {"intermediate_size": 2 * tiny.ffn, "kv_channels": tiny.hidden // tiny.heads, "rotary_emb_base": 10000}
    of |= {"layer_norm_epsilon": 1e-6, "use_dynamic_ntk": False, "use_logn_attn": False, "rms_norm_eps": ...}
    of |= {"layer_types": ..., "rope_parameters": ..., "num_key_value_heads": ..., "use_sliding_window": ...}
    rewrite(folder, renamed(tensors, names), **of, hidden_act=..., sliding_window=..., max_window_layers=...)


@pytest.mark.parametrize("tp", [3, *(pytest.param(tp, marks=pytest.mark.slow) for tp in (1, 2, 4, 5))])
@pytest.mark.parametrize(
    ("relay", "tiny", "description"),
    [
        (internlm2, Tiny(family="llama", heads=9, kv=3, ffn=136, vocab=257, hidden=144), "internlm2"),
        (qwen, Tiny(family="qwen2", heads=9, kv=9, ffn=136, vocab=257, hidden=144), "qwen"),
    ],
    ids=["internlm2", "qwen"],
)
def test_logits_are_those_of_the_original(
    relay: Callable[[Path, Tiny], None],
    tiny: Tiny,
    description: str,
    tp: int,
    tmp_path: Path,
    families: Families,
    ranks: Ranks,
) -> None:
    made = families.make(tiny)
    folder = families.copy(tiny, tmp_path / description)
    relay(folder, tiny)
    for plain, cached in ranks(tp).run(differences, Made(tiny, folder, made.ids, made.logits), description):
        assert max(plain, cached) < TOLERANCE, f"{plain:.1e} at once, {cached:.1e} with a cache"
