"""An activation with learned numbers, as a module type: its parameters are children, so its file says their names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tpkit.modules import Child, Children, Declared, ModuleType, Role

if TYPE_CHECKING:
    from torch import nn

    from tpkit.layers.building import BuildContext

__all__ = ["Xielu"]


class Xielu(ModuleType):
    """xIELU (Huang and Schlag 2025, arXiv:2411.13010): quadratic above zero, exponential below, both slopes learned."""

    roles = tuple(Role(name=name) for name in ("alpha_p", "alpha_n", "beta", "eps"))

    @classmethod
    def declare(cls, options: Any, hidden_size: int, children: Mapping[str, Child]) -> Declared:
        return Declared(sides={})

    @classmethod
    def build(cls, options: Any, children: Children, context: BuildContext) -> nn.Module:
        from tpkit.layers.xielu import Xielu as Built

        return Built(children)
