"""The gated delta net on one rank: its value heads and the key heads they need."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

from tpkit import SpecError
from tpkit.layers import CausalConv, ForwardContext, RMSNorm, RoleModule
from tpkit_gated_delta_net.rule import delta_rule

if TYPE_CHECKING:
    from tpkit.layers import BuildContext
    from tpkit.modules import Children
    from tpkit_gated_delta_net import GatedDeltaNetOptions

__all__ = ["GatedDeltaNetLayer"]

#: added to the squared length of queries and keys before they are divided by it
EPS = 1e-6


class GatedDeltaNetLayer(RoleModule):
    """The layer over this rank's heads. All local sizes come from the projections' own shards.

    Args:
        options: bound words of the description.
        children: role -> (name, module), one for each role of the module type.
        build: hands out the places in the cache.

    Attributes:
        key_heads, value_heads: of this rank; both 0 on a rank that got none.
    """

    takes_context = True

    def __init__(self, options: GatedDeltaNetOptions, children: Children, build: BuildContext) -> None:
        super().__init__(children)
        keys, _, _, values = self.projection("in_proj_qkvz").out_sizes
        self.key_dim, self.value_dim = options.key_head_dim, options.value_head_dim
        self.key_heads, self.value_heads = keys // self.key_dim, values // self.value_dim
        norm = self.child("norm")
        if not isinstance(norm, RMSNorm) or norm.size != self.value_dim:
            raise SpecError("gated_delta_net: its norm is {norm: rms, over: value_head}")
        for role in ("A_log", "dt_bias"):
            if self._numbers(role).shape != (self.value_heads,):
                raise SpecError(f"gated_delta_net: {role} is one number for each value head, of style per_head")
        self._convolved = CausalConv(self.projection("conv1d"), build)
        sharing = self.value_heads // max(self.key_heads, 1)
        self.slot = build.state_slot(self.key_heads, sharing, self.key_dim, self.value_dim)

    def forward(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Returns ``[B, L, hidden]`` for the same, equal on every rank."""
        into, conv, out = (self.projection(role) for role in ("in_proj_qkvz", "conv1d", "out_proj"))
        state = context.state(self.slot)
        *qkv, z = into(x).split(into.out_sizes, dim=-1)
        mixed = F.silu(self._convolved(torch.cat(qkv, dim=-1), context))
        if self.value_heads == 0:
            return out(z)  # type: ignore[no-any-return]
        q, k, v = mixed.split(conv.out_sizes, dim=-1)
        q, k = self._by_head(q, self.key_dim), self._by_head(k, self.key_dim)
        decay, strength = self._gates(x)
        q = _unit(q) * self.key_dim**-0.5
        y, state = delta_rule(q, _unit(k), self._by_head(v, self.value_dim), decay, strength, state)
        context.keep(self.slot, state)
        return out(self._normed(y, z))  # type: ignore[no-any-return]

    def _numbers(self, role: str) -> torch.Tensor:
        found = self.parameter(role)
        assert found is not None  # noqa: S101 - all roles are required
        return found

    def _by_head(self, x: torch.Tensor, size: int) -> torch.Tensor:
        """Returns ``[B, key heads, value heads of each or 1, L, size]`` float32 for ``[B, L, features]``."""
        apart: torch.Tensor = x.unflatten(-1, (self.key_heads, -1, size))
        return apart.permute(0, 2, 3, 1, 4).float()

    def _gates(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns how much of its state each head keeps at each token, as a logarithm, and how strongly it corrects it.

        Both are ``[B, key heads, value heads of each, L]`` float32.
        """
        project = self.projection("in_proj_ba")
        b, a = project(x).split(project.out_sizes, dim=-1)
        decay = -self._numbers("A_log").float().exp() * F.softplus(a.float() + self._numbers("dt_bias").float())
        decay, strength = (self._by_head(part, 1).squeeze(-1) for part in (decay, torch.sigmoid(b)))
        return decay, strength

    def _normed(self, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """Normalises each value head and multiplies it by its gate.

        Args:
            y: as of `_by_head`.
            z: ``[B, L, features of all value heads]``.
        """
        norm = self.child("norm")
        assert norm is not None  # noqa: S101 - all roles are required
        y = norm(y.permute(0, 3, 1, 2, 4).to(z.dtype)).flatten(2)
        return (y * F.silu(z.float())).to(z.dtype)


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS)
