"""MXFP4 as gpt-oss stores it, for tpkit: 32 values of 4 bits in 16 bytes, and a power of two that they share.

Values: OCP Microscaling Formats (MX) specification v1.0, 5.3.3 (e2m1) and 5.4.1 (e8m0).
Layout: https://github.com/openai/gpt-oss, gpt_oss/torch/weights.py
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tpkit.quant import Fixed, In, LinearSpec, Out, ParamSpec, QuantMethod, QuantOptions, Target, codes

__all__ = ["Mxfp4", "Mxfp4Options"]


class Mxfp4Options(QuantOptions):
    """Options of the method.

    Attributes:
        modules_to_not_convert: what is not quantised, as runs of components with ``*`` within one. None: what has no
            blocks.
    """

    modules_to_not_convert: list[str] | None = None


class Mxfp4(QuantMethod):
    """The quant method ``mxfp4``. Embeddings and heads are never quantised by it."""

    Options = Mxfp4Options

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in config.items() if key != "dequantize"}  # how the reader wants it

    def for_module(self, target: Target) -> QuantMethod | None:
        kept = self.options.modules_to_not_convert
        if target.kind != "linear" or target.matches(kept, "component"):
            return None
        plain = kept is None and "weight" in target.stored and "blocks" not in target.stored
        return None if plain else self

    def create_weights(self, layer: LinearSpec) -> dict[str, ParamSpec]:
        dtype = layer.dtype_of("scales", "uint8", ("uint8", "float8_e8m0fnu"))
        return {
            "blocks": ParamSpec("uint8", dims=(Out(), In(pack=32), Fixed(16))),
            "scales": ParamSpec(dtype, dims=(Out(), In(block=32)), powers=True),
        }

    def dequantize(self, layer: Any) -> torch.Tensor:
        held = codes.unpack(layer.blocks, 4).flatten(1)  # the low half of a byte comes first
        scales: torch.Tensor = layer.expand("scales", codes.e8m0(layer.scales))
        return codes.fp4(layer.trim("blocks", held)) * scales
