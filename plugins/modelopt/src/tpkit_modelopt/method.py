"""The quant method: which modules, which tensors, which values."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from math import prod
from typing import Any

import torch

from tpkit import PluginError
from tpkit.quant import Fixed, In, LinearSpec, Out, ParamSpec, QuantMethod, Segment, Target
from tpkit.quant.codes import e8m0, fp4, unpack
from tpkit_modelopt.options import LAYOUTS, LayerOptions, ModelOptOptions, read

__all__ = ["ModelOpt"]

#: what an unquantised weight is stored in
FLOATS = frozenset({"float32", "bfloat16", "float16", "float64"})


class ModelOpt(QuantMethod):
    """The quant method ``modelopt``."""

    Options = ModelOptOptions
    #: scales and zero points of a quantised KV cache
    unused = ("**.k_scale", "**.v_scale", "**.k_proj.k_bias", "**.v_proj.v_bias", "**.output_scale")
    options: ModelOptOptions

    def __init__(self, options: ModelOptOptions | None = None) -> None:
        super().__init__(options or ModelOptOptions(quant_algo="FP8"))
        self._globs = tuple(name for name in self.options.quantized_layers or () if "*" in name)

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        return read(config)

    def for_module(self, target: Target) -> QuantMethod | None:
        options, weight = self.options, target.stored.get("weight")
        if options.quant_algo is None or target.matches(options.exclude_modules, "glob"):
            return None
        if weight is not None and weight.dtype in FLOATS and "weight_scale" not in target.stored:
            return None
        if options.quantized_layers is None and options.quant_algo != "MIXED_PRECISION":
            return self if target.kind == "linear" or weight is not None else None
        layers = options.quantized_layers or {}
        known = next((name for name in (target.name, *target.aliases) if name in layers), None)
        known = known or target.match(self._globs, "glob")
        return _single(layers[known]) if known is not None and layers[known].quant_algo else None

    def label(self) -> str:
        options = self.options
        known = options.quant_algo in LAYOUTS
        return f"{options.quant_algo}{f' g{options.group}' if known and options.group else ''}"

    # what is stored

    def create_weights(self, layer: LinearSpec) -> dict[str, ParamSpec]:
        if self.options.quant_algo not in LAYOUTS:
            raise PluginError(
                f"{layer.name or 'a layer'}: {self.options.quant_algo} says nothing about one layer",
                hint="quantized_layers has to name it",
            )
        layout = self.options.layout
        weights = {
            "fp8": ParamSpec("float8_e4m3fn", dims=(Out(), In())),
            "int8": ParamSpec("int8", dims=(Out(), In())),
            "fp4": ParamSpec("uint8", dims=(Out(), In(pack=2))),
            "int4": ParamSpec("uint8", dims=(Out(pack=2), In())),
        }
        likely = {"float32": FLOATS, "uint8": {"uint8", "float8_e8m0fnu"}}.get(layout.scale_dtype, {layout.scale_dtype})
        scale_dtype = layer.dtype_of("weight_scale", layout.scale_dtype, likely)
        params = {
            "weight": weights[layout.codes],
            "weight_scale": ParamSpec(scale_dtype, dims=self._scale_dims(layer), powers=layout.scale_dtype == "uint8"),
        }
        if layout.second:
            params["weight_scale_2"] = ParamSpec(layer.dtype_of("weight_scale_2", "float32"), dims=(Segment(),))
        if layer.header("input_scale"):
            params["input_scale"] = ParamSpec(layer.dtype_of("input_scale", "float32"), dims=(Segment(),), default=1.0)
        if layer.header("pre_quant_scale"):  # absent where the export has folded it into the layer before
            dtype = layer.dtype_of("pre_quant_scale", "float32")
            params["pre_quant_scale"] = ParamSpec(dtype, dims=(Segment(), In()))
        return params

    def _scale_dims(self, layer: LinearSpec) -> tuple[Any, ...]:
        scale, group, header = self.options.layout.scale, self.options.group, layer.header("weight_scale")
        if scale == "tensor" and header is not None and prod(header.shape) > 1:
            scale = "row"  # the export writes what it calibrated, a maximum for each row too
        return {
            "tensor": (Segment(),),
            "row": (Out(), Fixed(1)),
            "block": (Out(block=group or 1), In(block=group or 1)),
            "group": (Out(), In(block=group or 1)),
        }[scale]

    def process_weights_after_loading(self, layer: Any) -> None:
        """Lets go of the inputs' scale."""
        layer.drop("input_scale")

    # which values

    def dequantize(self, layer: Any) -> torch.Tensor:
        layout, rows = self.options.layout, layer.segment_of_row()
        scale = e8m0(layer.weight_scale) if layout.scale_dtype == "uint8" else layer.weight_scale.float()
        if scale.ndim == 1:  # one for each of q, k, v
            scale = scale[rows].unsqueeze(1)
        second = layer.weight_scale_2.float()[rows].unsqueeze(1) if layout.second else None
        if second is not None and not layout.rounded:
            scale = scale * second
        weight = self._codes(layer).mul_(layer.expand("weight_scale", scale))
        if second is not None and layout.rounded:
            weight = (weight / second).clamp_(-448, 448).to(torch.float8_e4m3fn).float().mul_(second)
        if hasattr(layer, "pre_quant_scale"):  # the input is multiplied with it
            weight.mul_(layer.pre_quant_scale.float()[rows])
        return weight

    def _codes(self, layer: Any) -> torch.Tensor:
        """Returns the codes' values ``[out, in]`` in float32."""
        if self.options.layout.codes == "fp4":
            return fp4(layer.trim("weight", unpack(layer.weight, 4)))
        if self.options.layout.codes == "int4":
            nibbles: torch.Tensor = layer.trim("weight", unpack(layer.weight, 4, dim=0)).to(torch.int8)
            return ((nibbles ^ 8) - 8).float()
        values: torch.Tensor = layer.weight.float()
        return values


@lru_cache(maxsize=256)
def _single(options: LayerOptions) -> ModelOpt:
    """Returns the method of one module; equal options give the same one."""
    return ModelOpt(ModelOptOptions(quant_algo=options.quant_algo, group_size=options.group_size))
