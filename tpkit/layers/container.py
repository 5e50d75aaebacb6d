"""A node without parameters of its own: runs its children in order, or by the description's forward formulas."""

from __future__ import annotations

import torch
from torch import nn

from tpkit.layers.context import ForwardContext
from tpkit.layers.embedding import ParallelLMHead
from tpkit.layers.roles import Parent
from tpkit.spec.bound import Step

__all__ = ["Container", "run"]


def run(module: nn.Module, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
    """Calls a module as it wants to be called: repeated ones in order, with the context those that take it."""
    if isinstance(module, nn.ModuleList):
        for each in module:
            x = run(each, x, context)
        return x
    if context.last_only and isinstance(module, ParallelLMHead):
        x = x[:, -1:]
    return module(x, context) if getattr(module, "takes_context", False) else module(x)  # type: ignore[no-any-return]


class Container(Parent):
    """Children by name.

    Args:
        steps: each makes the new ``x`` as a sum of terms; None: children run in their order.
    """

    takes_context = True

    def __init__(self, steps: tuple[Step, ...] | None = None) -> None:
        super().__init__()
        self.steps = steps

    def forward(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Runs the steps on ``x``."""
        if self.steps is None:
            for child in self.children():
                x = run(child, x, context)
            return x
        for step in self.steps:
            x = self._step(step, x, context)
        return x

    def _step(self, step: Step, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        total: torch.Tensor | None = None
        for term in step:
            value = x
            if term.call is not None:
                argument = self._step(term.call.argument, x, context)
                value = run(self.get_submodule(term.call.child), argument, context)
            if term.factor != 1.0:
                value = value * term.factor
            total = value if total is None else total + value
        return x if total is None else total
