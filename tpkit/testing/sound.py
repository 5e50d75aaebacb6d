"""Two sound quant methods with their references: what the kit must accept, and what broken ones are made of."""

from __future__ import annotations

from typing import Any

import torch

from tpkit.quant import In, LinearSpec, Out, ParamSpec, QuantMethod, Segment
from tpkit.quant.codes import unpack
from tpkit.testing.conformance import QuantConformance

__all__ = ["GROUP", "PerTensor", "PerTensorTest", "Words", "WordsTest"]

#: inputs that share a scale
GROUP = 6


class Words(QuantMethod):
    """Four 8-bit codes in a word along the input, and a scale for six inputs."""

    def create_weights(self, layer: LinearSpec) -> dict[str, ParamSpec]:
        scales = ParamSpec(layer.dtype_of("scales", "float16"), dims=(Out(), In(block=GROUP)))
        return {"qweight": ParamSpec("int32", dims=(Out(), In(pack=4))), "scales": scales}

    def dequantize(self, layer: Any) -> torch.Tensor:
        codes = layer.trim("qweight", unpack(layer.qweight, 8)).float() - 128
        weight: torch.Tensor = codes * layer.expand("scales").float()
        return weight


class WordsTest(QuantConformance):
    """The reference of `Words`."""

    method = Words()

    def encode(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        rows, width = weight.shape
        padded = torch.nn.functional.pad(weight, (0, -width % GROUP)).view(rows, -1, GROUP)
        scales = (padded.abs().amax(2) / 127).half()
        codes = (padded / scales.unsqueeze(2)).clamp(-128, 127).round().flatten(1)[:, :width] + 128
        words = torch.nn.functional.pad(codes.to(torch.uint8), (0, -width % 4)).contiguous().view(torch.int32)
        return {"qweight": words, "scales": scales}

    def decode(self, stored: dict[str, torch.Tensor], out: int, in_: int) -> torch.Tensor:
        codes = stored["qweight"].view(torch.uint8)[:, :in_].float() - 128
        return codes * stored["scales"][:, torch.arange(in_) // GROUP].float()


class PerTensor(QuantMethod):
    """Integers and one scale: a packed layer has one for each of its parts."""

    def create_weights(self, layer: LinearSpec) -> dict[str, ParamSpec]:
        scale = ParamSpec(layer.dtype_of("scale", "float32"), dims=(Segment(),))
        return {"weight": ParamSpec("int8", dims=(Out(), In())), "scale": scale}

    def dequantize(self, layer: Any) -> torch.Tensor:
        weight: torch.Tensor = layer.weight.float() * layer.scale.float()[layer.segment_of_row()].unsqueeze(1)
        return weight


class PerTensorTest(QuantConformance):
    """The reference of `PerTensor`."""

    method = PerTensor()

    def encode(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        scale = weight.abs().max() / 127
        return {"weight": (weight / scale).round().to(torch.int8), "scale": scale}

    def decode(self, stored: dict[str, torch.Tensor], out: int, in_: int) -> torch.Tensor:
        return stored["weight"].float() * stored["scale"].float()
