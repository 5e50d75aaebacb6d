"""Multi-head latent attention on one rank: its heads, and the latent that all heads share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from tpkit import PluginError, SpecError
from tpkit.layers import ForwardContext, LayerNorm, PartedLinear, RMSNorm, RoleModule

if TYPE_CHECKING:
    from tpkit.layers import BuildContext
    from tpkit_mla import MlaOptions

__all__ = ["LatentAttention"]


class LatentAttention(RoleModule):
    """Attention whose keys and values are made of one latent per token (arXiv:2405.04434, section 2.1).

    For each token there is a latent ``c`` of `rank` features, and a part ``k_rope`` of the key that is turned by the
    position and that all heads share. Head ``i`` has the key ``[K_i c, k_rope]`` and the value ``V_i c``; ``K_i`` and
    ``V_i`` are its rows of kv_b_proj. The cache keeps ``c`` and ``k_rope`` alone, on every rank that has heads.

    Args:
        options: bound words of the description.
        children: role -> (name, module).
        build: hands out the cache slot and the rotary embedding.

    Attributes:
        heads: of this rank; 0 on a rank that got none.
        nope, rope, value: features of a head: of queries and keys, not turned and turned, and of values.
        rank: features of the latent.
    """

    takes_context = True

    def __init__(self, options: MlaOptions, children: Mapping[str, tuple[str, nn.Module]], build: BuildContext) -> None:
        super().__init__(children)
        self.nope, self.rope, self.value = options.qk_nope_head_dim, options.qk_rope_head_dim, options.v_head_dim
        self.rank = options.kv_lora_rank
        self.q_role = "q_proj" if options.q_lora_rank is None else "q_b_proj"
        self.heads: int = self.projection(self.q_role).out_sizes[0] // self.nope
        self.scale = options.score_scale
        self._check_norm("q_a_layernorm", options.q_lora_rank)
        self._check_norm("kv_a_layernorm", options.kv_lora_rank)
        # a rank without heads attends to nothing, so it keeps nothing
        self.slot: int = build.cache_slot(1 if self.heads else 0, self.rank + self.rope, 0)
        # in a list, so that the layers' common embedding is not registered once under each of them
        self._rotary = [build.rotary(options.rope, self.rope)] if options.rope is not None else []
        kv = self.projection("kv_b_proj")
        changed = (kv.bias, kv.output_scale, kv.output_softcap)
        #: kv_b_proj is one matrix and nothing else
        self._is_matrix = not isinstance(kv, PartedLinear) and all(each is None for each in changed)

    def _check_norm(self, role: str, size: int | None) -> None:
        norm = self.child(role)
        if norm is None:
            return
        if not isinstance(norm, (RMSNorm, LayerNorm)):
            raise SpecError(f"mla: its {role} is a norm, not a {type(norm).__name__}")
        if norm.size != size:
            raise SpecError(f"mla: its {role} goes over {norm.over}, {norm.size} features, but gets {size}")

    def forward(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Attends.

        Args:
            x: ``[B, L, hidden]``.
            context: positions and cache of this pass.

        Returns:
            ``[B, L, hidden]``, the same on every rank.
        """
        context.enter(self.slot)
        out = self.projection("o_proj")
        if self.heads == 0:  # it still has its part in the sum over the ranks
            return out(x.new_zeros(*x.shape[:-1], 0))  # type: ignore[no-any-return]
        q_nope, q_rope = self._queries(x, context)
        kept = self._latents(x, context)
        attend = self._absorbed if self._absorbs(context.length, kept.shape[2]) else self._expanded
        y = attend(q_nope, q_rope, kept, context)
        return out(y.transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]

    def _queries(self, x: torch.Tensor, context: ForwardContext) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns ``[B, heads, L, nope]``, and ``[B, heads, L, rope]`` turned."""
        if self.q_role == "q_b_proj":
            x = self._normed(self.projection("q_a_proj")(x), "q_a_layernorm")
        project = self.projection(self.q_role)
        nope, rope = project(x).split(project.out_sizes, dim=-1)
        return self._by_head(nope), self._turned(self._by_head(rope), context)

    def _latents(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Returns latents and turned keys of all tokens so far, ``[B, 1, T, rank + rope]``."""
        latent, rope = self.projection("kv_a_proj_with_mqa")(x).split([self.rank, self.rope], dim=-1)
        latent = self._normed(latent, "kv_a_layernorm").unsqueeze(1)
        new = torch.cat([latent, self._turned(rope.unsqueeze(1), context)], dim=-1)
        if context.cache is None:
            return new
        return context.cache.append(self.slot, new, new[..., :0])[0]

    def _absorbs(self, new: int, total: int) -> bool:
        """Says whether it is less work to stay in the latent space, by the multiplications for one head.

        Expanding makes keys and values of all tokens once; absorbing makes the few queries as wide as the latent.
        """
        per_token = self.rank * (self.nope + self.value)
        expanded = total * (per_token + new * (self.nope + self.rope + self.value))
        absorbed = new * (per_token + total * (2 * self.rank + self.rope))
        return self._is_matrix and absorbed < expanded

    def _expanded(
        self, q_nope: torch.Tensor, q_rope: torch.Tensor, kept: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """Attends with keys and values made of all latents; returns ``[B, heads, L, value]``."""
        project = self.projection("kv_b_proj")
        k_nope, v = map(self._by_head, project(kept[:, 0, :, : self.rank]).split(project.out_sizes, dim=-1))
        k_rope = kept[..., self.rank :].expand(-1, self.heads, -1, -1)
        q, k = torch.cat([q_nope, q_rope], dim=-1), torch.cat([k_nope, k_rope.to(k_nope.dtype)], dim=-1)
        mask, causal = context.mask(None)
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=self.scale)

    def _absorbed(
        self, q_nope: torch.Tensor, q_rope: torch.Tensor, kept: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """Attends to the latents themselves; returns ``[B, heads, L, value]``.

        ``q (K c) = (q K) c`` and ``sum p (V c) = V (sum p c)``, so what is kept serves as one key, its latent as one
        value, for all heads: they are queries of a single head.
        """
        k, v = self._matrices(q_nope.dtype)
        q = torch.cat([q_nope @ k, q_rope], dim=-1)
        mask = context.seen(None).repeat(self.heads, 1) if context.length > 1 else None
        y = scaled_dot_product_attention(
            q.flatten(1, 2).unsqueeze(1), kept, kept[..., : self.rank], attn_mask=mask, scale=self.scale
        )
        apart: torch.Tensor = y.squeeze(1).unflatten(1, (self.heads, -1))
        return apart @ v.transpose(-1, -2)

    def _matrices(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the parts of kv_b_proj's weight, ``[heads, nope, rank]`` and ``[heads, value, rank]``."""
        project = self.projection("kv_b_proj")
        if project.quant_method is None:
            raise PluginError(f"{project.path or 'kv_b_proj'} of mla has no quant method, so its weight is not known")
        k, v = project.quant_method.dequantize(project).to(dtype).split(project.out_sizes)
        return k.unflatten(0, (self.heads, self.nope)), v.unflatten(0, (self.heads, self.value))

    def _by_head(self, x: torch.Tensor) -> torch.Tensor:
        apart: torch.Tensor = x.unflatten(-1, (self.heads, -1))
        return apart.transpose(1, 2)

    def _normed(self, x: torch.Tensor, role: str) -> torch.Tensor:
        norm = self.child(role)
        return x if norm is None else norm(x)

    def _turned(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        for rotary in self._rotary:
            x = rotary(x, context)
        return x
