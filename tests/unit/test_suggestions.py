"""What a misspelt name may have meant, among a few names and among those of a model with very many tensors."""

from __future__ import annotations

from time import process_time

import pytest

from tpkit.errors import did_you_mean

KNOWN = [
    f"model.layers.{layer}.mlp.experts.{number}.{part}.weight"
    for layer in range(48)
    for number in range(128)
    for part in ("gate_proj", "up_proj", "down_proj")
]


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("model.layers.7.mlp.experts.31.gate_proj.wight", "model.layers.7.mlp.experts.31.gate_proj.weight"),
        ("layers.7.mlp.experts.31.up_proj.weight", "model.layers.7.mlp.experts.31.up_proj.weight"),
        ("model.layers.7.mlp.expert.31.up_proj.weight", "model.layers.7.mlp.experts.31.up_proj.weight"),
        ("nothing of the kind", None),
    ],
)
def test_among_very_many_names(word: str, meant: str | None) -> None:
    began = process_time()
    assert did_you_mean(word, KNOWN) == (f" (did you mean {meant!r}?)" if meant else "")
    assert process_time() - began < 5  # each of them compared takes a quarter of a minute
