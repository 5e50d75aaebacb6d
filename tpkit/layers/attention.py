"""Grouped-query attention on one rank: its query heads and the kv heads they need."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from tpkit.layers.context import ForwardContext
from tpkit.layers.roles import RoleModule

if TYPE_CHECKING:
    from tpkit.making import BuildContext
    from tpkit.modules import AttentionOptions

__all__ = ["Attention"]


class Attention(RoleModule):
    """Attention over this rank's heads. All local sizes come from the projection's own shard.

    Args:
        options: bound words of the description.
        children: qkv_proj and o_proj, optionally q_norm and k_norm: role -> (name, module).
        build: hands out the cache slot and the rotary embedding.

    Attributes:
        heads, kv_heads: of this rank; both 0 on a rank that got none.
    """

    takes_context = True

    def __init__(
        self, options: AttentionOptions, children: Mapping[str, tuple[str, nn.Module]], build: BuildContext
    ) -> None:
        super().__init__(children)
        qkv = self.projection("qkv_proj")
        self.head_dim: int = options.head_dim
        self.heads, self.kv_heads, _ = (size // options.head_dim for size in qkv.out_sizes)
        self.scale = options.head_dim**-0.5 if options.scale is None else options.scale
        self.window = options.window
        self.slot = build.cache_slot(self.kv_heads, options.head_dim)
        # in a list, so that the layers' common embedding is not registered once under each of them
        self._rotary = [build.rotary(options.rope, options.head_dim)] if options.rope is not None else []

    def forward(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Attends.

        Args:
            x: ``[B, L, hidden]``.
            context: positions and cache of this pass.

        Returns:
            ``[B, L, hidden]``, the same on every rank.
        """
        qkv, out = self.projection("qkv_proj"), self.projection("o_proj")
        context.enter(self.slot)
        q, k, v = qkv(x).split(qkv.out_sizes, dim=-1)
        if self.heads == 0:
            return out(q)  # type: ignore[no-any-return]
        q, k, v = (self._by_head(part) for part in (q, k, v))
        q_norm, k_norm = self.child("q_norm"), self.child("k_norm")
        q = q if q_norm is None else q_norm(q)
        k = k if k_norm is None else k_norm(k)
        for rotary in self._rotary:
            q, k = rotary(q, context), rotary(k, context)
        if context.cache is not None:
            k, v = context.cache.append(self.slot, k, v)
        y = self._attend(q, k, v, context)
        return out(y.transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]

    def _by_head(self, x: torch.Tensor) -> torch.Tensor:
        apart: torch.Tensor = x.unflatten(-1, (-1, self.head_dim))
        return apart.transpose(1, 2)

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        if self.window is not None and context.length == 1:
            k, v = k[:, :, -self.window :], v[:, :, -self.window :]  # one query sees the last keys, all of them
            mask, causal = None, False
        else:
            mask, causal = context.mask(self.window)
        return scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=self.scale, enable_gqa=self.heads != self.kv_heads
        )
