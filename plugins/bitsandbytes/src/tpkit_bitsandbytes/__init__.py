"""Checkpoints of bitsandbytes: NF4 and FP4 with or without nested absmax, and LLM.int8. Needs torch alone.

The format is what `QuantState.as_dict` and `Linear8bitLt` of https://github.com/bitsandbytes-foundation/bitsandbytes
write. A 4-bit weight is flattened row by row, two codes in a byte, the first in the high nibble; `blocksize` of them in
a row share an absmax, blocks running on from row to row:

    W[i] = quant_map[code[i]] * absmax[i // blocksize]
    absmax[b] = nested_quant_map[absmax_code[b]] * nested_absmax[b // 256] + nested_offset      # double quantisation
    W[o, i] = weight[o, i] * SCB[o] / 127                                                       # LLM.int8
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from typing import Any, Literal

import torch
from pydantic import Field

from tpkit import PluginError
from tpkit.quant import (
    Blob,
    Fixed,
    Flat,
    In,
    LinearSpec,
    Out,
    ParamSpec,
    QuantMethod,
    QuantOptions,
    Segment,
    Target,
    int8pack,
)

__all__ = ["BitsAndBytes"]

#: bytes of an element of the types that 4-bit codes are stored as
STORAGE = {"uint8": 1, "int8": 1, "float16": 2, "bfloat16": 2, "float32": 4}

#: blocks that share an absmax of the absmax
NESTED = 256

#: how bitsandbytes itself computes; it changes nothing in the weights
COMPUTING = (
    "bnb_4bit_compute_dtype",
    "llm_int8_enable_fp32_cpu_offload",
    "llm_int8_has_fp16_weight",
    "llm_int8_threshold",
)


class BitsAndBytes(QuantMethod):
    """The quant method ``bitsandbytes``."""

    class Options(QuantOptions):
        """What is stored. `double_quant`, `quant_storage` and `blocksize` give way to what the headers say.

        Attributes:
            bits: 4, or 8 for LLM.int8.
            quant_type: of 4 bits.
            double_quant: the absmax values are quantised too.
            quant_storage: dtype by name that 4-bit codes are stored as; their bytes are what counts.
            blocksize: weights that share an absmax.
            skip_modules: modules that are not quantised, as runs of dotted components; None: the head.
        """

        bits: Literal[4, 8] = 4
        quant_type: Literal["nf4", "fp4"] = "nf4"
        double_quant: bool = False
        quant_storage: Literal["uint8", "int8", "float16", "bfloat16", "float32"] = "uint8"
        blocksize: int = Field(default=64, ge=8)
        skip_modules: list[str] | None = None

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        left = {key: value for key, value in config.items() if key not in COMPUTING}
        # files of older versions of transformers say it with an underscore, newer ones in both ways
        said = {bits: {left.pop(f"{_}load_in_{bits}bit", False) for _ in ("", "_")} for bits in (4, 8)}
        bits = [number for number, values in said.items() if True in values]
        if len(bits) != 1:
            raise PluginError(
                f"bitsandbytes: the configuration loads in {' and '.join(map(str, bits)) or 'neither 4 nor 8'} bits",
                hint="exactly one of load_in_4bit and load_in_8bit must be true",
            )
        names = {
            "bnb_4bit_quant_type": "quant_type",
            "bnb_4bit_use_double_quant": "double_quant",
            "bnb_4bit_quant_storage": "quant_storage",
        }
        of_four = {name: left.pop(key) for key, name in names.items() if key in left}
        skip = left.pop("llm_int8_skip_modules", None)
        options = {name: value for name, value in of_four.items() if value is not None} if bits == [4] else {}
        return {**left, **options, "bits": bits[0], "skip_modules": skip}

    def for_module(self, target: Target) -> BitsAndBytes | None:
        options = self.options
        if target.matches(options.skip_modules):
            return None
        if not target.stored:
            kinds = ("linear",) if options.skip_modules is None else ("linear", "head")
            return self if target.kind in kinds else None
        weight, absmax = target.stored.get("weight"), target.stored.get("weight.absmax")
        beside = any(name == "SCB" or name.startswith("weight.") for name in target.stored)
        if weight is not None and weight.dtype in ("float32", "float16", "bfloat16") and not beside:
            return None  # quantisers leave out more than they list, the head above all
        if options.bits == 8 or absmax is None:
            return self
        found = {
            "double_quant": absmax.dtype == "uint8",
            "blocksize": _blocksize(target.out_features * target.in_features, prod(absmax.shape), options.blocksize),
        }
        return type(self)(options.model_copy(update=found))

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        if self.options.bits == 8:
            self.kernels = (int8pack.INT8PACK,)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        y = int8pack.multiply(x, layer.weight, layer.SCB.float() / 127, bias) if layer.kernel else None
        return super().apply(layer, x, bias) if y is None else y

    def label(self) -> str:
        options = self.options
        if options.bits == 8:
            return "int8"
        return f"{options.quant_type} g{options.blocksize}{' double' if options.double_quant else ''}"

    def create_weights(self, layer: LinearSpec) -> dict[str, ParamSpec]:
        options = self.options
        if options.bits == 8:
            return {
                "weight": ParamSpec("int8", dims=(Out(), In())),
                "SCB": ParamSpec(layer.dtype_of("SCB", "float32"), dims=(Out(),)),
                "weight_format": ParamSpec("uint8", dims=(Segment(),), default=0),
            }
        # two codes in each byte of whatever type they are stored as; another float type would convert the bytes
        storage, block = layer.dtype_of("weight", options.quant_storage, among=STORAGE), options.blocksize
        pack = 2 * STORAGE[storage]
        rows = layer.in_features % block == 0  # no block runs on into the next row
        codes = (Out(), In(pack=pack)) if rows else (Flat(pack=pack),)
        blocks = (Out(), In(block=block)) if rows else (Flat(block=block),)
        absmax = "uint8" if options.double_quant else "float32"
        specs = {
            "weight": ParamSpec(storage, dims=codes, flattened=True),
            "absmax": ParamSpec(absmax, dims=blocks, flattened=True, stored="weight.absmax"),
            "quant_map": ParamSpec("float32", dims=(Segment(), Fixed(16)), stored="weight.quant_map"),
            "quant_state": ParamSpec(
                "uint8", dims=(Blob(),), stored=f"weight.quant_state.bitsandbytes__{options.quant_type}"
            ),
        }
        if options.double_quant:
            nested = (Flat(block=block * NESTED),)
            specs["nested_absmax"] = ParamSpec("float32", dims=nested, stored="weight.nested_absmax")
            table = (Segment(), Fixed(256))
            specs["nested_quant_map"] = ParamSpec("float32", dims=table, stored="weight.nested_quant_map")
        return specs

    def process_weights_after_loading(self, layer: Any) -> None:
        if self.options.bits == 8:
            if bool(layer.weight_format.count_nonzero()):
                raise PluginError(
                    f"{_name(layer)}: weight_format is {layer.weight_format.tolist()}; only 0, row by row, is read",
                    hint="save the checkpoint with a newer bitsandbytes",
                )
            layer.drop("weight_format")
            return
        self._check(layer)
        layer.hold("quant_map", layer.quant_map[0].clone())
        if self.options.double_quant:
            held = sum(p.nbytes for p in layer.parameters())
            nested = layer.nested_absmax.nbytes + layer.nested_quant_map.nbytes
            # where cuts touch many blocks, or blocks are small, decoded values would take too much: decode at each call
            if held - nested + 3 * layer.absmax.numel() <= 1.1 * held:
                layer.hold("absmax", self._absmax(layer))
                layer.drop("nested_absmax", "nested_quant_map")

    def _check(self, layer: Any) -> None:
        """Compares what the headers let us suppose with what is written beside the weight."""
        block = self.options.blocksize
        for state in _states(layer):
            if state["blocksize"] != block and state["elements"] > min(state["blocksize"], block):
                raise PluginError(
                    f"{_name(layer)}: quant_state says blocks of {state['blocksize']}, read with blocks of {block}",
                    hint="set the option blocksize",
                )
            if self.options.double_quant and state["nested_blocksize"] != NESTED:
                raise PluginError(
                    f"{_name(layer)}: nested blocks of {state['nested_blocksize']:.0f}; only {NESTED} are read"
                )
        if not bool((layer.quant_map == layer.quant_map[:1]).all()):
            raise PluginError(f"{_name(layer)}: its {len(layer.quant_map)} parts have different tables of 16 values")

    def _absmax(self, layer: Any) -> torch.Tensor:
        """Returns the absmax of each block that this rank touches, in float32 and the shape of the parameter."""
        codes: torch.Tensor = layer.absmax
        if codes.is_floating_point():
            return codes
        numbers = torch.arange(codes.numel(), dtype=torch.int32, device=codes.device).view_as(codes)
        block = layer.expand("absmax", numbers).flatten().long()  # that each local element is in
        nested = codes.new_empty(codes.numel(), dtype=torch.float32).scatter_(0, block, layer.expand("nested_absmax"))
        part = block.new_zeros(codes.numel())
        if len(layer.out_sizes) > 1:
            rows = layer.segment_of_row().to(codes.device)
            part.scatter_(0, block, rows.repeat_interleave(layer.in_features))
        offset = nested.new_tensor([state["nested_offset"] for state in _states(layer)])
        values = layer.nested_quant_map[part, codes.flatten().long()]
        absmax: torch.Tensor = (values * nested + offset[part]).view_as(codes)
        return absmax

    def dequantize(self, layer: Any) -> torch.Tensor:
        weight: torch.Tensor
        if self.options.bits == 8:
            weight = layer.weight * (layer.SCB.float() / 127).unsqueeze(1)
            return weight
        table = layer.quant_map
        pairs = torch.stack([table.repeat_interleave(16), table.repeat(16)], 1)  # of each byte, high nibble first
        octets = layer.weight.detach().view(torch.uint8)
        # one look-up of eight bytes gives both values
        found = pairs.view(torch.int64).flatten().index_select(0, octets.flatten().int()).view(torch.float32)
        values = layer.trim("weight", found.view(*octets.shape[:-1], -1))
        absmax, block = self._absmax(layer), self.options.blocksize
        if layer.aligned("absmax") and values.numel() == absmax.numel() * block:
            values = values.reshape(-1, block) * absmax.reshape(-1, 1)
        else:
            values = values * layer.expand("absmax", absmax)
        weight = values.view(layer.out_features, layer.in_features)
        return weight


def _blocksize(elements: int, blocks: int, default: int) -> int:
    """Returns the size of which there are `blocks` blocks; one block may have any size that holds them all."""
    sizes = [default, *(1 << n for n in range(3, 32))]
    return next((size for size in sizes if -(-elements // size) == blocks), default)


def _states(layer: Any) -> list[dict[str, Any]]:
    """Returns what is written beside the weight of each part, in the order of the parts."""
    states = []
    for part, blob in layer.blobs["quant_state"].items():
        try:
            state = json.loads(bytes(blob.flatten().tolist()))
            nested = ("nested_blocksize", "nested_offset") if "nested_absmax" in dict(layer.named_parameters()) else ()
            numbers = {key: float(state[key]) for key in nested}
            states.append({**numbers, "blocksize": int(state["blocksize"]), "elements": prod(state["shape"])})
        except (ValueError, KeyError, TypeError, AttributeError) as cause:
            which = f" of {part}" if part else ""
            raise PluginError(f"{_name(layer)}: the quant_state{which} cannot be read: {cause!r}") from None
    return states


def _name(layer: Any) -> str:
    return str(layer.path or type(layer).__name__)
