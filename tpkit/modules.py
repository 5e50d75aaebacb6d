"""Module types: what a description's ``module:`` words mean. Declarations only; torch is imported when one is built.

A module type says which children it needs (roles) and on which axis each of their sides lies. It says nothing of
ranks: partition, plan and loader follow from that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from tpkit.partition import Axis, Features, Side

if TYPE_CHECKING:
    from torch import nn

    from tpkit.making import BuildContext

__all__ = ["Attention", "Declared", "Embedding", "Mlp", "ModuleType", "Options", "Plain", "Role", "Sides"]


#: built children: role -> (name, module)
Children: TypeAlias = "Mapping[str, tuple[str, nn.Module]]"


class Plain:
    """Marks a word whose value is data as it stands, never a name or an expression."""


class Options(BaseModel):
    """Base of a kind's options. Defaults are what a description would write: a string is an expression or a word."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, validate_default=False, allow_inf_nan=False)


@dataclass(frozen=True, kw_only=True)
class Role:
    """A child that a module type needs or takes.

    A child has the role of its ``role:``, else of its name, else of its style where only one role takes that style.

    Attributes:
        name: the role.
        styles: styles that may fill it; empty: it is a norm or a parameter.
        required: the module cannot be without it.
    """

    name: str
    styles: tuple[str, ...] = ()
    required: bool = True


@dataclass(frozen=True, kw_only=True)
class Sides:
    """Input and output of a projection in a role."""

    in_: Side
    out: Side


@dataclass(frozen=True, kw_only=True)
class Declared:
    """What a module type says of its children for given options.

    Attributes:
        sides: by role; "" is the module itself.
        widths: what ``over:`` of a norm may name.
    """

    sides: Mapping[str, Sides]
    widths: Mapping[str, int] = field(default_factory=dict)


class ModuleType:
    """Base of a module plugin (entry-point group ``tpkit.modules``)."""

    api: ClassVar[int] = 1
    #: its words in a description
    Options: ClassVar[type[BaseModel]] = Options
    #: children it needs or takes
    roles: ClassVar[tuple[Role, ...]] = ()

    @classmethod
    def declare(cls, options: Any, hidden_size: int, styles: Mapping[str, str]) -> Declared:
        """Returns the sides of its children for bound options. Pure.

        Args:
            options: a validated instance of `Options`.
            hidden_size: width of the hidden state that the module takes and gives.
            styles: the style by role of the children that are there.
        """
        raise NotImplementedError

    @classmethod
    def build(cls, options: Any, children: Children, context: BuildContext) -> nn.Module:
        """Returns the module on this rank.

        Args:
            options: a validated instance of `Options`.
            children: its built children: role -> (name, module).
            context: hands out what layers share, such as cache slots and rotary embeddings.
        """
        raise NotImplementedError


def hidden(size: int) -> Side:
    """Returns the side of an undivided hidden state."""
    return (Features(name="", unit=size),)


class RopeOptions(Options):
    """Rotary embedding. `pairs`: which two features turn together; `scaling` as in config.json."""

    pairs: Literal["half", "interleaved"]
    theta: float = Field(default="rope_theta", gt=0)  # type: ignore[assignment]
    scaling: dict[str, Any] | None = Field(default="rope_scaling")  # type: ignore[assignment]
    partial: float = 1.0


class AttentionOptions(Options):
    """Words of ``module: attention``."""

    heads: int = Field(default="num_attention_heads")  # type: ignore[assignment]
    kv_heads: int = Field(default="num_key_value_heads")  # type: ignore[assignment]
    head_dim: int = Field(default="head_dim")  # type: ignore[assignment]
    rope: RopeOptions | None = None
    window: int | None = None
    scale: float | None = None


class Attention(ModuleType):
    """Grouped-query attention. Query heads and their kv heads are one axis, so they are never told apart."""

    Options = AttentionOptions
    roles = (
        Role(name="qkv_proj", styles=("qkv",)),
        Role(name="o_proj", styles=("row",)),
        Role(name="q_norm", required=False),
        Role(name="k_norm", required=False),
    )

    @classmethod
    def declare(cls, options: AttentionOptions, hidden_size: int, styles: Mapping[str, str]) -> Declared:
        heads = Axis(name="heads", units=options.heads, groups=options.kv_heads)
        q = Features(name="q", axis=heads, unit=options.head_dim)
        k = Features(name="k", axis=heads, unit=options.head_dim, grouped=True)
        v = Features(name="v", axis=heads, unit=options.head_dim, grouped=True)
        return Declared(
            sides={
                "qkv_proj": Sides(in_=hidden(hidden_size), out=(q, k, v)),
                "o_proj": Sides(in_=(Features(name="", axis=heads, unit=options.head_dim),), out=hidden(hidden_size)),
            },
            widths={"head": options.head_dim},
        )

    @classmethod
    def build(
        cls, options: AttentionOptions, children: Mapping[str, tuple[str, nn.Module]], context: BuildContext
    ) -> nn.Module:
        from tpkit.layers.attention import Attention as Built

        return Built(options, children, context)


#: names of config.json; `tpkit.layers.mlp` computes them
Activation = Literal["gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu", "swish"]


class MlpOptions(Options):
    """Words of ``module: mlp``."""

    width: int = Field(default="intermediate_size")  # type: ignore[assignment]
    activation: Activation


class Mlp(ModuleType):
    """Feed-forward. Gated (``act(gate) * up``) with a merged_column projection, plain with a column one."""

    Options = MlpOptions
    roles = (Role(name="up_proj", styles=("merged_column", "column")), Role(name="down_proj", styles=("row",)))

    @classmethod
    def declare(cls, options: MlpOptions, hidden_size: int, styles: Mapping[str, str]) -> Declared:
        ffn = Axis(name="ffn", units=options.width)
        gate, up, whole = (Features(name=name, axis=ffn) for name in ("gate", "up", ""))
        return Declared(
            sides={
                "up_proj": Sides(
                    in_=hidden(hidden_size), out=(whole,) if styles["up_proj"] == "column" else (gate, up)
                ),
                "down_proj": Sides(in_=(whole,), out=hidden(hidden_size)),
            }
        )

    @classmethod
    def build(
        cls, options: MlpOptions, children: Mapping[str, tuple[str, nn.Module]], context: BuildContext
    ) -> nn.Module:
        from tpkit.layers.mlp import Mlp as Built

        return Built(options, children, context)


class EmbeddingOptions(Options):
    """Words of ``module: embedding``."""

    style: Literal["vocab", "replicated"] = "vocab"
    rows: int = Field(default="vocab_size")  # type: ignore[assignment]
    width: int = Field(default="hidden_size")  # type: ignore[assignment]
    scale: float | None = None
    quant: Annotated[str | dict[str, Any] | None, Plain()] = None


class Embedding(ModuleType):
    """Token embedding; it holds its own weight ``[rows, width]``."""

    Options = EmbeddingOptions

    @classmethod
    def declare(cls, options: EmbeddingOptions, hidden_size: int, styles: Mapping[str, str]) -> Declared:
        axis = Axis(name="vocab", units=options.rows, divided=options.style == "vocab")
        return Declared(sides={"": Sides(in_=hidden(options.width), out=(Features(name="", axis=axis),))})

    @classmethod
    def build(
        cls, options: EmbeddingOptions, children: Mapping[str, tuple[str, nn.Module]], context: BuildContext
    ) -> nn.Module:
        from tpkit.layers.embedding import VocabParallelEmbedding

        return VocabParallelEmbedding.of(context.own_shard(), context.tp, scale=options.scale)
