"""Grouped-query attention on one rank: its query heads and the kv heads they need."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.functional import pad, scaled_dot_product_attention

from tpkit.errors import SpecError, UsageError
from tpkit.layers.alibi import Alibi
from tpkit.layers.context import ForwardContext
from tpkit.layers.norm import Norm
from tpkit.layers.roles import RoleModule

if TYPE_CHECKING:
    from tpkit.attention import AttentionOptions
    from tpkit.layers.building import BuildContext

__all__ = ["Attention"]

#: roles of norms: of queries, keys and values
NORMS = ("q_norm", "k_norm", "v_norm")


class Attention(RoleModule):
    """Attention over this rank's heads. All local sizes come from the projection's own shard.

    Args:
        options: bound words of the description.
        children: qkv_proj and o_proj, optionally q_norm, k_norm, v_norm and sinks: role -> (name, module).
        build: hands out the cache slot and the rotary embedding.

    Attributes:
        heads, kv_heads: of this rank; both 0 on a rank that got none.
        gated: qkv_proj has a part for a gate after that for queries.
    """

    takes_context = True

    def __init__(
        self, options: AttentionOptions, children: Mapping[str, tuple[str, nn.Module]], build: BuildContext
    ) -> None:
        super().__init__(children)
        qkv = self.projection("qkv_proj")
        self.head_dim: int = options.head_dim
        self.heads, *_, self.kv_heads = (size // options.head_dim for size in qkv.out_sizes)
        self.scale = options.head_dim**-0.5 if options.scale is None else options.scale
        self.window, self.chunk = options.window, options.chunk
        self.softcap, self.clip, self.gated = options.softcap, options.clip, options.output_gate is not None
        self.clip_after = options.clip_after
        self.temperature, self.max_positions = options.temperature, options.max_positions
        self._norms = {role: self._place(role) for role in NORMS if self.child(role) is not None}
        self.slot = build.cache_slot(self.kv_heads, options.head_dim)
        # in a list, so that the layers' common embedding is not registered once under each of them
        self._rotary = [build.rotary(options.rope, options.head_dim)] if options.rope is not None else []
        self.alibi: Alibi | None = None
        if options.alibi is not None:
            start, stop = qkv.sharded.layer.bounds(qkv.sharded.layer.spec.out, qkv.sharded.rank)[0]
            own = start // options.head_dim, stop // options.head_dim
            self.alibi = Alibi(options.alibi, options.heads, own, self.scale, build.device)
        self._check_sinks()

    def _check_sinks(self) -> None:
        sinks = self.parameter("sinks")
        if sinks is None:
            return
        if tuple(sinks.shape) != (self.heads,):
            raise SpecError("attention: its sinks are a parameter of one number for each head, of style per_head")
        if self.softcap is not None or self.alibi is not None or self.scale == 0:
            raise SpecError("attention: sinks beside a softcap, alibi or a scale of 0 are not supported")

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
        q, *rest = qkv(x).split(qkv.out_sizes, dim=-1)
        gate, k, v = rest[: self.gated], rest[self.gated], rest[-1]  # without a part for values they are the keys
        q, k, v = self._clipped(None, q, k, v)
        q, k, v = self._normed("all heads", q, k, v)  # of all ranks: one without heads has its part in the sums too
        q, k, v = self._clipped("norms", q, k, v)
        if self.heads == 0:
            return out(q)  # type: ignore[no-any-return]
        q, k, v = self._normed("head", *(self._by_head(part) for part in (q, k, v)))
        for rotary in self._rotary:
            q, k = rotary(q, context), rotary(k, context)
        q, k, v = self._normed("turned head", q, k, v)
        if self.temperature is not None:
            q = q * self._temperature(context, q.dtype)
        if context.cache is not None:
            k, v = context.cache.append(self.slot, k, v)
        y = self._attend(q, k, v, context).transpose(1, 2).flatten(-2)
        for part in gate:
            y = y * torch.sigmoid(part)
        return out(y)  # type: ignore[no-any-return]

    def _place(self, role: str) -> str:
        """Returns what a norm takes: all heads side by side, each head, or each after it is turned."""
        norm = self.child(role)
        if not isinstance(norm, Norm):
            raise SpecError(f"attention: its {role} is a norm, not a {type(norm).__name__}")
        if role == "v_norm" and norm.after is not None:
            raise SpecError(f"attention: its {role} is after {norm.after}, but values are not turned")
        return "all heads" if norm.over != "head" else "head" if norm.after is None else "turned head"

    def _normed(self, place: str, *parts: torch.Tensor) -> list[torch.Tensor]:
        """Normalises queries, keys and values by those of their norms that belong in this place."""
        norms = [self.child(role) if self._norms.get(role) == place else None for role in NORMS]
        return [part if norm is None else norm(part) for part, norm in zip(parts, norms, strict=True)]

    def _clipped(self, after: str | None, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Keeps queries, keys and values within the clip, where this is the place for it."""
        if self.clip is None or after != self.clip_after:
            return parts
        limit = self.clip
        return tuple(part.clamp(-limit, limit) for part in parts)

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
        """Attends with ``[B, heads, L, head_dim]``, and all keys and values so far of the kv heads."""
        last = self.window if self.chunk is None and context.length == 1 else None
        if last is not None:
            k, v = k[:, :, -last:], v[:, :, -last:]  # one query sees the last keys, all of them
        if self.softcap is not None or self.alibi is not None:
            return self._by_scores(q, k, v, context)
        sinks = self.parameter("sinks")
        if sinks is not None:
            return self._with_sink(sinks, q, k, v, context)
        mask, causal = context.mask(self.window, self.chunk) if last is None else (None, False)
        return scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=self.scale, enable_gqa=self.heads != self.kv_heads
        )

    def _by_scores(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Attends by the scores themselves, float32, where something is done to them before the softmax."""
        groups, total = self.heads // self.kv_heads, k.shape[2]
        if groups > 1:
            k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        scores = (q @ k.transpose(-1, -2)).float() * self.scale
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        if self.alibi is not None:
            scores = scores + self.alibi.bias(context)[..., -total:]
        scores = scores.masked_fill(~context.seen(self.window, self.chunk)[..., -total:], -torch.inf)
        return torch.softmax(scores, dim=-1).to(v.dtype) @ v

    def _with_sink(
        self, sinks: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """Attends with one key more, which every query sees: its score is the sink of the query's head, its value zero.

        A feature more makes it so: it is the sink in queries, one in that key and zero in the others. So it needs no
        mask for each head, and kv heads stay shared.

        Args:
            sinks: ``[heads]``.
            q, k, v, context: as of `_attend`.
        """
        seen = context.seen(self.window, self.chunk)[:, -k.shape[2] :]
        ends = torch.finfo(q.dtype)  # no sink at all is minus infinity, which times the zero of other keys is no number
        sink = (sinks.float() / self.scale).clamp(ends.min, ends.max).to(q.dtype)
        q = torch.cat([q, sink[:, None, None].expand(*q.shape[:-1], 1)], dim=-1)
        k, v = pad(k, (0, 1, 1, 0)), pad(v, (0, 1, 1, 0))  # flash kernels want features alike
        k[:, :, 0, -1] = 1
        y = scaled_dot_product_attention(
            q, k, v, attn_mask=pad(seen, (1, 0), value=True), scale=self.scale, enable_gqa=self.heads != self.kv_heads
        )
        return y[..., :-1]
