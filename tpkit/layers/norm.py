"""Normalisation over the hidden state or a head. Every rank holds the whole weight."""

from __future__ import annotations

import torch

from tpkit.distributed.group import TensorParallel
from tpkit.division import divide_layers
from tpkit.dtypes import dtype_name
from tpkit.errors import UsageError
from tpkit.layers.sharded import Setting, Sharded, ShardedModule
from tpkit.layout import LayerSpec, fused
from tpkit.params import Out, ParamSpec
from tpkit.partition import Features

__all__ = ["RMSNorm"]


class RMSNorm(ShardedModule):
    """Root mean square norm, ``x / sqrt(mean(x**2) + eps) * weight`` (Zhang and Sennrich 2019, arXiv:1910.07467).

    The statistics are float32, whatever the input is; the weight multiplies after rounding to the input's dtype.

    Args:
        size: features that are normalised together.
        eps: added to the mean square.
        dtype, device: of the weight.
    """

    def __init__(
        self,
        size: int,
        eps: float = 1e-6,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        how = Setting(bias=False, dtype=dtype, device=device, tp_rank=0, tp_size=1)
        out = (Features(name="", unit=size),)
        weight = ParamSpec(dtype_name(dtype or torch.get_default_dtype()), dims=(Out(),))
        spec = LayerSpec(path="", out=out, forms=(fused("", out),), params=(("weight", weight),))
        (layer,) = divide_layers([(spec, spec.forms[0])], 1)
        super().__init__(Sharded(layer=layer, rank=0, device=device), how.place)
        self.eps = eps

    @classmethod
    def of(cls, sharded: Sharded, tp: TensorParallel, eps: float) -> RMSNorm:
        """Returns a norm for a shard that is divided already."""
        made = cls.__new__(cls)
        ShardedModule.__init__(made, sharded, tp)
        made.eps = eps
        return made

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalises ``[..., size]`` over its last dimension."""
        if x.shape[-1] != self.out_features:  # a weight of one element would broadcast
            raise UsageError(f"{self._name()}: it normalises {self.out_features} features, the input has {x.shape[-1]}")
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        weight: torch.Tensor = self.weight
        return weight * wide.to(x.dtype)
