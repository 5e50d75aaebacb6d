"""A small quant method for tests of the core: int8 rows with a scale for each, or for each group of inputs."""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field

from tests.small import weights
from tpkit import Registry
from tpkit.quant import In, Kernel, LinearSpec, Out, ParamSpec, QuantMethod, QuantOptions, Target

__all__ = ["Rows", "dense", "quantised", "registry"]


class Rows(QuantMethod):
    """int8 codes and float32 scales for groups of inputs; 0: one scale for the row."""

    class Options(QuantOptions):
        group: int = 0
        ignore: list[str] = Field(default=[])
        wide: list[str] = Field(default=[])

    unused = ("**.k_scale",)
    kernels = (
        Kernel(name="even", in_multiple=16),
        Kernel(name="cuda only", devices=("cuda",), dtypes=("bfloat16",), whole=False),
    )

    @classmethod
    def read_config(cls, config: Any) -> dict[str, Any]:
        known = {"modules_to_not_convert": "ignore", "group_size": "group"}
        return {known.get(key, key): value for key, value in config.items() if key != "version"}

    def for_module(self, target: Target) -> QuantMethod | None:
        if target.kind != "linear" or target.matches(self.options.ignore):
            return None
        if target.matches(self.options.wide):
            return Rows(self.Options(group=16))
        return self

    def label(self) -> str:
        return f"g{self.options.group}" if self.options.group else ""

    def create_weights(self, layer: LinearSpec) -> dict[str, ParamSpec]:
        group = self.options.group or layer.in_features
        scale = ParamSpec("float32", dims=(Out(), In(block=group)))
        return {"weight": ParamSpec("int8", dims=(Out(), In())), "scale": scale}

    def dequantize(self, layer: Any) -> torch.Tensor:
        return layer.weight * layer.expand("scale")  # type: ignore[no-any-return]


def registry(*more: tuple[str, Any]) -> Registry:
    """Returns what is installed, with ``rows`` (and others by name) added."""
    found = Registry.default().copy()
    for name, method in (("rows", Rows), *more):
        found.register("quant method", name, method)
    return found


def quantised(plain: tuple[str, ...] = (), group: int = 0, **fields: Any) -> dict[str, torch.Tensor]:
    """Returns `tests.small.weights` with every projection of the layers quantised, but those that end in `plain`."""
    tensors = {}
    for name, tensor in weights(**fields).items():
        stem = name.removesuffix(".weight")
        if "_proj" not in name or stem.endswith(plain or ("-",)):
            tensors[name] = tensor
            continue
        size = group or tensor.shape[1]
        scale = tensor.abs().unflatten(1, (-1, size)).amax(-1) / 127
        tensors[name] = (tensor / scale.repeat_interleave(size, 1)).round().to(torch.int8)
        tensors[f"{stem}.scale"] = scale
    return tensors


def dense(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the same checkpoint with its weights decoded."""
    found = {}
    for name, tensor in tensors.items():
        scale = tensors.get(name.removesuffix("weight") + "scale")
        if not name.endswith(".scale"):
            found[name] = (
                tensor if scale is None else tensor * scale.repeat_interleave(tensor.shape[1] // scale.shape[1], 1)
            )
    return found
