"""Feed-forward blocks as module types: dense, and of experts. Declarations, as in `tpkit.modules`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from tpkit.errors import SpecError
from tpkit.modules import Child, Children, Declared, ModuleType, Options, Role, Sides, hidden
from tpkit.partition import Axis, Features

if TYPE_CHECKING:
    from torch import nn

    from tpkit.layers.building import BuildContext

__all__ = ["Activation", "ClampedSwiglu", "Mlp", "MlpOptions", "Moe", "MoeOptions", "RoutingOptions"]


#: names of config.json; `tpkit.layers.mlp` computes them
Activation = Literal[
    "child", "gelu", "gelu_fast", "gelu_new", "gelu_pytorch_tanh", "linear", "mish", "quick_gelu", "relu",
    "relu2", "relu6", "silu", "swish", "tanh",
]  # fmt: skip


class ClampedSwiglu(Options):
    """``(up + 1) * gate * sigmoid(alpha * gate)``, with gate up to `limit`, and up within -limit to limit."""

    kind: Literal["clamped_swiglu"]
    alpha: float
    limit: float = Field(gt=0)


class MlpOptions(Options):
    """Words of ``module: mlp``. ``activation: child`` is what the child in that role computes."""

    width: int = Field(default="intermediate_size")  # type: ignore[assignment]
    activation: Activation | ClampedSwiglu


class Mlp(ModuleType):
    """Feed-forward. Gated (``act(gate) * up``) with a merged_column projection, plain with a column one."""

    Options = MlpOptions
    roles = (
        Role(name="up_proj", styles=("merged_column", "column")),
        Role(name="down_proj", styles=("row",)),
        Role(name="activation", required=False, module=True),
    )

    @classmethod
    def declare(cls, options: MlpOptions, hidden_size: int, children: Mapping[str, Child]) -> Declared:
        return Declared(sides=_sides(Axis(name="ffn", units=options.width), hidden_size, children["up_proj"].style))

    @classmethod
    def build(cls, options: MlpOptions, children: Children, context: BuildContext) -> nn.Module:
        from tpkit.layers.mlp import Mlp as Built

        return Built(options, children, context)


def _sides(axis: Axis, hidden_size: int, style: str) -> dict[str, Sides]:
    """Returns the sides of both projections around a width."""
    gate, up, whole = (Features(name=name, axis=axis) for name in ("gate", "up", ""))
    return {
        "up_proj": Sides(in_=hidden(hidden_size), out=(whole,) if style == "column" else (gate, up)),
        "down_proj": Sides(in_=(whole,), out=hidden(hidden_size)),
    }


class RoutingOptions(Options):
    """How a router chooses experts, and weighs what they give.

    Attributes:
        score: what the router's logits become before anything is chosen; "none": they stay.
        top_k: experts for each token.
        weights: the chosen experts weigh their scores, or the softmax or sigmoid of these.
        renormalize: weights are divided by their sum.
        scale: multiplies the weights.
        groups: experts come in this many groups of equal size; a token's are chosen in its best ones alone.
        top_groups: how many of them.
        group_score: what ranks a group: its best score, or the sum of its best two.
        apply_to: the weight multiplies what the expert gives, or what it takes.
    """

    score: Literal["softmax", "sigmoid", "none"]
    top_k: int = Field(gt=0)
    weights: Literal["score", "softmax", "sigmoid"] = "score"
    renormalize: bool = False
    scale: float = 1.0
    groups: int | None = Field(default=None, gt=0)
    top_groups: int | None = Field(default=None, gt=0)
    group_score: Literal["max", "top2_sum"] = "top2_sum"
    apply_to: Literal["output", "input"] = "output"

    @model_validator(mode="after")
    def _check(self) -> RoutingOptions:
        if (self.groups is None) != (self.top_groups is None):
            raise ValueError(f"groups {self.groups} and top_groups {self.top_groups}: give both, or neither")
        if self.groups is not None and self.top_groups is not None and self.top_groups > self.groups:
            raise ValueError(f"top_groups {self.top_groups} of {self.groups} groups")
        return self

    def check(self, experts: int) -> None:
        """Checks that so many experts can be chosen of.

        Raises:
            SpecError: if not.
        """
        if self.groups is not None and experts % self.groups:
            raise SpecError(f"routing: {experts} experts do not come in {self.groups} groups of equal size")
        within = experts if self.groups is None else experts // self.groups * (self.top_groups or 0)
        if self.top_k > within:
            raise SpecError(f"routing: top_k {self.top_k}, but a token chooses among {within} of {experts} experts")


class MoeOptions(Options):
    """Words of ``module: moe``. How many experts there are is said where they are: ``repeat`` or ``stacked``."""

    width: int = Field(default="intermediate_size")  # type: ignore[assignment]
    activation: Activation | ClampedSwiglu
    routing: RoutingOptions


class Moe(ModuleType):
    """Routed experts, each a feed-forward, and shared ones beside them.

    Experts lie on an axis that expert-parallel groups of ranks share, their width on one that the ranks of a group do.
    """

    Options = MoeOptions
    roles = (
        Role(name="router", styles=("replicated",)),
        Role(name="correction_bias", required=False),
        Role(name="up_proj", styles=("merged_column", "column"), several=True),
        Role(name="down_proj", styles=("row",), several=True),
        Role(name="shared", styles=("mlp",), required=False, module=True),
        Role(name="shared_gate", styles=("replicated",), required=False),
    )

    @classmethod
    def declare(cls, options: MoeOptions, hidden_size: int, children: Mapping[str, Child]) -> Declared:
        up, down = children["up_proj"], children["down_proj"]
        experts = up.copies
        if experts is None or down.copies != experts:
            told = " and ".join(
                f"{'one' if n is None else n} {way}" for n, way in ((up.copies, "up"), (down.copies, "down"))
            )
            raise SpecError(
                f"experts: {told}; both projections are of every expert",
                hint="say how many there are, on the container around both (repeat or stacked) or on each (stacked)",
            )
        options.routing.check(experts)
        axis = Axis(name="expert ffn", units=options.width, over="group")
        return Declared(
            sides={
                **_sides(axis, hidden_size, up.style),
                "router": Sides(in_=hidden(hidden_size), out=hidden(experts)),
                "correction_bias": Sides(in_=(), out=hidden(experts)),
                "shared_gate": Sides(in_=hidden(hidden_size), out=hidden(1)),
            }
        )

    @classmethod
    def build(cls, options: MoeOptions, children: Children, context: BuildContext) -> nn.Module:
        from tpkit.layers.moe import Moe as Built

        return Built(options, children, context)
