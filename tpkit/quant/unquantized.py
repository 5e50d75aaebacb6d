"""Weights as they are: one dense ``[out, in]`` tensor in the model's dtype."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tpkit.params import In, LinearSpec, Out, ParamSpec
from tpkit.quant.base import QuantMethod

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["Unquantized"]


class Unquantized(QuantMethod):
    """The quant method ``none``."""

    def create_weights(self, layer: LinearSpec) -> dict[str, ParamSpec]:
        return {"weight": ParamSpec(layer.dtype, dims=(Out(), In()), transposed=layer.transposed)}

    def dequantize(self, layer: nn.Module) -> torch.Tensor:
        return layer.get_parameter("weight")

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        from torch.nn.functional import linear

        return linear(x, layer.get_parameter("weight"), bias)

    def embedding(self, layer: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        from torch.nn.functional import embedding

        return embedding(ids, layer.get_parameter("weight"))
