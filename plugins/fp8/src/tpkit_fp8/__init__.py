"""Fp8 weights as AutoFP8, vLLM, FBGEMM, DeepSeek and transformers (finegrained_fp8) store them.

A weight is ``codes * scale``, also where the scale is called ``weight_scale_inv``: DeepSeek-V3 itself multiplies with
it, see inference/kernel.py in https://huggingface.co/deepseek-ai/DeepSeek-V3.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, Literal

import torch
from pydantic import Field, field_validator

from tpkit.quant import Fixed, In, LinearSpec, Out, ParamSpec, QuantMethod, QuantOptions, Segment, Target
from tpkit.quant.codes import e8m0

__all__ = ["FbgemmFp8", "FbgemmFp8Options", "Fp8", "Fp8Options"]

#: the stored type of a weight by `fmt`; other spellings are those of DeepSeek's and MiniMax' config.json
FORMATS = {
    "e4m3": "float8_e4m3fn",
    "e4m3fn": "float8_e4m3fn",
    "float8_e4m3fn": "float8_e4m3fn",
    "e5m2": "float8_e5m2",
    "float8_e5m2": "float8_e5m2",
}
#: what an unquantised weight, or a scale, is stored in
FLOATS = frozenset({"float32", "bfloat16", "float16", "float64"})
#: names of a weight's scale, and of its input's beside each
SCALES = {"weight_scale": "input_scale", "weight_scale_inv": "activation_scale"}
#: what computing does not need; whether embeddings are converted, and what is scaled per tensor, the tensors tell
NOTES = frozenset(
    {
        "activation_scale_ub",
        "act_per_tensor",
        "dequantize",
        "kv_cache_scheme",
        "modules_to_convert",
        "weight_per_tensor",
    }
)


class Fp8Options(QuantOptions):
    """Options of `Fp8`, named as in config.json.

    Attributes:
        activation_scheme: "static": scales of the input are stored as well. They are not used: inputs stay as they are.
        weight_block_size: outputs and inputs that share a scale; None: one for a weight or for each row.
        fmt: the codes; None: e4m3.
        scale_fmt: "ue8m0": scales are powers of two, stored as such or as floats.
        ignored_layers, modules_to_not_convert: what is not quantised.
        per_channel: one scale for each row, where no checkpoint shows how many there are.
        scale_name: name of the scale, where no checkpoint shows it.
    """

    activation_scheme: Literal["dynamic", "static"] = "dynamic"
    weight_block_size: list[int] | None = Field(default=None, min_length=2, max_length=2)
    fmt: str | None = None
    scale_fmt: Literal["float", "ue8m0"] | None = None
    ignored_layers: list[str] | None = None
    modules_to_not_convert: list[str] | None = None
    per_channel: bool = False
    scale_name: Literal["weight_scale", "weight_scale_inv"] | None = None

    @field_validator("weight_block_size")
    @classmethod
    def _positive(cls, size: list[int] | None) -> list[int] | None:
        if size is not None and min(size) < 1:
            raise ValueError(f"{size}: a block has at least one row and one column")
        return size

    @field_validator("fmt")
    @classmethod
    def _known(cls, fmt: str | None) -> str | None:
        if fmt is not None and "fnuz" in fmt:
            raise ValueError(
                f"{fmt}: the codes of AMD MI300 stand for half the value and have no -0; convert them first"
            )
        if fmt is not None and fmt not in FORMATS:
            raise ValueError(f"{fmt!r} is none of {', '.join(FORMATS)}")
        return fmt


class Fp8(QuantMethod):
    """The quant method ``fp8``: a scale per tensor, per row or per block, whichever the checkpoint has."""

    Options = Fp8Options
    #: scales of a quantised KV cache, under the attention or under its projections
    unused = ("**.k_scale", "**.v_scale", "**.kv_scale", "**.q_scale", "**.prob_scale", "**.output_scale")
    options: Fp8Options

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        kept = {name: value for name, value in config.items() if name not in NOTES}
        if kept.get("expert_dtype") in ("fp8", None):  # else experts are fp4: stays, and is refused
            kept.pop("expert_dtype", None)
        return kept

    def for_module(self, target: Target) -> QuantMethod | None:
        skipped = [*(self.options.ignored_layers or ()), *(self.options.modules_to_not_convert or ())]
        if target.matches(skipped):
            return None
        weight = target.stored.get("weight")
        if weight is None:
            return self if target.kind == "linear" else None
        # DeepSeek-V3 lists nothing, though its head and routers are bfloat16: a plain weight without a scale is not fp8
        return None if weight.dtype in FLOATS and not SCALES.keys() & target.stored.keys() else self

    def label(self) -> str:
        """Returns codes and block; whether a scale is per tensor or row is a matter of each weight."""
        size = self.options.weight_block_size
        return f"{self.options.fmt or 'e4m3'}{f' {size[0]}x{size[1]}' if size else ''}"

    def create_weights(self, layer: LinearSpec) -> dict[str, ParamSpec]:
        options = self.options
        usual = options.scale_name or ("weight_scale_inv" if options.weight_block_size else "weight_scale")
        name = next((name for name in (usual, *SCALES) if layer.header(name)), usual)
        powers = {"float8_e8m0fnu", *(["uint8"] if options.scale_fmt == "ue8m0" else [])}
        default = "float8_e8m0fnu" if options.scale_fmt == "ue8m0" and not layer.stored else "float32"
        params = {
            "weight": ParamSpec(FORMATS[options.fmt or "e4m3"], dims=(Out(), In())),
            "weight_scale": ParamSpec(
                layer.dtype_of(name, default, FLOATS | powers),
                dims=self._scale_dims(layer, name),
                stored=None if name == "weight_scale" else name,
                powers=options.scale_fmt == "ue8m0",
            ),
        }
        static = {SCALES[name]} if options.activation_scheme == "static" else set()
        for one in (*SCALES.values(), "input_scale_ub"):
            if layer.header(one) or one in static:
                params[one] = ParamSpec(layer.dtype_of(one, "float32"), dims=(Segment(),), default=1.0)  # not used
        return params

    def _scale_dims(self, layer: LinearSpec, name: str) -> tuple[Any, ...]:
        if self.options.weight_block_size:
            rows, columns = self.options.weight_block_size
            return (Out(block=rows), In(block=columns))
        header = layer.header(name)
        per_row = self.options.per_channel if header is None else prod(header.shape) > 1
        return (Out(), Fixed(1)) if per_row else (Segment(),)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Lets go of the scales of inputs."""
        layer.drop(*SCALES.values(), "input_scale_ub")

    def dequantize(self, layer: Any) -> torch.Tensor:
        scale: torch.Tensor = layer.weight_scale
        scale = scale.float() if scale.is_floating_point() and scale.dtype != torch.float8_e8m0fnu else e8m0(scale)
        if scale.ndim == 1:  # one for each of q, k, v
            scale = scale[layer.segment_of_row()].unsqueeze(1)
        codes: torch.Tensor = layer.weight
        return codes.float().mul_(layer.expand("weight_scale", scale))


class FbgemmFp8Options(Fp8Options):
    """Options of `FbgemmFp8`."""

    per_channel: bool = True


class FbgemmFp8(Fp8):
    """The quant method ``fbgemm_fp8``: a scale per row. The bound that it puts on its inputs' scales is not used."""

    Options = FbgemmFp8Options
