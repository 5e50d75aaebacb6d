"""How compressed-tensors stores a linear, and what that means. One class for each way to store the values.

Layouts: https://github.com/vllm-project/compressed-tensors, src/compressed_tensors/compressors.
The library computes in the type of the scales; here everything is float32.
"""

from __future__ import annotations

from dataclasses import replace
from math import gcd
from typing import Any, ClassVar

import torch
from torch.nn.functional import pad

from tpkit import PluginError
from tpkit.quant import (
    Blob,
    Dim,
    Fixed,
    In,
    LinearSpec,
    Out,
    ParamSpec,
    QuantMethod,
    Segment,
    codes,
    int4pack,
    int8pack,
)
from tpkit_compressed_tensors.options import Scheme

__all__ = ["FloatFour", "Packed", "Plain", "Stored"]


class Stored(QuantMethod):
    """What all formats share: scales and zero points by strategy, and what is stored beside the weight."""

    Options = Scheme
    unused = tuple(f"**.{name}_{what}" for name in ("q", "k", "v", "output") for what in ("scale", "zero_point"))
    #: read, and of no use where activations are not quantised
    spare: ClassVar[tuple[str, ...]] = ("input_scale", "input_zero_point", "input_global_scale", "weight_shape")
    #: types of scales that are powers of two
    powers: ClassVar[tuple[str, ...]] = ("uint8", "float8_e8m0fnu")

    def label(self) -> str:
        return str(self.options)

    def create_weights(self, layer: LinearSpec) -> dict[str, ParamSpec]:
        spare = [*self.spare, *(["weight_zero_point"] if self.options.weights.symmetric else [])]
        extra = {name: ParamSpec("uint8", dims=(Blob(),)) for name in spare if layer.header(name)}
        return {**self.values(layer), **extra}

    def values(self, layer: LinearSpec) -> dict[str, ParamSpec]:
        """Returns what the weight is made of, by parameter name."""
        raise NotImplementedError

    def process_weights_after_loading(self, layer: Any) -> None:
        for segment, zero in layer.blobs.get("weight_zero_point", {}).items():
            count = int(zero.float().count_nonzero())
            if count:  # early versions store the zeros of symmetric weights
                raise PluginError(
                    f"{_name(layer)} {segment}: {count} of {zero.numel()} values of weight_zero_point are not zero, "
                    "but config_groups say that its weights are symmetric"
                )
        layer.blobs.clear()

    def shared(self, groups: int | None = None, out: Dim | None = None) -> tuple[Dim, ...]:
        """Returns the dims of scales.

        Args:
            groups: groups that every rank needs whole; None: inputs are in order of their groups.
            out: the dimension along the output, if it is packed.
        """
        weights = self.options.weights
        rows = Out() if out is None else out
        if weights.strategy == "tensor":
            return (Segment(),)
        if weights.strategy == "channel":
            return (rows,)
        if weights.strategy == "block":
            return Out(block=weights.block_structure[0]), In(block=weights.block_structure[1])
        return rows, In(block=weights.group_size) if groups is None else Fixed(groups)

    def spread(self, layer: Any, name: str, value: torch.Tensor) -> torch.Tensor:
        """Returns one value for each weight ``[out, in]``, or row ``[out, 1]``, of what has the dims `shared`."""
        strategy = self.options.weights.strategy
        if strategy == "tensor":
            return value[layer.segment_of_row()].unsqueeze(1)
        if strategy == "channel":
            return value.unsqueeze(1)
        if hasattr(layer, "weight_g_idx"):
            parts = zip(torch.split(value, layer.out_sizes), layer.weight_g_idx, strict=True)
            return torch.cat([part.index_select(1, index) for part, index in parts])
        expanded: torch.Tensor = layer.expand(name, value)
        return expanded

    @property
    def powers_of_two(self) -> bool:
        """Says that scales are exponents."""
        return bool(self.options.format.startswith("mx"))

    def scale(self, layer: Any) -> torch.Tensor:
        """Returns the scales as stored, in float32."""
        return codes.e8m0(layer.weight_scale) if self.powers_of_two else layer.weight_scale.to(torch.float32)

    def scale_dtype(self, layer: LinearSpec) -> str:
        """Returns the type scales are kept in."""
        if self.options.format.startswith("mx"):
            return layer.dtype_of("weight_scale", "uint8", self.powers)
        if self.options.format.startswith("nv"):
            return "float8_e4m3fn"
        return layer.dtype_of("weight_scale", layer.dtype)


