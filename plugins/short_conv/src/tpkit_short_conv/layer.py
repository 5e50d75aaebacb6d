"""The gated short convolution on one rank: its run of the channels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tpkit.layers import CausalConv, ForwardContext, RoleModule

if TYPE_CHECKING:
    from tpkit.layers import BuildContext
    from tpkit.modules import Children

__all__ = ["ShortConvLayer"]


class ShortConvLayer(RoleModule):
    """Gates, convolves and gates again.

    Args:
        children: in_proj, conv and out_proj: role -> (name, module).
        build: hands out the place in the cache.
    """

    takes_context = True

    def __init__(self, children: Children, build: BuildContext) -> None:
        super().__init__(children)
        self._convolved = CausalConv(self.projection("conv"), build)

    def forward(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Returns ``[B, L, hidden]`` for the same, equal on every rank."""
        into, out = self.projection("in_proj"), self.projection("out_proj")
        gate_in, gate_out, x = into(x).split(into.out_sizes, dim=-1)
        y: torch.Tensor = out(gate_out * self._convolved(gate_in * x, context))
        return y
