"""A packed projection whose parts differ in how they are quantised or stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tpkit.distributed.group import TensorParallel
from tpkit.layers.parallel import ParallelLinear
from tpkit.layers.sharded import Sharded

__all__ = ["PartedLinear"]


class PartedLinear(ParallelLinear):
    """Computes each part on its own and puts their outputs side by side, in the order of the packed projection.

    Args:
        sharded: the packed projection's shard; it has no parameters.
        tp: this rank's place.
        parts: the shards of its parts, by name.
        flags: see `ParallelLinear`.
    """

    def __init__(self, sharded: Sharded, tp: TensorParallel, parts: Mapping[str, Sharded], **flags: Any) -> None:
        super().__init__(sharded, tp, **flags)
        self.parts = {name: ParallelLinear.of(part, tp) for name, part in parts.items()}
        for name, part in self.parts.items():
            self.add_module(name, part)

    def _multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        outputs: dict[str, torch.Tensor] = {}
        for part in self.parts.values():
            y = part._multiply(x, part.bias)
            names = [segment.name for segment in part.sharded.layer.spec.out]
            outputs.update(zip(names, y.split(part.out_sizes, dim=-1), strict=True))
        return torch.cat([outputs[segment.name] for segment in self.sharded.layer.spec.out], dim=-1)