class Plain(Stored):
    """A value in each element: int-quantized, float-quantized, naive-quantized, mxfp8-quantized."""

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        weights = self.options.weights
        if weights.type == "int" and weights.symmetric and weights.strategy == "channel":
            self.kernels = (int8pack.INT8PACK,)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        y = int8pack.multiply(x, layer.weight, layer.weight_scale.float(), bias) if layer.kernel else None
        return super().apply(layer, x, bias) if y is None else y

    def values(self, layer: LinearSpec) -> dict[str, ParamSpec]:
        weights = self.options.weights
        dtype = "int8" if weights.type == "int" else "float8_e4m3fn"
        made = {"weight": ParamSpec(dtype, dims=(Out(), In()))}
        made["weight_scale"] = ParamSpec(self.scale_dtype(layer), dims=self.shared(), powers=self.powers_of_two)
        if not weights.symmetric:
            made["weight_zero_point"] = ParamSpec("int8", dims=self.shared())
        return made

    def dequantize(self, layer: Any) -> torch.Tensor:
        weight: torch.Tensor = layer.weight.to(torch.float32)
        if not self.options.weights.symmetric:
            weight = weight - self.spread(layer, "weight_zero_point", layer.weight_zero_point)
        return weight * self.spread(layer, "weight_scale", self.scale(layer))


class FloatFour(Stored):
    """Two e2m1 values in a byte: nvfp4-pack-quantized, mxfp4-pack-quantized.

    nvfp4 has a second scale, of the whole tensor, by which the first is divided.
    """

    def values(self, layer: LinearSpec) -> dict[str, ParamSpec]:
        made = {"weight_packed": ParamSpec("uint8", dims=(Out(), In(pack=2)))}
        made["weight_scale"] = ParamSpec(self.scale_dtype(layer), dims=self.shared(), powers=self.powers_of_two)
        if self.options.format.startswith("nv"):
            dtype = layer.dtype_of("weight_global_scale", "float32")
            made["weight_global_scale"] = ParamSpec(dtype, dims=(Segment(),))
        return made

    def dequantize(self, layer: Any) -> torch.Tensor:
        values = codes.fp4(layer.trim("weight_packed", codes.unpack(layer.weight_packed, 4)))
        scale = self.scale(layer)
        if self.options.format.startswith("nv"):
            whole = layer.weight_global_scale.to(torch.float32)
            scale = scale / whole[layer.segment_of_row()].unsqueeze(1)
        return values * self.spread(layer, "weight_scale", scale)


