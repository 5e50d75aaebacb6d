"""Feed-forward on one rank: its run of the intermediate width."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional as F

from tpkit.layers.roles import RoleModule

if TYPE_CHECKING:
    from tpkit.making import BuildContext
    from tpkit.modules import MlpOptions

__all__ = ["ACTIVATIONS", "Mlp"]

_tanh = partial(F.gelu, approximate="tanh")

#: by the names of config.json
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": _tanh,
    "gelu_pytorch_tanh": _tanh,
    "relu": F.relu,
    "silu": F.silu,
    "swish": F.silu,
}


class Mlp(RoleModule):
    """``down(act(gate(x)) * up(x))`` with a merged projection, ``down(act(up(x)))`` with a plain one.

    Args:
        options: bound words of the description.
        children: up_proj and down_proj: role -> (name, module).
        build: not used here.
    """

    def __init__(self, options: MlpOptions, children: Mapping[str, tuple[str, nn.Module]], build: BuildContext) -> None:
        super().__init__(children)
        self.activation = ACTIVATIONS[options.activation]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns ``[B, L, hidden]`` for the same, equal on every rank."""
        up, down = self.projection("up_proj"), self.projection("down_proj")
        y = up(x)
        if len(up.out_sizes) == 2:
            gate, y = y.split(up.out_sizes, dim=-1)
            y = self.activation(gate) * y
        else:
            y = self.activation(y)
        return down(y)  # type: ignore[no-any-return]
