"""What the methods share: whole blocks come to every rank that needs a part of them, and are quantised there."""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field

from tpkit import PluginError
from tpkit.quant import In, LinearSpec, Out, ParamSpec, QuantMethod, QuantOptions, Target

__all__ = ["Online", "OnlineOptions", "usable"]

FLOATS = ("float32", "bfloat16", "float16", "float64")


class OnlineOptions(QuantOptions):
    """Options of all methods.

    Attributes:
        ignore: modules that stay as they are, as runs of dotted components, e.g. ``layers.0`` or ``down_proj``.
    """

    ignore: list[str] = Field(default_factory=list)


class Online(QuantMethod):
    """Base: a block of the weight has one scale, made of all its elements wherever the ranks are cut.

    A rank is given the blocks that cover its shard, a neighbour's elements too, quantises them and keeps its own codes.
    So it holds what a single rank would hold of the same elements, bit for bit.
    """

    Options = OnlineOptions

    # what a method is

    def block(self, width: int) -> tuple[int, int]:
        """Returns the outputs and inputs that share a scale, for an input of `width` features."""
        raise NotImplementedError

    def scales(self, layer: LinearSpec) -> str:
        """Returns the dtype that scales are kept in."""
        return "float32"

    def quantize(self, blocks: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantises.

        Args:
            blocks: ``[blocks, outputs, blocks, inputs]`` float32, zero where a short last block has no element.
            dtype: of the scales.

        Returns:
            codes of the same shape, as float32, and scales ``[blocks, 1, blocks, 1]`` of the given dtype.
        """
        raise NotImplementedError

    def keep(self, layer: Any, codes: torch.Tensor) -> None:
        """Keeps what ``layer.trim("scale", codes)`` leaves of the codes of whole blocks ``[outputs, inputs]``."""
        raise NotImplementedError

    def codes(self, layer: Any) -> torch.Tensor:
        """Returns this rank's codes ``[out, in]`` as float32, in memory of their own."""
        raise NotImplementedError

    # the contract

    def for_module(self, target: Target) -> QuantMethod | None:
        if target.kind != "linear" or target.matches(self.options.ignore):
            return None
        if target.role in ("router", "shared_gate"):  # a rounded router sends tokens to other experts
            return None
        weight = target.stored.get("weight")
        others = sorted(set(target.stored) - {"weight", "bias"})
        if others or (weight is not None and weight.dtype not in FLOATS):
            found = ", ".join(f"{n} {h.dtype} {list(h.shape)}" for n, h in sorted(target.stored.items()) if n != "bias")
            raise PluginError(
                f"{target.name} is quantised already: the checkpoint has {found}; {type(self).__name__} takes "
                f"{target.out_features} x {target.in_features} floats",
                hint="leave the quant method out, the checkpoint has its own; or put the module on the ignore list",
            )
        return self

    def create_weights(self, layer: LinearSpec) -> dict[str, ParamSpec]:
        out, in_ = self.block(layer.in_features)
        whole = (Out(per=out, cells=out), In(per=in_, cells=in_))
        dtype = layer.dtype_of("weight", layer.dtype)
        return {
            "weight": ParamSpec(dtype, dims=whole, transposed=layer.transposed),
            # the core makes room for it, and knows which of its cells an element belongs to
            "scale": ParamSpec(self.scales(layer), (Out(per=out), In(per=in_)), made=True),
        }

    def process_weights_after_loading(self, layer: Any) -> None:
        weight = layer.weight.detach()
        blocks = _whole_blocks(layer, weight.float(), self.block(weight.shape[1]))
        codes, scale = self.quantize(blocks, layer.scale.dtype)
        if not bool(scale.isfinite().all()):
            name = layer.path or type(layer).__name__
            lost = weight.numel() - int(weight.isfinite().sum())
            raise PluginError(
                f"{name}: {lost} of {weight.numel()} weights are NaN or infinite, which no scale can hold",
                hint="the checkpoint is damaged, or was saved in a type too small for it",
            )
        layer.hold("scale", scale.reshape(layer.scale.shape).contiguous())
        self.keep(layer, codes.flatten(2).flatten(0, 1))
        layer.drop("weight")

    def dequantize(self, layer: Any) -> torch.Tensor:
        weight, scale = self.codes(layer), layer.scale.float()
        (rows, columns), (out, in_) = scale.shape, self.block(layer.in_features)
        if layer.aligned("scale") and weight.shape == (rows * out, columns * in_):
            weight.view(rows, out, columns, in_).mul_(scale.view(rows, 1, columns, 1))
            return weight
        each = scale.repeat_interleave(out, 0).repeat_interleave(in_, 1)
        return weight.mul_(layer.trim("scale", each))


def _whole_blocks(layer: Any, weight: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """Returns the held weight as ``[blocks, outputs, blocks, inputs]``; where a last block is short, zeros fill it.

    With q, k and v stored apart each has a last block of its own. Which held cell belongs where among whole blocks
    follows from this rank's own elements, whose places `trim` tells in both: every held block has at least one.
    """
    rows, columns = layer.scale.shape
    whole = [rows * size[0], columns * size[1]]
    held = list(weight.shape)
    for dim in (0, 1):
        if held[dim] == whole[dim]:
            continue
        here, there = _places(layer, "weight", held, dim), _places(layer, "scale", whole, dim)
        first = here.new_zeros(layer.scale.shape[dim])
        first[there // size[dim]] = here - there % size[dim]  # where each block begins among the held cells
        cells = torch.arange(held[dim], device=weight.device)
        block = torch.searchsorted(first, cells, right=True) - 1
        shape = list(weight.shape)
        shape[dim] = whole[dim]
        weight = weight.new_zeros(shape).index_copy_(dim, block * size[dim] + cells - first[block], weight)
    return weight.view(rows, size[0], columns, size[1])


def _places(layer: Any, name: str, shape: list[int], dim: int) -> torch.Tensor:
    """Returns where this rank's own elements lie along one dimension of a parameter's cells."""
    places = torch.arange(shape[dim], device=layer.scale.device)
    own: torch.Tensor = layer.trim(name, (places.view(-1, 1) if dim == 0 else places.view(1, -1)).expand(shape))
    return own[:, 0] if dim == 0 else own[0]


def usable(scale: torch.Tensor) -> torch.Tensor:
    """Returns scales with 1 for 0: of a block of zeros, or of one so small that its scale is no number of the type."""
    return torch.where(scale == 0, torch.ones_like(scale), scale)