class Packed(Stored):
    """Integers of 1 to 8 bits in words of 32, along the input; zero points along the output: pack-quantized.

    Bits that do not divide 32 run on from word to word. Older versions left the rest of a word free instead; the width
    of the stored tensor tells, and the layer then has a parameter `free_bits` (of no use but to be there).
    """

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        weights = self.options.weights
        grouped = weights.strategy == "group" and weights.group_size in int4pack.GROUPS
        if weights.num_bits == 4 and weights.symmetric and grouped:
            # exact only where scales are stored in the kernel's own type, and groups are in order
            stored = (("weight_scale", "bfloat16"), ("weight_g_idx", None))
            self.kernels = (replace(int4pack.INT4PACK, stored=stored, in_multiple=weights.group_size),)

    def values(self, layer: LinearSpec) -> dict[str, ParamSpec]:
        weights, bits = self.options.weights, self.options.weights.num_bits
        free, run = self._free_bits(layer), gcd(32, bits)
        word = {"pack": 32 // bits} if free or 32 % bits == 0 else {"per": 32 // run, "cells": bits // run}
        groups, made = None, {}
        if weights.group_size and (weights.actorder == "group" or layer.header("weight_g_idx")):
            groups = -(-layer.in_features // weights.group_size)
            dtype = layer.dtype_of("weight_g_idx", "int32", ("int32", "int64"))
            made["weight_g_idx"] = ParamSpec(dtype, dims=(Segment(), In()))
        made["weight_packed"] = ParamSpec("int32", dims=(Out(), In(**word)))
        made["weight_scale"] = ParamSpec(self.scale_dtype(layer), dims=self.shared(groups))
        if not weights.symmetric:
            dtype = "int8" if weights.strategy == "tensor" else "int32"
            made["weight_zero_point"] = ParamSpec(dtype, dims=self.shared(groups, Out(**word)))
        if free:
            made["free_bits"] = ParamSpec("uint8", dims=(Segment(),), default=free)
        return made

    def _free_bits(self, layer: LinearSpec) -> int:
        """Returns how many bits of each word hold nothing."""
        bits: int = self.options.weights.num_bits
        inputs, header = layer.in_features, layer.header("weight_packed")
        dense, sparse = -(-inputs * bits // 32), -(-inputs // (32 // bits))
        if header is not None and header.shape[-1:] == (sparse,) != (dense,):
            return 32 % bits
        run = 32 // gcd(32, bits)
        if 32 % bits and inputs % run:
            raise PluginError(
                f"{layer.name}: {inputs} inputs of {bits} bits are no multiple of {run}, whose bits fill whole words",
                hint="quantise it with 2, 4 or 8 bits, or leave it unquantised",
            )
        return 0

    def process_weights_after_loading(self, layer: Any) -> None:
        super().process_weights_after_loading(layer)
        if hasattr(layer, "weight_g_idx"):
            index, groups = layer.weight_g_idx, layer.weight_scale.shape[1]
            outside = int(((index < 0) | (index >= groups)).sum())
            if outside:
                raise PluginError(
                    f"{_name(layer)}: weight_g_idx has {outside} inputs in none of the {groups} groups",
                    hint="the order of its groups was never written: quantise it again, without actorder",
                )
        if layer.kernel == int4pack.INT4PACK.name:
            values = layer.trim("weight_packed", self._unpack(layer, layer.weight_packed, 1))
            short = layer.weight_scale.shape[1] * self.options.weights.group_size - values.shape[1]
            if int4pack.pack(layer, pad(values, (0, short), value=8), layer.weight_scale):
                layer.drop("weight_packed", "weight_scale")

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if hasattr(layer, "packed"):
            return int4pack.multiply(layer, x, bias, self.options.weights.group_size)
        return super().apply(layer, x, bias)

    def dequantize(self, layer: Any) -> torch.Tensor:
        weights = self.options.weights
        if hasattr(layer, "packed"):
            return int4pack.dequantize(layer, weights.group_size)
        values = layer.trim("weight_packed", self._unpack(layer, layer.weight_packed, 1)).to(torch.float32)
        zero: float | torch.Tensor = float(1 << (weights.num_bits - 1))  # signed values are stored with this added
        if not weights.symmetric and weights.strategy == "tensor":
            zero = zero + self.spread(layer, "weight_zero_point", layer.weight_zero_point.to(torch.float32))
        elif not weights.symmetric:
            stored = layer.trim("weight_zero_point", self._unpack(layer, layer.weight_zero_point, 0))
            zero = self.spread(layer, "weight_zero_point", stored.to(torch.float32))
        result: torch.Tensor = (values - zero) * self.spread(layer, "weight_scale", self.scale(layer))
        return result

    def _unpack(self, layer: Any, words: torch.Tensor, dim: int) -> torch.Tensor:
        bits: int = self.options.weights.num_bits
        if not hasattr(layer, "free_bits"):
            return codes.unpack(words, bits, dim)
        shifts = torch.arange(0, 33 - bits, bits, dtype=torch.int32, device=words.device)
        values = (words.movedim(dim, -1).unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
        return values.flatten(-2).movedim(-1, dim).to(torch.uint8)


def _name(layer: Any) -> str:
    path: str = layer.path
    return path or type(layer).__name__
