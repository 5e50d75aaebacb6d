"""Parallel styles: on which side a projection meets its axis, and which collective ends it.

A style is a plugin (``tpkit.styles``). The built-in ones are declared here; none imports torch before it builds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import nn

    from tpkit.distributed.group import TensorParallel
    from tpkit.layers.sharded import Sharded

__all__ = ["Style", "column", "merged_column", "qkv", "replicated", "row", "vocab"]


@dataclass(frozen=True, kw_only=True)
class Style:
    """A parallel style.

    Attributes:
        name: the word in a description.
        divides: the side that lies on an axis, and so is divided over ranks; None: neither.
        segments: how many segments the other names of `packs` or `fused` make at least; 1: not packed.
        layer: class in `tpkit.layers` that computes it.
        api: version of the plugin contract.
    """

    name: str
    divides: Literal["out", "in"] | None
    segments: int = 1
    layer: str = "ReplicatedLinear"
    api: int = 1

    def build(self, sharded: Sharded, tp: TensorParallel, **flags: Any) -> nn.Module:
        """Returns the module that computes a projection of this style on this rank."""
        import tpkit.layers as layers

        built: nn.Module = getattr(layers, self.layer).of(sharded, tp, **flags)
        return built


replicated = Style(name="replicated", divides=None, layer="ReplicatedLinear")
column = Style(name="column", divides="out", layer="ColumnParallelLinear")
merged_column = Style(name="merged_column", divides="out", segments=2, layer="MergedColumnParallelLinear")
qkv = Style(name="qkv", divides="out", segments=3, layer="QKVParallelLinear")
row = Style(name="row", divides="in", layer="RowParallelLinear")
vocab = Style(name="vocab", divides="out", layer="ParallelLMHead")
