"""Four bits in groups along the input, and PyTorch's kernel for them on CPUs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
from torch.nn.functional import pad

from tpkit.quant import LinearSpec, int4pack
from tpkit_online.base import Online, OnlineOptions, usable

__all__ = ["OnlineInt4"]


class OnlineInt4(Online):
    """The quant method ``online_int4``: symmetric, the largest weight of a group in magnitude becomes -8.

    So all 16 codes are used, the scale may be negative, and there is no zero point; the same rule as Q4_0 of llama.cpp.
    Scales are kept in bfloat16 for a model in bfloat16 (codes are made with the rounded scale), else in float32.
    """

    class Options(OnlineOptions):
        """Adds the size of a group.

        Attributes:
            group_size: inputs that share a scale; the last group of a weight may be short.
        """

        group_size: Literal[32, 64, 128, 256] = 128

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self.kernels = (replace(int4pack.INT4PACK, in_multiple=self.options.group_size),)

    def label(self) -> str:
        return f"4 bit g{self.options.group_size}"

    def block(self, width: int) -> tuple[int, int]:
        return 1, self.options.group_size

    def scales(self, layer: LinearSpec) -> str:
        return "bfloat16" if layer.dtype == "bfloat16" else "float32"

    def quantize(self, blocks: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        high, low = blocks.amax((1, 3), keepdim=True), blocks.amin((1, 3), keepdim=True)
        scale = usable((torch.where(high >= -low, high, low) / -8).to(dtype))
        return (blocks / scale.float()).round_().clamp_(-8, 7), scale

    def keep(self, layer: Any, codes: torch.Tensor) -> None:
        if layer.kernel == "int4pack" and int4pack.pack(layer, codes + 8, layer.scale):
            layer.drop("scale")
            return
        own = (layer.trim("scale", codes) + 8).to(torch.uint8)
        own = pad(own, (0, own.shape[1] % 2))
        words = own.contiguous().view(torch.int16)
        layer.hold("codes", ((words | words >> 4) & 255).to(torch.uint8))

    def codes(self, layer: Any) -> torch.Tensor:
        byte = torch.arange(256, device=layer.codes.device)
        pairs = (torch.stack([byte % 16, byte // 16], 1) - 8).float().view(torch.int64)
        # one look-up of eight bytes gives both values
        codes = pairs.flatten().index_select(0, layer.codes.flatten().int()).view(torch.float32)
        return codes.view(layer.out_features, -1)[:, : layer.in_features]

    def dequantize(self, layer: Any) -> torch.Tensor:
        if hasattr(layer, "packed"):
            return int4pack.dequantize(layer, self.options.group_size)
        return super().dequantize(layer)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if hasattr(layer, "packed"):
            return int4pack.multiply(layer, x, bias, self.options.group_size)
        return super().apply(layer, x, bias)
