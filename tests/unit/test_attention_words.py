"""Sinks and output gates of attention that do not fit what is beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests import small
from tpkit import SpecError

SINKS = {"parameter": ["num_attention_heads"], "style": "per_head"}
GATED = {"q_proj": {"per": "head", "order": ["q", "gate"]}, "k_proj": ["k"], "v_proj": ["v"]}


def described(**words: Any) -> dict[str, Any]:
    """Returns llama.yaml with further words of its attention."""
    tree = small.description()["tree"]
    tree["model"]["layers"]["self_attn"].update(words)
    return small.description(tree=tree)


def sunk(folder: Path) -> Path:
    sinks = {f"model.layers.{layer}.self_attn.sinks": torch.zeros(4) for layer in range(2)}
    return small.write(folder, {**small.weights(), **sinks})


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ({"sinks": SINKS, "softcap": 5.0}, "sinks beside a softcap, alibi"),
        ({"sinks": SINKS, "alibi": {}, "rope": None}, "sinks beside a softcap, alibi"),
        ({"sinks": {"parameter": ["num_attention_heads"]}}, "it follows its heads over the ranks: say style: per_head"),
        ({"sinks": {"parameter": ["head_dim"], "style": "per_head"}}, "4 heads for it"),
        ({"output_gate": "sigmoid"}, "3 parts, but the module makes 4: q, gate, k, v"),
        ({"output_gate": "tanh"}, "'tanh' is not one of: sigmoid"),
        ({"qkv_proj": {"style": "qkv", "packs": GATED}}, "4 parts, but the module makes 3: q, k, v"),
    ],
)
def test_what_does_not_fit_is_refused(words: dict[str, Any], problem: str, tmp_path: Path) -> None:
    words = {key: word for key, word in words.items() if word is not None}
    with pytest.raises(SpecError, match=problem):
        small.on_rank(sunk(tmp_path / "model"), tp=2, source=described(**words))


def test_sinks_of_disable_tp_stay_whole(tmp_path: Path) -> None:
    alone = {"style": "qkv", "packs": ["q_proj", "k_proj", "v_proj"], "disable_tp": True, "bias": "attention_bias"}
    source = described(sinks=SINKS, qkv_proj=alone, o_proj={"style": "row", "disable_tp": True})
    model = small.on_rank(sunk(tmp_path / "model"), tp=3, source=source)
    assert model.model.layers[0].self_attn.sinks.value.shape == (4,)
