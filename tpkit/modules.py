"""Module types: what a description's ``module:`` words mean. Declarations only; torch is imported when one is built.

A module type says which children it needs (roles) and on which axis each of their sides lies. It says nothing of
ranks: partition, plan and loader follow from that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tpkit.partition import Axis, Features, Side, side_size

if TYPE_CHECKING:
    from torch import nn

    from tpkit.layers.building import BuildContext

__all__ = [
    "Axis",
    "Child",
    "Children",
    "Declared",
    "Features",
    "ModuleType",
    "Options",
    "Plain",
    "Role",
    "RopeOptions",
    "Side",
    "Sides",
    "hidden",
]


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
    It stands in the module's mapping itself, or in a container or a projection in that.

    Attributes:
        name: the role.
        styles: styles that may fill it; empty: it is a norm or a parameter.
        required: the module cannot be without it.
        module: it is a module; `styles` then are the words of those that may fill it, empty: any.
        several: it may stand for several alike ones (experts), by ``repeat`` or ``stacked``.
    """

    name: str
    styles: tuple[str, ...] = ()
    required: bool = True
    module: bool = False
    several: bool = False


@dataclass(frozen=True, kw_only=True)
class Child:
    """A projection that fills a role, as a module type sees it.

    Attributes:
        style: its style.
        copies: how many alike ones there are (experts); None: it is a single one.
    """

    style: str
    copies: int | None = None


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
        counts: what ``per:`` of a layout may name -> how often the order recurs.
    """

    sides: Mapping[str, Sides]
    widths: Mapping[str, int] = field(default_factory=dict)
    whole: frozenset[str] | set[str] = frozenset()
    counts: Mapping[str, int] = field(default_factory=dict)

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
    def declare(cls, options: Any, hidden_size: int, children: Mapping[str, Child]) -> Declared:
        """Returns the sides of its children for bound options. Pure.

        Args:
            options: a validated instance of `Options`.
            hidden_size: width of the hidden state that the module takes and gives.
            children: by role, the projections that are there.
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
    max_length: int | None = Field(default="max_position_embeddings", gt=0)  # type: ignore[assignment]

    @property
    def turning(self) -> str:
        """How a description says how much turns."""
        return f"partial {self.partial}" if self.dims is None else f"dims {self.dims}"

    @property
    def longest(self) -> int | None:
        """`max_length`; None where the name that it defaults to was bound to nothing."""
        length: object = self.max_length
        return length if isinstance(length, int) else None

    @model_validator(mode="after")
    def _agree(self) -> RopeOptions:
        from tpkit.spec.rope import with_lengths  # which imports this module

        if self.dims is not None and self.partial != 1:
            raise ValueError(f"rope says dims {self.dims} and partial {self.partial}; keep the one that is meant")
        if isinstance(self.scaling, dict):
            with_lengths(self.scaling, original_length=self.original_length, max_length=self.longest)
        return self
