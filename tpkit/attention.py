"""Grouped-query attention as a module type. Declarations, as in `tpkit.modules`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from tpkit.modules import Child, Children, Declared, ModuleType, Options, Plain, Role, RopeOptions, Sides, hidden
from tpkit.partition import Axis, Features

if TYPE_CHECKING:
    from torch import nn

    from tpkit.layers.building import BuildContext

__all__ = ["AlibiOptions", "Attention", "AttentionOptions", "TemperatureOptions"]


class AlibiOptions(Options):
    """Linear biases (Press et al. 2022, arXiv:2108.12409): each score falls with the distance, by its head's slope.

    Attributes:
        slopes: of heads that are no power of two: those of the power below, and every other one of twice that
            ("below"); or those of the power above, every other one first ("above").
        max_bias: the smallest slope is ``2 ** -max_bias``.
        scaled: the bias is multiplied by the scale of the scores.
        dtype: positions are multiplied in this type; what it rounds belongs to the model.
    """

    slopes: Literal["below", "above"] = "below"
    max_bias: float = Field(default=8.0, gt=0)
    scaled: bool = False
    dtype: Annotated[Literal["float32", "bfloat16"], Plain()] = "float32"


class TemperatureOptions(Options):
    """Queries at position p are multiplied by ``1 + beta * log(1 + floor((p + offset) / length))``."""

    beta: float
    length: float = Field(gt=0)
    offset: int = Field(default=0, ge=0)


class AttentionOptions(Options):
    """Words of ``module: attention``.

    Attributes:
        window: a query sees this many keys, itself among them.
        chunk: a query sees the keys of its own run of this many positions.
        scale: of the scores; None: ``head_dim ** -0.5``.
        softcap: scores become ``softcap * tanh(score / softcap)``.
        max_positions: more of them are refused: the model treats them in a way that is not computed here.
        clip: queries, keys and values are kept within -clip to clip.
        clip_after: "norms": after norms over all heads, not before.
        output_gate: what a head gives is multiplied by the sigmoid of a gate beside its query.
    """

    heads: int = Field(default="num_attention_heads")  # type: ignore[assignment]
    kv_heads: int = Field(default="num_key_value_heads")  # type: ignore[assignment]
    head_dim: int = Field(default="head_dim")  # type: ignore[assignment]
    rope: RopeOptions | None = None
    alibi: AlibiOptions | None = None
    temperature: TemperatureOptions | None = None
    window: int | None = Field(default=None, gt=0)
    chunk: int | None = Field(default=None, gt=0)
    scale: float | None = None
    softcap: float | None = Field(default=None, gt=0)
    clip: float | None = Field(default=None, gt=0)
    clip_after: Annotated[Literal["norms"] | None, Plain()] = None
    max_positions: int | None = Field(default=None, gt=0)
    output_gate: Literal["sigmoid"] | None = None


class Attention(ModuleType):
    """Grouped-query attention. Query heads and their kv heads are one axis, so they are never told apart.

    The parts of qkv_proj are q, k and v; with an output gate q, gate, k and v. In style merged_column none is for v:
    values are what it gives as keys, before these are normalised and turned. `sinks` is a number for each head.
    """

    Options = AttentionOptions
    roles = (
        Role(name="qkv_proj", styles=("qkv", "merged_column")),
        Role(name="o_proj", styles=("row",)),
        Role(name="q_norm", required=False),
        Role(name="k_norm", required=False),
        Role(name="v_norm", required=False),
        Role(name="sinks", required=False),
    )

    @classmethod
    def declare(cls, options: AttentionOptions, hidden_size: int, children: Mapping[str, Child]) -> Declared:
        heads = Axis(name="heads", units=options.heads, groups=options.kv_heads)
        q, gate = (Features(name=name, axis=heads, unit=options.head_dim) for name in ("q", "gate"))
        k, v = (replace(q, name=name, grouped=True) for name in ("k", "v"))
        queries = (q,) if options.output_gate is None else (q, gate)
        same = "qkv_proj" in children and children["qkv_proj"].style == "merged_column"
        return Declared(
            sides={
                "qkv_proj": Sides(in_=hidden(hidden_size), out=(*queries, k) if same else (*queries, k, v)),
                "o_proj": Sides(in_=(replace(q, name=""),), out=hidden(hidden_size)),
                "q_norm": Sides(in_=(), out=(q,)),
                "k_norm": Sides(in_=(), out=(k,)),
                "v_norm": Sides(in_=(), out=(v,)),
                "sinks": Sides(in_=(), out=(Features(name="", axis=heads),)),
            },
            widths={"head": options.head_dim},
            whole={"all_heads"},
            counts={"head": options.heads, "kv_head": options.kv_heads},
        )

    @classmethod
    def build(cls, options: AttentionOptions, children: Children, context: BuildContext) -> nn.Module:
        from tpkit.layers.attention import Attention as Built

        return Built(options, children, context)
