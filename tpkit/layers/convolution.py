"""Short causal convolutions over the tokens, one for each channel, as recurrent layers have them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

from tpkit.errors import SpecError
from tpkit.layers.context import ForwardContext
from tpkit.layers.parallel import ParallelLinear
from tpkit.quant import Unquantized

if TYPE_CHECKING:
    from tpkit.layers.building import BuildContext

__all__ = ["CausalConv"]


class CausalConv:
    """Convolves this rank's channels: each token sees itself and as many before it as the kernel is long.

    The weight is that of a column projection whose outputs are the channels and whose inputs are the places of the
    kernel, the token's own last. It is no layer itself, so that the projection keeps its name.

    Args:
        projection: holds the weight ``[channels, kernel]``, and a bias if there is one.
        build: hands out the place for the tokens before.
    """

    def __init__(self, projection: ParallelLinear, build: BuildContext) -> None:
        if not isinstance(projection.quant_method, Unquantized):
            raise SpecError(
                f"{projection.path}: a convolution is not quantised",
                hint=f"say quant: none of {projection.path.rpartition('.')[2]} in the description",
            )
        self.projection = projection
        self.before = projection.in_features - 1
        self.slot = build.state_slot(projection.out_features, self.before)

    def __call__(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Returns ``[B, L, channels]`` for the same."""
        before = context.state(self.slot)
        if self.projection.out_features == 0:
            return x
        x = x.transpose(1, 2)
        seen = F.pad(x, (self.before, 0)) if before is None else torch.cat([before, x], dim=-1)
        context.keep(self.slot, seen[..., x.shape[-1] :].clone())  # a view would hold all of them
        weight, bias = self.projection.weight, self.projection.bias
        return F.conv1d(seen, weight.unsqueeze(1), bias, groups=weight.shape[0]).transpose(1, 2)
