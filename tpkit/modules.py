"""Module types: what a description's ``module:`` words mean. Declarations only; torch is imported when one is built.

A module type says which children it needs (roles) and on which axis each of their sides lies. It says nothing of
ranks: partition, plan and loader follow from that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tpkit.partition import Axis, Features, Side, side_size

if TYPE_CHECKING:
    from torch import nn

    from tpkit.making import BuildContext

__all__ = ["Attention", "Declared", "Mlp", "ModuleType", "Options", "Plain", "Role", "Sides"]


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
        module: it is a module.
    """

    name: str
    styles: tuple[str, ...] = ()
    required: bool = True
    module: bool = False


@dataclass(frozen=True, kw_only=True)
class Sides:
    """Input and output of a projection in a role."""

    in_: Side
    out: Side


@dataclass(frozen=True, kw_only=True)
class Declared:
    """What a module type says of its children for given options.

    Attributes:
        sides: by role; "" is the module itself. A norm or parameter has an `out` side alone: what it lies on.
        widths: what ``over:`` of a norm may name -> how many features that is.
        whole: what ``over:`` may name for all of the side that the norm lies on, over all ranks.
    """

    sides: Mapping[str, Sides]
    widths: Mapping[str, int] = field(default_factory=dict)
    whole: frozenset[str] | set[str] = frozenset()

    def width(self, role: str, over: str) -> int | None:
        """Returns how many features a norm in a role normalises together; None if `over` means nothing there."""
        if over in self.whole and role in self.sides:
            return side_size(self.sides[role].out)
        return self.widths.get(over)

    @property
    def over(self) -> list[str]:
        """What ``over:`` may name."""
        return sorted({*self.widths, *self.whole})


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
    """Rotary embedding.

    Attributes:
        pairs: which two features turn together: i and i + half of them, or 2i and 2i + 1.
        scaling: as in config.json; `tpkit.spec.rope` says which kinds there are.
        partial: share of a head's features that turn, the first ones; rounded down.
        dims: how many features turn, instead of `partial`; None: `partial` says it.
        original_length: tokens that the model was trained on before it was extended, for a scaling that needs them and
            does not give them itself.
        max_length: tokens that it takes; a scaling that has no factor is from `original_length` to these, and one that
            follows the length ("dynamic") starts to change beyond these.
    """

    pairs: Literal["half", "interleaved"]
    theta: float = Field(default="rope_theta", gt=0)  # type: ignore[assignment]
    scaling: dict[str, Any] | None = Field(default="rope_scaling")  # type: ignore[assignment]
    partial: float = Field(default=1.0, gt=0, le=1)
    dims: int | None = Field(default=None, gt=0)
    original_length: int | None = Field(default=None, gt=0)
    max_length: int | None = Field(default=None, gt=0)

    @property
    def turning(self) -> str:
        """How a description says how much turns."""
        return f"partial {self.partial}" if self.dims is None else f"dims {self.dims}"

    @model_validator(mode="after")
    def _agree(self) -> RopeOptions:
        from tpkit.spec.rope import with_lengths  # which imports this module

        if self.dims is not None and self.partial != 1:
            raise ValueError(f"rope says dims {self.dims} and partial {self.partial}; keep the one that is meant")
        if isinstance(self.scaling, dict):
            with_lengths(self.scaling, original_length=self.original_length, max_length=self.max_length)
        return self


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
    max_positions: int | None = Field(default=None, gt=0)


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
                "q_norm": Sides(in_=(), out=(q,)),
                "k_norm": Sides(in_=(), out=(k,)),
            },
            widths={"head": options.head_dim},
            whole={"all_heads"},
        )

    @classmethod
    def build(
        cls, options: AttentionOptions, children: Mapping[str, tuple[str, nn.Module]], context: BuildContext
    ) -> nn.Module:
        from tpkit.layers.attention import Attention as Built

        return Built(options, children, context)


#: names of config.json; `tpkit.layers.mlp` computes them
Activation = Literal[
    "child", "gelu", "gelu_fast", "gelu_new", "gelu_pytorch_tanh", "linear", "mish", "quick_gelu", "relu",
    "relu2", "relu6", "silu", "swish", "tanh",
]  # fmt: skip


class MlpOptions(Options):
    """Words of ``module: mlp``. ``activation: child`` is what the child in that role computes."""

    width: int = Field(default="intermediate_size")  # type: ignore[assignment]
    activation: Activation


class Mlp(ModuleType):
    """Feed-forward. Gated (``act(gate) * up``) with a merged_column projection, plain with a column one."""

    Options = MlpOptions
    roles = (
        Role(name="up_proj", styles=("merged_column", "column")),
        Role(name="down_proj", styles=("row",)),
        Role(name="activation", required=False, module=True),
    )

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
