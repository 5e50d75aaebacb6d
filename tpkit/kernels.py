"""Which kernel serves a shard: decided from the plan alone, so that it can be printed before anything runs. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from tpkit.division import DividedLayer
from tpkit.geometry import cuts_are_whole
from tpkit.quant.base import Kernel

__all__ = ["kernel_of"]


def kernel_of(kernels: Sequence[Kernel], layer: DividedLayer, rank: int, device: str, dtype: str) -> str:
    """Returns the name of the first kernel that serves a rank's shard; "" where none does.

    Args:
        kernels: a quant method's, best first.
        layer: the layer.
        rank: whose shard.
        device: type of the device, e.g. "cuda".
        dtype: of the model, by name.
    """
    out, in_ = (sum(layer.sizes(side, rank)) for side in (layer.spec.out, layer.spec.in_))
    for kernel in kernels:
        fits = device in kernel.devices and (not kernel.dtypes or dtype in kernel.dtypes)
        types = {name: spec.dtype for name, spec in layer.spec.params}
        fits = fits and all(types.get(name) == wanted for name, wanted in kernel.stored)
        fits = fits and out >= kernel.out_minimum and in_ > 0
        fits = fits and not out % kernel.out_multiple and not in_ % kernel.in_multiple
        if fits and (not kernel.whole or _cuts_are_whole(layer, rank)):
            return kernel.name
    return ""


def _cuts_are_whole(layer: DividedLayer, rank: int) -> bool:
    out, in_ = layer.spec.out, layer.spec.in_
    shares = layer.shares(out, rank), layer.shares(in_, rank)
    dims = {dim for _, spec in layer.spec.params for dim in spec.dims if dim.per > 1}
    return all(cuts_are_whole(dim, out, in_, layer.form, *shares) for dim in dims)
