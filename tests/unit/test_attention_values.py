"""Values of attention: their norm, and keys in their place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests import small
from tpkit import SpecError

KEYS = {"style": "merged_column", "packs": ["q_proj", "k_proj"]}
IDS = torch.arange(12).reshape(2, 6) * 7 % 96


def described(**words: Any) -> dict[str, Any]:
    """Returns llama.yaml with further words of its attention."""
    tree = small.description()["tree"]
    tree["model"]["layers"]["self_attn"].update(words)
    return small.description(tree=tree)


def logits(folder: Path, **words: Any) -> torch.Tensor:
    model = small.on_rank(folder, source=described(**words))
    with torch.inference_mode():
        return model(IDS)


def test_keys_stand_for_values(tmp_path: Path) -> None:
    """They are what the projection gives, not what rope and norm make of it: as if v_proj were k_proj."""
    weights = small.weights()
    without = {name: tensor for name, tensor in weights.items() if "v_proj" not in name}
    both = without | {n.replace("k_proj", "v_proj"): tensor.clone() for n, tensor in without.items() if "k_proj" in n}
    norm = {"norm": "rms", "over": "head", "affine": False}
    found = logits(small.write(tmp_path / "keys", without), qkv_proj=KEYS, k_norm=norm)
    torch.testing.assert_close(found, logits(small.write(tmp_path / "both", both), k_norm=norm))


@pytest.mark.parametrize("over", ["head", "all_heads"])
def test_values_are_normalised(over: str, tmp_path: Path) -> None:
    """Each head of values has a norm of one: they are the same whatever v_proj is multiplied with."""
    weights = small.weights()
    louder = {name: tensor * (3 if "v_proj" in name else 1) for name, tensor in weights.items()}
    norm = {"norm": "rms", "over": over, "affine": False}
    once, more = small.write(tmp_path / "once", weights), small.write(tmp_path / "more", louder)
    torch.testing.assert_close(logits(once, v_norm=norm), logits(more, v_norm=norm), rtol=1e-3, atol=1e-3)
    assert not torch.allclose(logits(once), logits(more), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ({"v_norm": {"norm": "rms", "over": "head", "affine": False, "after": "rope"}}, "values are not turned"),
        ({"qkv_proj": {**KEYS, "packs": ["q_proj", "k_proj", "v_proj"]}}, "3 parts, but the module makes 2: q, k"),
        ({"qkv_proj": {"style": "qkv", "packs": ["q_proj", "k_proj"]}}, "2 parts, but style 'qkv' has at least 3"),
        ({"qkv_proj": KEYS, "output_gate": "sigmoid"}, "2 parts, but the module makes 3: q, gate, k"),
    ],
)
def test_what_does_not_fit_is_refused(words: dict[str, Any], problem: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=problem):
        small.on_rank(small.write(tmp_path / "model"), source=described(**words))
