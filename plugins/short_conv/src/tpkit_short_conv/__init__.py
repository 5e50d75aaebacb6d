"""The module type ``short_conv`` for tpkit: a short convolution between two gates, in place of attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pydantic import Field

from tpkit.modules import Axis, Child, Children, Declared, Features, ModuleType, Options, Role, Sides, hidden

if TYPE_CHECKING:
    from torch import nn

    from tpkit.layers import BuildContext

__all__ = ["ShortConv", "ShortConvOptions"]


class ShortConvOptions(Options):
    """Words of ``module: short_conv``.

    Attributes:
        kernel: a token sees this many, itself among them.
    """

    kernel: int = Field(gt=0)


class ShortConv(ModuleType):
    """``out_proj(C * conv(B * x))`` with B, C and x from in_proj, each as wide as the hidden state (arXiv:2511.23404).

    Nothing but the projections mixes channels, so that ranks divide them.
    """

    Options = ShortConvOptions
    roles = (
        Role(name="in_proj", styles=("merged_column",)),
        Role(name="conv", styles=("column",)),
        Role(name="out_proj", styles=("row",)),
    )

    @classmethod
    def declare(cls, options: ShortConvOptions, hidden_size: int, children: Mapping[str, Child]) -> Declared:
        channels = Axis(name="channels", units=hidden_size)
        one = (Features(name="", axis=channels),)
        three = tuple(Features(name=name, axis=channels) for name in ("B", "C", "x"))
        return Declared(
            sides={
                "in_proj": Sides(in_=hidden(hidden_size), out=three),
                "conv": Sides(in_=hidden(options.kernel), out=one),  # stored [channels, 1, kernel]
                "out_proj": Sides(in_=one, out=hidden(hidden_size)),
            }
        )

    @classmethod
    def build(cls, options: ShortConvOptions, children: Children, context: BuildContext) -> nn.Module:
        from tpkit_short_conv.layer import ShortConvLayer

        return ShortConvLayer(children, context)
