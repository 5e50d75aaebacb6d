"""Experts of a few kilobytes, written without transformers: for tests of files, names and shapes, not of logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests import small

__all__ = ["CONFIG", "FAMILY", "stacked", "weights", "write"]

FAMILY = "mixtral"
#: router [8, 32]; of each of 8 experts w1 and w3 [24, 32], w2 [32, 24]; attention as in tests/small.py
CONFIG: dict[str, Any] = {
    "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 24,
}  # fmt: skip


def weights(**fields: Any) -> dict[str, torch.Tensor]:
    """Returns random weights by their names on disk, for `CONFIG` with some fields changed."""
    c = small.CONFIG | CONFIG | fields
    found = {name: tensor for name, tensor in small.weights(**CONFIG | fields).items() if ".mlp." not in name}
    generator = torch.Generator().manual_seed(1)
    hidden, width, experts = c["hidden_size"], c["intermediate_size"], c["num_local_experts"]
    for layer in range(c["num_hidden_layers"]):
        stem = f"model.layers.{layer}.block_sparse_moe"
        found[f"{stem}.gate.weight"] = torch.randn(experts, hidden, generator=generator)
        for n in range(experts):
            for name, shape in (("w1", (width, hidden)), ("w3", (width, hidden)), ("w2", (hidden, width))):
                found[f"{stem}.experts.{n}.{name}.weight"] = torch.randn(shape, generator=generator)
    return found


def stacked(tensors: dict[str, torch.Tensor], **names: str) -> dict[str, torch.Tensor]:
    """Returns the same weights, those of all experts in one tensor; `names` are others for w1, w2 and w3."""
    found: dict[str, list[torch.Tensor]] = {}
    left = {}
    for name, tensor in tensors.items():
        above, _, rest = name.partition(".experts.")
        if not rest:
            left[name] = tensor
            continue
        _, part, kind = rest.split(".")
        found.setdefault(f"{above}.experts.{names.get(part, part)}.{kind}", []).append(tensor)
    return left | {name: torch.stack(each) for name, each in found.items()}


def write(folder: Path, tensors: dict[str, torch.Tensor] | None = None, **fields: Any) -> Path:
    """Writes a checkpoint folder of `FAMILY`; see tests/small.py."""
    tensors = weights(**fields) if tensors is None else tensors
    return small.write(folder, tensors, **CONFIG | fields)
