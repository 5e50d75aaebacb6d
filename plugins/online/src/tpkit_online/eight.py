"""Eight bits: int8 by output channel, and float8 e4m3 in blocks."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from pydantic import Field

from tpkit.quant import int8pack
from tpkit_online.base import Online, OnlineOptions, usable

__all__ = ["OnlineFp8", "OnlineInt8"]

#: a last, short block is padded to a whole one while it is quantised: a limit to what that may take
Size = Annotated[int, Field(ge=1, le=4096)]

#: largest finite value of float8_e4m3fn
E4M3_MAX = 448.0


class OnlineInt8(Online):
    """The quant method ``online_int8``: symmetric, one float32 scale for each output channel."""

    kernels = (int8pack.INT8PACK,)

    def label(self) -> str:
        return "8 bit per channel"

    def block(self, width: int) -> tuple[int, int]:
        return 1, width

    def quantize(self, blocks: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        scale = usable(blocks.abs().amax((1, 3), keepdim=True) / 127)
        return (blocks / scale).round_().clamp_(-127, 127), scale

    def keep(self, layer: Any, codes: torch.Tensor) -> None:
        layer.hold("codes", layer.trim("scale", codes).to(torch.int8))

    def dequantize(self, layer: Any) -> torch.Tensor:
        weight: torch.Tensor = layer.codes * layer.scale
        return weight

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        y = int8pack.multiply(x, layer.codes, layer.scale[:, 0], bias) if layer.kernel else None
        return super().apply(layer, x, bias) if y is None else y


class OnlineFp8(Online):
    """The quant method ``online_fp8``: float8 e4m3 and one float32 scale for each block of outputs by inputs."""

    class Options(OnlineOptions):
        """Adds the size of a block.

        Attributes:
            block: outputs and inputs that share a scale.
        """

        block: list[Annotated[int, Field(ge=1, le=4096)]] = Field(
            default_factory=lambda: [128, 128], min_length=2, max_length=2
        )

    def label(self) -> str:
        return "e4m3 {}x{}".format(*self.options.block)

    def block(self, width: int) -> tuple[int, int]:
        out, in_ = self.options.block
        return out, in_

    def quantize(self, blocks: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        scale = usable(blocks.abs().amax((1, 3), keepdim=True) / E4M3_MAX)
        return (blocks / scale).clamp_(-E4M3_MAX, E4M3_MAX), scale  # a cast beyond the end may give NaN

    def keep(self, layer: Any, codes: torch.Tensor) -> None:
        layer.hold("codes", layer.trim("scale", codes).to(torch.float8_e4m3fn))

    def codes(self, layer: Any) -> torch.Tensor:
        # a look-up is three times as fast as the conversion
        values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().to(layer.codes.device)
        found = values.index_select(0, layer.codes.detach().view(torch.uint8).flatten().int())
        return found.view(layer.codes.shape)
