"""Grouped-query attention on one rank: its query heads and the kv heads they need."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from tpkit.errors import SpecError, UsageError
from tpkit.layers.alibi import Alibi
from tpkit.layers.context import ForwardContext
from tpkit.layers.norm import Norm
from tpkit.layers.roles import RoleModule

if TYPE_CHECKING:
    from tpkit.attention import AttentionOptions
    from tpkit.making import BuildContext

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
        self.window, self.chunk = options.window, options.chunk
        self.softcap, self.clip = options.softcap, options.clip
        self.temperature, self.max_positions = options.temperature, options.max_positions
        for role in ("q_norm", "k_norm"):
            if not isinstance(self.child(role), Norm | None):
                raise SpecError(f"attention: its {role} is a norm, not a {type(self.child(role)).__name__}")
        self.slot = build.cache_slot(self.kv_heads, options.head_dim)
        # in a list, so that the layers' common embedding is not registered once under each of them
        self._rotary = [build.rotary(options.rope, options.head_dim)] if options.rope is not None else []
        self.alibi: Alibi | None = None
        if options.alibi is not None:
            start, stop = qkv.sharded.layer.bounds(qkv.sharded.layer.spec.out, qkv.sharded.rank)[0]
            own = start // options.head_dim, stop // options.head_dim
            self.alibi = Alibi(options.alibi, options.heads, own, self.scale, build.device)

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
        if self.max_positions is not None and context.past + context.length > self.max_positions:
            raise UsageError(
                f"{context.past + context.length} tokens; beyond {self.max_positions} this model attends in a way "
                "that is not supported"
            )
        y = qkv(x)
        if self.clip is not None:
            y = y.clamp(-self.clip, self.clip)
        q, k, v = y.split(qkv.out_sizes, dim=-1)
        # over all heads of all ranks: one without heads has its part in the sums too
        q, k = self._normed(q, "q_norm", across=True), self._normed(k, "k_norm", across=True)
        if self.heads == 0:
            return out(q)  # type: ignore[no-any-return]
        q, k, v = (self._by_head(part) for part in (q, k, v))
        q, k = self._normed(q, "q_norm"), self._normed(k, "k_norm")
        for rotary in self._rotary:
            q, k = rotary(q, context), rotary(k, context)
        q, k = self._normed(q, "q_norm", after="rope"), self._normed(k, "k_norm", after="rope")
        if self.temperature is not None:
            q = q * self._temperature(context, q.dtype)
        if context.cache is not None:
            k, v = context.cache.append(self.slot, k, v)
        y = self._attend(q, k, v, context)
        return out(y.transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]

    def _normed(self, x: torch.Tensor, role: str, *, across: bool = False, after: str | None = None) -> torch.Tensor:
        """Normalises by the child in a role, where this is the place for it."""
        norm = self.child(role)
        if norm is None or (norm.over != "head") != across or (not across and norm.after != after):
            return x
        return norm(x)  # type: ignore[no-any-return]

    def _by_head(self, x: torch.Tensor) -> torch.Tensor:
        apart: torch.Tensor = x.unflatten(-1, (-1, self.head_dim))
        return apart.transpose(1, 2)

    def _temperature(self, context: ForwardContext, dtype: torch.dtype) -> torch.Tensor:
        """Returns ``[L, 1]``: later queries are sharper."""
        t = self.temperature
        assert t is not None  # noqa: S101 - asked for where it is there

        def make() -> torch.Tensor:
            passed = torch.floor((context.positions.float() + t.offset) / t.length)
            return (1 + t.beta * torch.log1p(passed)).to(dtype)[:, None]

        return context.once(("temperature", t.beta, t.length, t.offset, dtype), make)

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        if self.softcap is not None or self.alibi is not None:
            return self._by_scores(q, k, v, context)
        if self.window is not None and self.chunk is None and context.length == 1:
            k, v = k[:, :, -self.window :], v[:, :, -self.window :]  # one query sees the last keys, all of them
            mask, causal = None, False
        else:
            mask, causal = context.mask(self.window, self.chunk)
        return scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=self.scale, enable_gqa=self.heads != self.kv_heads
        )

    def _by_scores(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Attends by the scores themselves, float32, where something is done to them before the softmax."""
        groups = self.heads // self.kv_heads
        if groups > 1:
            k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        scores = (q @ k.transpose(-1, -2)).float() * self.scale
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        if self.alibi is not None:
            scores = scores + self.alibi.bias(context)
        scores = scores.masked_fill(~context.seen(self.window, self.chunk), -torch.inf)
        return torch.softmax(scores, dim=-1).to(v.dtype) @ v
