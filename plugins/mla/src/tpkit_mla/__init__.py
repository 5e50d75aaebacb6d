"""Multi-head latent attention (arXiv:2405.04434) as a module type. Declarations; torch is imported to build one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from pydantic import Field

from tpkit import SpecError
from tpkit.modules import (
    Axis,
    Child,
    Children,
    Declared,
    Features,
    ModuleType,
    Options,
    Role,
    RopeOptions,
    Sides,
    hidden,
)

if TYPE_CHECKING:
    from torch import nn

    from tpkit.layers import BuildContext

__all__ = ["Mla", "MlaOptions"]


class MlaOptions(Options):
    """Words of ``module: mla``.

    Attributes:
        heads: query heads; each has a key and a value of its own, made of the latent that all share.
        q_lora_rank: features of the queries' latent; None: queries are made of the hidden state (q_proj).
        kv_lora_rank: features of the latent of keys and values.
        qk_nope_head_dim, qk_rope_head_dim: features of a query and key that are not turned, and that are.
        v_head_dim: features of a value.
        rope: of the latter; None: nothing is turned.
        scale: of the scores, as it stands; None: see `score_scale`.
    """

    heads: int = Field(default="num_attention_heads", gt=0)  # type: ignore[assignment]
    q_lora_rank: int | None = Field(default="q_lora_rank", gt=0)  # type: ignore[assignment]
    kv_lora_rank: int = Field(default="kv_lora_rank", gt=0)  # type: ignore[assignment]
    qk_nope_head_dim: int = Field(default="qk_nope_head_dim", gt=0)  # type: ignore[assignment]
    qk_rope_head_dim: int = Field(default="qk_rope_head_dim", gt=0)  # type: ignore[assignment]
    v_head_dim: int = Field(default="v_head_dim", gt=0)  # type: ignore[assignment]
    rope: RopeOptions | None = None
    scale: float | None = Field(default=None, gt=0)

    @property
    def score_scale(self) -> float:
        """What scores are multiplied with.

        Without a word of its own ``(nope + rope) ** -0.5``; a yarn scaling that says mscale_all_dim multiplies queries
        and keys, turned features or not, by ``0.1 * mscale_all_dim * ln(factor) + 1`` (arXiv:2309.00071, equation 22),
        and so the scores by its square.
        """
        if self.scale is not None:
            return self.scale
        scale = float((self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5)
        scaling = self.rope.scaling if self.rope is not None else None
        if self.rope is None or not scaling or scaling["rope_type"] != "yarn" or not scaling.get("mscale_all_dim"):
            return scale
        factor = scaling.get("factor")
        if factor is None:  # then the rope has both lengths, or it would not have been bound
            original = scaling.get("original_max_position_embeddings") or self.rope.original_length
            factor = (self.rope.longest or 1) / (original or 1)
        return scale * float(1 + 0.1 * scaling["mscale_all_dim"] * math.log(max(factor, 1))) ** 2


#: what makes the queries: of the hidden state, or of their own latent
_DIRECT, _LATENT = ("q_proj",), ("q_a_proj", "q_b_proj")


class Mla(ModuleType):
    """Multi-head latent attention. Heads are the one axis; the latents and the turned key are every rank's own."""

    Options = MlaOptions
    roles = (
        Role(name="q_proj", styles=("merged_column",), required=False),
        Role(name="q_a_proj", styles=("replicated",), required=False),
        Role(name="q_a_layernorm", required=False),
        Role(name="q_b_proj", styles=("merged_column",), required=False),
        Role(name="kv_a_proj_with_mqa", styles=("replicated",)),
        Role(name="kv_a_layernorm"),
        Role(name="kv_b_proj", styles=("merged_column",)),
        Role(name="o_proj", styles=("row",)),
    )

    @classmethod
    def declare(cls, options: MlaOptions, hidden_size: int, children: Mapping[str, Child]) -> Declared:
        needed = _DIRECT if options.q_lora_rank is None else _LATENT
        if missing := [role for role in needed if role not in children]:
            raise SpecError(f"mla: with q_lora_rank {options.q_lora_rank} it needs {' and '.join(missing)}")
        heads = Axis(name="heads", units=options.heads)
        q = (
            Features(name="q_nope", axis=heads, unit=options.qk_nope_head_dim),
            Features(name="q_rope", axis=heads, unit=options.qk_rope_head_dim),
        )
        kv = (
            Features(name="k_nope", axis=heads, unit=options.qk_nope_head_dim),
            Features(name="v", axis=heads, unit=options.v_head_dim),
        )
        rank, latent = options.q_lora_rank, options.kv_lora_rank
        sides = {
            "kv_a_proj_with_mqa": Sides(in_=hidden(hidden_size), out=hidden(latent + options.qk_rope_head_dim)),
            "kv_a_layernorm": Sides(in_=(), out=hidden(latent)),
            "kv_b_proj": Sides(in_=hidden(latent), out=kv),
            "o_proj": Sides(in_=(Features(name="", axis=heads, unit=options.v_head_dim),), out=hidden(hidden_size)),
        }
        widths = {"kv_lora": latent}
        # what has no side here is refused by the core where a description has it nevertheless
        if rank is None:
            sides["q_proj"] = Sides(in_=hidden(hidden_size), out=q)
        else:
            widths["q_lora"] = rank
            sides["q_a_proj"] = Sides(in_=hidden(hidden_size), out=hidden(rank))
            sides["q_a_layernorm"] = Sides(in_=(), out=hidden(rank))
            sides["q_b_proj"] = Sides(in_=hidden(rank), out=q)
        return Declared(sides=sides, widths=widths, counts={"head": options.heads})

    @classmethod
    def build(cls, options: MlaOptions, children: Children, context: BuildContext) -> nn.Module:
        from tpkit_mla.layer import LatentAttention

        return LatentAttention(options, children, context)
