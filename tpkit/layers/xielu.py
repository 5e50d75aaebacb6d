"""The activation xIELU on one rank; every rank holds its four numbers."""

from __future__ import annotations

import torch
from torch.nn.functional import softplus

from tpkit.layers.roles import RoleModule

__all__ = ["Xielu"]


class Xielu(RoleModule):
    """The activation of Huang and Schlag 2025, arXiv:2411.13010.

    With ``a = softplus(alpha_p)`` and ``b = beta + softplus(alpha_n)`` it is ``a x**2 + beta x`` where x > 0, and
    ``b (exp(min(x, eps)) - 1 - x) + beta x`` elsewhere.
    """

    def _number(self, role: str) -> torch.Tensor:
        found = self.parameter(role)
        assert found is not None  # noqa: S101 - all four are required
        return found

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the activation of ``[...]``, element by element."""
        beta, eps = self._number("beta"), self._number("eps")
        above = softplus(self._number("alpha_p"))
        below = beta + softplus(self._number("alpha_n"))
        curved = torch.where(x > 0, above * x * x, (torch.expm1(torch.minimum(x, eps)) - x) * below)
        return curved + beta * x
