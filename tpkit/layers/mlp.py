"""Feed-forward on one rank: its run of the intermediate width."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional as F

from tpkit.errors import SpecError
from tpkit.layers.roles import RoleModule

if TYPE_CHECKING:
    from tpkit.feedforward import MlpOptions
    from tpkit.making import BuildContext

__all__ = ["ACTIVATIONS", "Mlp"]

_tanh = partial(F.gelu, approximate="tanh")

#: by the names of config.json
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu_fast": _tanh,
    "gelu_new": _tanh,
    "gelu_pytorch_tanh": _tanh,
    "linear": lambda x: x,
    "mish": F.mish,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "relu6": F.relu6,
    "silu": F.silu,
    "swish": F.silu,
    "tanh": torch.tanh,
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
        if (self.child("activation") is None) == (options.activation == "child"):
            raise SpecError("a feed-forward has a child in the role activation where it says so, activation: child")
        self._act = ACTIVATIONS.get(options.activation, self._own)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns ``[B, L, hidden]`` for the same, equal on every rank."""
        up, down = self.projection("up_proj"), self.projection("down_proj")
        y = up(x)
        if len(up.out_sizes) == 2:
            gate, y = y.split(up.out_sizes, dim=-1)
            y = self._act(gate) * y
        else:
            y = self._act(y)
        return down(y)  # type: ignore[no-any-return]

    def _own(self, x: torch.Tensor) -> torch.Tensor:
        own = self.child("activation")
        assert own is not None  # noqa: S101 - it was there when this was made
        y: torch.Tensor = own(x)
        return y
