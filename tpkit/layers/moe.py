"""A feed-forward of experts on one rank: its experts, and its run of their width."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tpkit.errors import PluginError, SpecError
from tpkit.layers.experts import ExpertLinear, Sorted
from tpkit.layers.mlp import FeedForward, Mlp
from tpkit.layers.routing import route

if TYPE_CHECKING:
    from tpkit.feedforward import MoeOptions
    from tpkit.layers.building import BuildContext
    from tpkit.modules import Children

__all__ = ["Moe"]


class Moe(FeedForward):
    """Routed experts, and shared ones beside them.

    Every rank routes all tokens, computes its own experts (its run of their width) for the tokens that chose them, and
    one sum over the ranks completes routed and shared experts together.

    Args:
        options: bound words of the description.
        children: router, up_proj and down_proj of the experts, optionally correction_bias, shared, shared_gate:
            role -> (name, module).
        build: this rank's place.
    """

    def __init__(self, options: MoeOptions, children: Children, build: BuildContext) -> None:
        super().__init__(options, children)
        self.tp, self.routing = build.tp, options.routing
        shared, correction = self.child("shared"), self.parameter("correction_bias")
        if not isinstance(shared, Mlp | None) or (shared is None and self.child("shared_gate") is not None):
            raise SpecError("experts: shared is a feed-forward (module: mlp), and only one that is there has a gate")
        total = self._experts("up_proj").total
        if correction is not None and correction.shape != (total,):
            raise SpecError(f"experts: a correction_bias of {list(correction.shape)} for {total} experts")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns ``[B, L, hidden]`` for the same, equal on every rank."""
        flat = x.flatten(0, -2)
        weights, chosen = route(self.projection("router")(flat), self.routing, self.parameter("correction_bias"))
        y = self._routed(flat, weights, chosen) + self._shared(flat)
        return self.tp.all_reduce(y).view_as(x)

    def _routed(self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Returns this rank's summand of what the routed experts give, ``[T, hidden]``.

        Args:
            x: ``[T, hidden]``.
            weights, chosen: ``[T, k]`` of `route`.
        """
        up, down = self._experts("up_proj"), self._experts("down_proj")
        k = chosen.shape[-1]
        if not len(up) or not (down.in_divided or down.leads):  # the first of the group has it all then
            return x.new_zeros(len(x), down.out_features)
        local = chosen.flatten() - up.first
        local = torch.where((local >= 0) & (local < len(up)), local, len(up))
        counts = local.new_zeros(len(up) + 1).scatter_add_(0, local, torch.ones_like(local))[:-1]
        order = local.argsort(stable=True)
        if len(up) < up.total:
            order = order[: int(counts.sum())]
        rows = Sorted(counts)
        each = weights.to(x.dtype).flatten()[order].unsqueeze(-1)
        tokens = x[order // k]
        if self.routing.apply_to == "input":
            tokens = tokens * each
        y = down(self.activated(up(tokens, rows), up.out_sizes), rows, bias=down.leads)
        if self.routing.apply_to == "output":
            y = y * each
        spread = y.new_zeros(len(x) * k, y.shape[-1])
        spread[order] = y  # each token's experts side by side again: added in one order, whatever the batch
        total: torch.Tensor = spread.view(len(x), k, y.shape[-1]).sum(1)
        return total

    def _shared(self, x: torch.Tensor) -> torch.Tensor | float:
        """Returns this rank's summand of what the shared experts give."""
        shared = self.child("shared")
        if not isinstance(shared, Mlp):
            return 0.0
        y = shared.partial(x)
        if self.child("shared_gate") is None:
            return y
        return torch.sigmoid(self.projection("shared_gate")(x)) * y

    def _experts(self, role: str) -> ExpertLinear:
        found = self.child(role)
        if not isinstance(found, ExpertLinear):
            raise PluginError(f"experts need an expert projection as {role}, not a {type(found).__name__}")
        return found
