"""What config.json and hf_quant_config.json say, and what is stored for each algorithm they name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import field_validator

from tpkit.quant import QuantOptions

__all__ = ["LAYOUTS", "LayerOptions", "Layout", "ModelOptOptions", "read"]


@dataclass(frozen=True)
class Layout:
    """How an algorithm stores a weight.

    Attributes:
        codes: "fp8", "int8": one a byte; "fp4": two a byte along the input; "int4": two a byte along the output.
        scale: what shares one: the weight, a row, a square block, a group of a row.
        group: the usual size of a block or group.
        scale_dtype: what a scale is stored in.
        second: there is a scale for the whole weight as well, ``weight_scale_2``.
        rounded: the scaled weight is rounded to fp8 by the second scale before it is multiplied.
    """

    codes: Literal["fp8", "int8", "fp4", "int4"]
    scale: Literal["tensor", "row", "block", "group"]
    group: int = 0
    scale_dtype: str = "float32"
    second: bool = False
    rounded: bool = False


_NVFP4 = Layout("fp4", "group", 16, "float8_e4m3fn", second=True)
LAYOUTS: Mapping[str, Layout] = {
    "FP8": Layout("fp8", "tensor"),
    "FP8_PER_CHANNEL_PER_TOKEN": Layout("fp8", "row"),
    "FP8_PB_WO": Layout("fp8", "block", 128),
    "FP8_PB_REAL": Layout("fp8", "block", 128),
    "MXFP8": Layout("fp8", "group", 32, "uint8"),
    "NVFP4": _NVFP4,
    "NVFP4_AWQ": _NVFP4,
    "W4A16_NVFP4": _NVFP4,
    "W4A8_NVFP4_FP8": Layout("fp4", "group", 32, "float8_e4m3fn", second=True),
    "W4A8_MXFP4_FP8": Layout("fp4", "group", 32, "uint8"),
    "MXFP4": Layout("fp4", "group", 32, "uint8"),
    "W4A16_AWQ": Layout("int4", "group", 128),
    "W4A8_AWQ": Layout("int4", "group", 128, second=True, rounded=True),
    "W8A16": Layout("int8", "row"),
    "W8A8_SQ_PER_CHANNEL": Layout("int8", "row"),
}

#: what computing does not need: KV cache and producer; whether inputs are smoothed the tensors tell
NOTES = frozenset({"producer", "kv_cache_quant_algo", "kv_cache_scheme", "pre_quant_scale", "quantization", "ignore"})
#: what of a config group is understood or not needed
GROUP_NOTES = frozenset({"targets", "weights", "input_activations", "output_activations", "pre_quant_scale"})
WEIGHT_NOTES = frozenset({"dynamic", "num_bits", "type", "strategy", "group_size"})


class LayerOptions(QuantOptions):
    """What one module gets.

    Attributes:
        quant_algo: the algorithm, in upper case; None: it is not quantised.
        group_size: of the algorithm's groups or blocks; None: the usual one.
        has_zero_point: always false; with zero points nothing is known to be exported.
    """

    quant_algo: str | None
    group_size: int | None = None
    has_zero_point: Literal[False] = False

    @field_validator("quant_algo")
    @classmethod
    def _known(cls, algo: str | None) -> str | None:
        name = algo.upper() if algo else None
        if name == "NVFP4_SVD":
            raise ValueError("NVFP4_SVD: a low-rank product is added to its output, which this plugin does not compute")
        if name not in (None, "MIXED_PRECISION", *LAYOUTS):
            raise ValueError(f"{algo!r} is none of MIXED_PRECISION, {', '.join(LAYOUTS)}")
        return name

    @property
    def layout(self) -> Layout:
        """How its weight is stored; there must be an algorithm."""
        return LAYOUTS[self.quant_algo or ""]

    @property
    def group(self) -> int:
        """Elements that share a scale."""
        return self.group_size or self.layout.group


class ModelOptOptions(LayerOptions):
    """Options of `ModelOpt`.

    Attributes:
        exclude_modules: names of what is not quantised; ``*`` is any text.
        quantized_layers: for MIXED_PRECISION, each module that is quantised, by name.
    """

    exclude_modules: list[str] | None = None
    quantized_layers: dict[str, LayerOptions] | None = None


def read(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns options from config.json's quantization_config, or from hf_quant_config.json's or its `quantization`."""
    given = {**(config.get("quantization") or {}), **config}
    kept = {name: value for name, value in given.items() if name not in NOTES}
    kept["exclude_modules"] = [*(given.get("exclude_modules") or ()), *(given.get("ignore") or ())] or None
    block = kept.pop("awq_block_size", None)
    kept["group_size"] = kept.get("group_size") or block or None
    if kept.get("has_zero_point") is None:
        kept.pop("has_zero_point", None)
    layers = {name: _layer(one) for name, one in (kept.pop("quantized_layers", None) or {}).items()}
    groups, unknown = kept.pop("config_groups", None) or {}, {}
    for name, group in groups.items():
        weights = group.get("weights") or {}
        left = {*(group.keys() - GROUP_NOTES - {"has_zero_point", "quant_algo"}), *(weights.keys() - WEIGHT_NOTES)}
        if left or group.get("has_zero_point"):
            unknown[name] = group
        elif kept.get("quant_algo") != "MIXED_PRECISION":
            kept["group_size"] = kept["group_size"] or weights.get("group_size")
        elif "quantized_layers" not in given:
            one = {"quant_algo": _algorithm(group), "group_size": weights.get("group_size")}
            layers.update(dict.fromkeys(group.get("targets") or (), one))
    if unknown:
        kept["config_groups"] = unknown  # an option that does not exist: it says so
    return {**kept, "quantized_layers": layers or None}


def _layer(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of one module."""
    kept = {name: value for name, value in given.items() if name != "pre_quant_scale"}
    return {**kept, "group_size": given.get("group_size") or None}


def _algorithm(group: Mapping[str, Any]) -> str:
    """Returns the algorithm of a config group that does not name it, or a description that is no algorithm's name."""
    weights, inputs = group.get("weights") or {}, group.get("input_activations") or {}
    kind, bits, size = weights.get("type"), weights.get("num_bits"), weights.get("group_size")
    if (kind, bits) == ("float", 8):
        return "MXFP8" if size else "FP8_PER_CHANNEL_PER_TOKEN" if weights.get("strategy") == "channel" else "FP8"
    if (kind, bits, size) == ("float", 4, 16) and inputs.get("num_bits", 4) == 4:
        return "NVFP4"
    if kind == "int" and bits in (4, 8):
        return {4: "W4A16_AWQ", 8: "W8A16"}[bits]
    return str(group.get("quant_algo") or f"{kind} {bits} bit, groups of {size}, without quantized_layers,")
