"""Families with recurrent layers, sinks or output gates: the logits of transformers, at once and with a cache."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import tpkit
from tests.families import Families, Made, Tiny
from tests.model.test_families_tp import TOLERANCE, off
from tests.ranks import Ranks
from tests.tiny_configs import arguments

EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 36,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Mixed(Tiny):
    """A tiny family of two kinds of layers; its configuration is `fields` beside the usual names of sizes."""

    @property
    def description(self) -> str:
        return self.family.removesuffix("_text")

    def config(self) -> dict[str, Any]:
        sizes = {"vocab": self.vocab, "hidden": self.hidden, "ffn": self.ffn, "layers": self.layers, "length": 128}
        sizes |= {"heads": self.heads, "kv": self.kv}
        return arguments("llama", sizes, {"tie_word_embeddings": self.tied, **json.loads(self.fields)})


def mixed(family: str, kinds: str, sizes: dict[str, Any], **fields: Any) -> Mixed:
    return Mixed(family=family, **sizes, fields=json.dumps({"layer_types": kinds.split(), **fields}))


def convolved(sizes: dict[str, Any], **fields: Any) -> Mixed:
    return mixed("lfm2", "conv full_attention", {"tied": True, **sizes}, **fields)


def delta(family: str, key_heads: int, value_heads: int, sizes: dict[str, Any], **fields: Any) -> Mixed:
    """A delta net with heads of its own, keys and values of different sizes, before an attention with a gate."""
    linear = {
        "linear_num_key_heads": key_heads, "linear_num_value_heads": value_heads, "linear_key_head_dim": 8,
        "linear_value_head_dim": 12, "linear_conv_kernel_dim": 4, "head_dim": 16,
    }  # fmt: skip
    return mixed(family, "linear_attention full_attention", sizes, **linear, **fields)


def sinking(sizes: dict[str, Any]) -> Mixed:
    window = {"sliding_window": 8, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}
    return mixed("gpt_oss", "sliding_attention full_attention", sizes, **window)


FEW, MANY = {"heads": 2, "kv": 1}, {"heads": 9, "kv": 3, "hidden": 144, "ffn": 136, "vocab": 257}
CASES = {
    "conv": convolved({}),
    "conv-biased": convolved({"hidden": 72}, conv_bias=True, conv_L_cache=4, block_auto_adjust_ff_dim=False),
    "delta-split": delta("qwen3_5_text", 2, 4, {}),
    "delta-split-few": delta("qwen3_5_text", 1, 3, FEW),
    "delta-split-experts": delta("qwen3_5_moe_text", 2, 4, {}, **EXPERTS),
    "delta-fused": delta("qwen3_next", 3, 9, MANY, mlp_only_layers=[0], **EXPERTS),
    "sinks": sinking(MANY),
    "sinks-few": sinking(FEW),
}


def differences(made: Made, pieces: tuple[int, ...]) -> tuple[float, float, float]:
    """Builds on all ranks; returns the differences at once, in pieces with a cache, and token by token."""
    spec = tpkit.load_spec(made.tiny.description, config=made.folder)
    model = tpkit.build(spec, checkpoint=made.folder)
    found = []
    with torch.inference_mode():
        found.append(off(model(made.ids), made.logits))
        for sizes in (pieces, (1,) * made.ids.shape[1]):
            cache = model.new_cache(*made.ids.shape)
            parts = [model(part, cache) for part in made.ids.split(sizes, dim=1)]
            found.append(off(torch.cat(parts, dim=1), made.logits))
    return found[0], found[1], found[2]


def cases() -> list[Any]:
    """On 3 ranks always, on other numbers in the whole suite."""
    return [
        pytest.param(case, tp, marks=[] if tp == 3 else [pytest.mark.slow], id=f"{name}-tp{tp}")
        for name, case in CASES.items()
        for tp in (3, 1, 2, 5)
    ]


@pytest.mark.parametrize(("case", "tp"), cases())
def test_logits_are_those_of_transformers(case: Mixed, tp: int, families: Families, ranks: Ranks) -> None:
    for found in ranks(tp).run(differences, families.make(case), (5, 1, 2, 6)):
        assert max(found) < TOLERANCE, "{:.1e} at once, {:.1e} in pieces, {:.1e} one by one".format(*found)
