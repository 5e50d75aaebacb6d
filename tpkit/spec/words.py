"""The words of every kind of node, as types of their resolved values. Adding a word is adding a field.

How a value may be written (a literal, a declared name, an expression, cases) follows from its type; see
`tpkit.spec.slots`. A default that is text stands for what a description would write: ``"rms_norm_eps"`` is the
declared field of that name.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from tpkit.modules import Options, Plain

__all__ = [
    "CANONICAL_NUMBERS",
    "CANONICAL_SIZES",
    "COMMON",
    "KINDS",
    "NORMS",
    "LayerNormOptions",
    "Layout",
    "NormOptions",
    "Pack",
    "ParameterOptions",
    "ProjectionOptions",
    "Tied",
]

#: names that built-in modules read unless a node says otherwise
CANONICAL_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
CANONICAL_NUMBERS = ("rms_norm_eps", "layer_norm_eps")

#: words of every node
COMMON = ("when", "role", "inline", "repeat")
#: the word that makes a node what it is -> kind; the first that is there decides
KINDS = {"module": "module", "parameter": "parameter", "style": "projection", "norm": "norm"}

_COMPONENT = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


Word = Annotated[str, Plain()]
Words = Annotated[tuple[str, ...], BeforeValidator(_tuple)]


class Layout(Options):
    """The order of segments in one stored tensor: blocks after each other, or repeated `per` unit of an axis."""

    per: str | None = None
    order: Words = Field(min_length=1)

    @model_validator(mode="after")
    def _check(self) -> Layout:
        if len(set(self.order)) < len(self.order):
            raise ValueError(f"a name occurs twice in {', '.join(self.order)}")
        return self


class Pack(Options):
    """One tensor on disk that goes into a packed projection.

    Attributes:
        name: its name, beside the projection's own.
        layout: the segments in it; None: the one segment at this position.
    """

    name: str
    layout: Layout | None = None


class Tied(Options):
    """The weight is that of another module, by its path in the tree."""

    to: Word


def _packs(value: Any) -> Any:
    if isinstance(value, tuple):
        return value
    if isinstance(value, list):
        value = dict.fromkeys(_names(value))
    if not isinstance(value, dict):
        raise ValueError("packs is a list of names, or a mapping from name to layout")
    _names(list(value))
    return tuple({"name": name, "layout": _layout(layout)} for name, layout in value.items())


def _names(names: list[Any]) -> list[str]:
    for name in names:
        if not isinstance(name, str) or not _COMPONENT.fullmatch(name):
            raise ValueError(f"{name!r} is no name of a tensor")
        if names.count(name) > 1:
            raise ValueError(f"{name!r} is packed twice")
    return names


def _layout(value: Any) -> Any:
    return {"order": value} if isinstance(value, list) else value


class ProjectionOptions(Options):
    """Words of a projection: ``style:`` and how it is stored. `quant` wins over what is said of the whole model.

    `in_features` and `out_features` are for one that no module has a role for.

    Attributes:
        bare: its tensors are called as it is, ``name`` and ``name_bias``, not ``name.weight`` and ``name.bias``.
        compute: it multiplies in this type, whatever the model's dtype is.
    """

    style: Word
    in_features: int | None = Field(default=None, gt=0)
    out_features: int | None = Field(default=None, gt=0)
    packs: Annotated[tuple[Pack, ...], BeforeValidator(_packs), Plain()] = ()
    fused: Annotated[Layout | None, BeforeValidator(_layout), Plain()] = None
    bias: bool = False
    transposed: bool = False
    bare: bool = False
    compute: Annotated[Literal["float32"] | None, Plain()] = None
    tied: Tied | None = None
    disable_tp: bool = False
    scale: float | None = None
    softcap: float | None = Field(default=None, gt=0)
    quant: Annotated[str | dict[str, Any] | None, Plain()] = None


class NormOptions(Options):
    """Words of a norm. `size` is filled in when the description is bound.

    Attributes:
        norm: rms, or layer (which takes the mean away first).
        over: what is normalised together, as the module around it calls it; absent: the hidden state.
        eps: added to the mean square.
        zero_centered: the stored weight is the distance from one.
        affine: it has a weight at all.
        weight: "per_head": each head has a weight of its own.
        after: "rope": heads are normalised after they are turned, not before.
        size: features that are normalised together.
    """

    norm: Word
    over: Annotated[str | None, Plain()] = None
    eps: float = Field(default="rms_norm_eps", gt=0)  # type: ignore[assignment]
    zero_centered: bool = False
    affine: bool = True
    weight: Annotated[Literal["per_head"] | None, Plain()] = None
    after: Annotated[Literal["rope"] | None, Plain()] = None
    size: int | None = None

    @model_validator(mode="after")
    def _check(self) -> NormOptions:
        if self.weight is not None and self.over != "head":
            raise ValueError(f"weight: {self.weight} is of a norm over: head")
        if self.after is not None and self.over != "head":
            raise ValueError(f"after: {self.after} is of a norm over: head; what is turned are heads")
        if not self.affine and (self.zero_centered or self.weight is not None):
            raise ValueError("a norm without a weight (affine: false) has neither zero_centered nor weight")
        return self


class LayerNormOptions(NormOptions):
    """Words of ``norm: layer``; `bias` counts only where there is a weight."""

    eps: float = Field(default="layer_norm_eps", gt=0)  # type: ignore[assignment]
    bias: bool = True


class ParameterOptions(Options):
    """Words of a parameter of its own: its sizes (none: one number), and ``per_head`` if it follows its heads.

    Attributes:
        dtype: it is held in this type, whatever the model's dtype is.
    """

    parameter: tuple[int, ...]
    style: Annotated[Literal["replicated", "per_head"], Plain()] = "replicated"
    dtype: Annotated[Literal["float32"] | None, Plain()] = None


#: words after ``norm:`` and the options each takes
NORMS: dict[str, type[NormOptions]] = {"rms": NormOptions, "layer": LayerNormOptions}
