"""The module type ``gated_delta_net`` for tpkit: linear attention by the gated delta rule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from tpkit.modules import Axis, Child, Children, Declared, Features, ModuleType, Options, Role, Sides, hidden

if TYPE_CHECKING:
    from torch import nn

    from tpkit.layers import BuildContext

__all__ = ["GatedDeltaNet", "GatedDeltaNetOptions"]


class GatedDeltaNetOptions(Options):
    """Words of ``module: gated_delta_net``.

    Attributes:
        key_heads: heads of queries and of keys.
        value_heads: heads of values, each with a state of its own; a multiple of the key heads, which they share.
        key_head_dim, value_head_dim: features of a head.
        conv_kernel: tokens that the convolution sees.
        activation: after the convolution.
    """

    key_heads: int = Field(gt=0)
    value_heads: int = Field(gt=0)
    key_head_dim: int = Field(gt=0)
    value_head_dim: int = Field(gt=0)
    conv_kernel: int = Field(gt=0)
    activation: Literal["silu", "swish"] = "silu"


class GatedDeltaNet(ModuleType):
    """Gated delta net (Yang et al. 2024, arXiv:2412.06464) with a convolution before it and a gated norm behind it.

    The value heads and the key head they share are one axis, like query heads and their kv head in attention. Layouts
    may recur per ``key_head``, with its value heads.
    """

    Options = GatedDeltaNetOptions
    roles = (
        Role(name="in_proj_qkvz", styles=("merged_column",)),
        Role(name="in_proj_ba", styles=("merged_column",)),
        Role(name="conv1d", styles=("merged_column",)),
        Role(name="A_log"),
        Role(name="dt_bias"),
        Role(name="norm"),
        Role(name="out_proj", styles=("row",)),
    )

    @classmethod
    def declare(cls, options: GatedDeltaNetOptions, hidden_size: int, children: Mapping[str, Child]) -> Declared:
        heads = Axis(name="value heads", units=options.value_heads, groups=options.key_heads)
        q, k = (Features(name=name, axis=heads, unit=options.key_head_dim, grouped=True) for name in "qk")
        v, z = (Features(name=name, axis=heads, unit=options.value_head_dim) for name in "vz")
        b, a = (Features(name=name, axis=heads) for name in "ba")
        each = Sides(in_=(), out=(replace(a, name=""),))
        return Declared(
            sides={
                "in_proj_qkvz": Sides(in_=hidden(hidden_size), out=(q, k, v, z)),
                "in_proj_ba": Sides(in_=hidden(hidden_size), out=(b, a)),
                "conv1d": Sides(in_=hidden(options.conv_kernel), out=(q, k, v)),  # stored [channels, 1, kernel]
                "A_log": each,
                "dt_bias": each,
                "out_proj": Sides(in_=(replace(v, name=""),), out=hidden(hidden_size)),
            },
            widths={"value_head": options.value_head_dim},
            counts={"key_head": options.key_heads, "value_head": options.value_heads},
        )

    @classmethod
    def build(cls, options: GatedDeltaNetOptions, children: Children, context: BuildContext) -> nn.Module:
        from tpkit_gated_delta_net.layer import GatedDeltaNetLayer

        return GatedDeltaNetLayer(options, children, context)
