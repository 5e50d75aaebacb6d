"""Weights decoded once while loading, and held dense: ``dequantize: true``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tpkit.dtypes import torch_dtype
from tpkit.params import LinearSpec, ParamSpec
from tpkit.quant.base import QuantMethod
from tpkit.quant.unquantized import Unquantized

if TYPE_CHECKING:
    import torch

__all__ = ["Dequantized"]


class Dequantized(QuantMethod):
    """Loads as another method does, and computes as none."""

    def __init__(self, inner: QuantMethod) -> None:
        super().__init__(inner.options)
        self.inner = inner
        self._dense = Unquantized()

    def label(self) -> str:
        return f"{self.inner.label()} dequantized".strip()

    def create_weights(self, layer: LinearSpec) -> dict[str, ParamSpec]:
        return self.inner.create_weights(layer)

    def process_weights_after_loading(self, layer: Any) -> None:
        self.inner.process_weights_after_loading(layer)
        weight = self.inner.dequantize(layer).to(torch_dtype(layer.sharded.dtype)).contiguous()
        layer.drop(*(name for name, _ in layer.named_parameters(recurse=False) if name != "bias"))
        layer.blobs.clear()
        layer.hold("weight", weight)

    def dequantize(self, layer: Any) -> torch.Tensor:
        return self._dense.dequantize(layer)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self._dense.apply(layer, x, bias)

    def embedding(self, layer: Any, ids: torch.Tensor) -> torch.Tensor:
        return self._dense.embedding(layer, ids)
