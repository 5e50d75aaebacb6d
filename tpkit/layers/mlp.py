"""Feed-forward on one rank: its run of the intermediate width."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from tpkit.errors import SpecError
from tpkit.layers.activations import ACTIVATIONS, gate_of
from tpkit.layers.roles import RoleModule

if TYPE_CHECKING:
    from tpkit.feedforward import MlpOptions, MoeOptions
    from tpkit.layers.building import BuildContext
    from tpkit.modules import Children

__all__ = ["ACTIVATIONS", "FeedForward", "Mlp"]


class FeedForward(RoleModule):
    """What is between both projections of a feed-forward.

    Args:
        options: bound words of the description, with an activation.
        children: role -> (name, module).

    Attributes:
        gated: the first projection gives a gate and what it multiplies.
    """

    def __init__(self, options: MlpOptions | MoeOptions, children: Children) -> None:
        super().__init__(children)
        if (self.child("activation") is None) == (options.activation == "child"):
            raise SpecError("a feed-forward has a child in the role activation where it says so, activation: child")
        self.gated = len(getattr(children["up_proj"][1], "out_sizes", ())) == 2
        self._act = ACTIVATIONS.get(options.activation, self._own) if isinstance(options.activation, str) else None
        if self._act is None and not self.gated:
            raise SpecError("a gated activation needs a gate: a merged_column projection")
        self._gate = gate_of(self._act or options.activation)  # type: ignore[arg-type]

    def activated(self, y: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """Returns ``[..., width]`` of the first projection's output, whose segments are of these sizes."""
        if self.gated:
            gate, up = y.split(list(sizes), dim=-1)
            return self._gate(gate, up)
        assert self._act is not None  # noqa: S101 - refused above
        return self._act(y)

    def _own(self, x: torch.Tensor) -> torch.Tensor:
        own = self.child("activation")
        assert own is not None  # noqa: S101 - it was there when this was made
        y: torch.Tensor = own(x)
        return y


class Mlp(FeedForward):
    """``down(act(gate(x)) * up(x))`` with a merged projection, ``down(act(up(x)))`` with a plain one.

    Args:
        options: bound words of the description.
        children: up_proj and down_proj: role -> (name, module).
        build: not used here.
    """

    def __init__(self, options: MlpOptions, children: Children, build: BuildContext) -> None:
        super().__init__(options, children)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns ``[B, L, hidden]`` for the same, equal on every rank."""
        return self.projection("down_proj")(self._inner(x))  # type: ignore[no-any-return]

    def partial(self, x: torch.Tensor) -> torch.Tensor:
        """Returns this rank's summand of `forward`; their sum over the ranks is it."""
        return self.projection("down_proj").partial(self._inner(x))

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        up = self.projection("up_proj")
        return self.activated(up(x), up.out_sizes)
