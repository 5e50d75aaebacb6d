"""Feed-forward blocks as module types: dense, and of experts. Declarations, as in `tpkit.modules`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from tpkit.modules import Child, Children, Declared, ModuleType, Options, Role, Sides, hidden
from tpkit.partition import Axis, Features

if TYPE_CHECKING:
    from torch import nn

    from tpkit.making import BuildContext

__all__ = ["Activation", "Mlp", "MlpOptions"]


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
    def declare(cls, options: MlpOptions, hidden_size: int, children: Mapping[str, Child]) -> Declared:
        ffn = Axis(name="ffn", units=options.width)
        gate, up, whole = (Features(name=name, axis=ffn) for name in ("gate", "up", ""))
        return Declared(
            sides={
                "up_proj": Sides(
                    in_=hidden(hidden_size), out=(whole,) if children["up_proj"].style == "column" else (gate, up)
                ),
                "down_proj": Sides(in_=(whole,), out=hidden(hidden_size)),
            }
        )

    @classmethod
    def build(cls, options: MlpOptions, children: Children, context: BuildContext) -> nn.Module:
        from tpkit.layers.mlp import Mlp as Built

        return Built(options, children, context)
