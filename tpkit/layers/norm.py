"""Normalisation: over the hidden state, over a head, or over all heads of all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch

from tpkit.distributed.group import TensorParallel
from tpkit.division import divide_layers
from tpkit.dtypes import dtype_name
from tpkit.errors import UsageError
from tpkit.layers.alone import Setting
from tpkit.layers.sharded import Sharded, ShardedModule
from tpkit.layout import LayerSpec, fused
from tpkit.params import Out, ParamSpec
from tpkit.partition import Features, side_size

if TYPE_CHECKING:
    from typing_extensions import Self

    from tpkit.spec.words import NormOptions

__all__ = ["LayerNorm", "Norm", "RMSNorm"]


class Norm(ShardedModule):
    """What both norms share. The statistics are float32, whatever the input is.

    Where the normalised features are divided over ranks (all heads at once), the ranks add up their squares; a kv head
    that several ranks hold counts once.

    Attributes:
        size: features that are normalised together, over all ranks.
        eps: added to the mean square.
        zero_centered: the weight is the distance from one.
        across: the features are divided over ranks.
        over: the word of the description.
        after: what it comes after, as the description says.
    """

    centred: ClassVar[bool] = False
    size: int
    eps: float
    zero_centered: bool = False
    across: bool = False
    over: str | None = None
    after: str | None = None

    def _alone(
        self, size: int, eps: float, bias: bool, dtype: torch.dtype | None, device: torch.device | str | None
    ) -> None:
        how = Setting(bias=False, dtype=dtype, device=device, tp_rank=0, tp_size=1)
        out = (Features(name="", unit=size),)
        param = ParamSpec(dtype_name(dtype or torch.get_default_dtype()), dims=(Out(),))
        params = tuple((name, param) for name in ("weight", "bias")[: 1 + bias])
        spec = LayerSpec(path="", out=out, forms=(fused("", out),), params=params)
        (layer,) = divide_layers([(spec, spec.forms[0])], 1)
        ShardedModule.__init__(self, Sharded(layer=layer, rank=0, device=device), how.place)
        self.eps, self.size = eps, size

    @classmethod
    def of(cls, sharded: Sharded, tp: TensorParallel, options: NormOptions) -> Self:
        """Returns a norm for a shard that is divided already."""
        made = cls.__new__(cls)
        ShardedModule.__init__(made, sharded, tp)
        out = sharded.layer.spec.out
        made.eps, made.zero_centered = options.eps, options.zero_centered
        made.over, made.after = options.over, options.after
        made.across = made.out_divided and options.weight != "per_head"
        made.size = options.size or side_size(out)
        return made

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalises over the last dimension.

        Args:
            x: ``[..., size]``; this rank's features where they are divided; ``[..., heads, L, size]`` where each head
                has a weight of its own.
        """
        here = self.out_features if self.across else self.size
        if x.shape[-1] != here:  # a weight of one element would broadcast
            raise UsageError(f"{self._name()}: it normalises {here} features, the input has {x.shape[-1]}")
        wide = x.float()
        if self.centred:
            wide = wide - self._mean(wide)
        wide = wide * torch.rsqrt(self._mean(wide.square()) + self.eps)
        return self._scaled(wide, x.dtype)

    def _mean(self, wide: torch.Tensor) -> torch.Tensor:
        if not self.across:
            return wide.mean(-1, keepdim=True)
        layer = self.sharded.layer
        total = wide.sum(-1, keepdim=True)
        if not layer.owns(layer.spec.out, self.tp.rank):
            total = torch.zeros_like(total)
        return self.tp.all_reduce(total) / self.size

    def _scaled(self, wide: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        weight = self._parameters.get("weight")
        if weight is None:
            return wide.to(dtype)
        by: torch.Tensor = weight.unsqueeze(1) if weight.ndim == 2 else weight  # beside [..., heads, L, size]
        if not self.zero_centered and not self.centred:
            return by * wide.to(dtype)
        wide = wide * (1 + by.float() if self.zero_centered else by.float())
        return (wide if self.bias is None else wide + self.bias.float()).to(dtype)


class RMSNorm(Norm):
    """Root mean square norm, ``x / sqrt(mean(x**2) + eps) * weight`` (Zhang and Sennrich 2019, arXiv:1910.07467).

    The weight multiplies after rounding to the input's dtype, unless it is zero centred.

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
        self._alone(size, eps, False, dtype, device)


class LayerNorm(Norm):
    """Layer norm: the mean is taken away first (Ba et al. 2016, arXiv:1607.06450).

    Args:
        size: features that are normalised together.
        eps: added to the variance.
        bias: it has a bias.
        dtype, device: of weight and bias.
    """

    centred = True

    def __init__(
        self,
        size: int,
        eps: float = 1e-5,
        *,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self._alone(size, eps, bias, dtype, device)
