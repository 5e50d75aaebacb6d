"""Layers that are made without a description: what their public constructors take, and the shard that follows."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from tpkit.distributed.group import TensorParallel
from tpkit.division import divide_layers
from tpkit.dtypes import dtype_name
from tpkit.layers.sharded import Sharded
from tpkit.layout import LayerSpec, Source
from tpkit.params import LinearSpec
from tpkit.partition import Axis, Side, side_size
from tpkit.quant import QuantMethod, Unquantized
from tpkit.registry import Registry

__all__ = ["Setting", "sharded_alone"]


@dataclass(kw_only=True)
class Setting:
    """How a layer that stands alone is set up; the public constructors take these as keyword arguments.

    Attributes:
        bias: it has a bias.
        dtype: of its parameters; None: torch's default.
        device: of its parameters.
        quant: a quant method, or the name of an installed one; None: unquantised.
        tp, tp_rank, tp_size: see `TensorParallel.of`.
        disable_tp: every rank holds and computes all of it.
        prefix: its path, for messages.
    """

    bias: bool = True
    dtype: torch.dtype | None = None
    device: torch.device | str | None = None
    quant: QuantMethod | str | None = None
    tp: object = None
    tp_rank: int | None = None
    tp_size: int | None = None
    disable_tp: bool = False
    prefix: str = ""
    place: TensorParallel = field(init=False)

    def __post_init__(self) -> None:
        self.place = TensorParallel.of(self.tp, self.tp_rank, self.tp_size)

    def method(self) -> QuantMethod:
        """Returns the quant method's instance."""
        if isinstance(self.quant, str):
            loaded: QuantMethod = Registry.default().load("quant method", self.quant)()
            return loaded
        return self.quant or Unquantized()


def sharded_alone(
    setting: Setting,
    out: Side,
    in_: Side,
    forms: tuple[tuple[Source, ...], ...],
    *,
    embedding: bool = False,
    experts: Axis | None = None,
    ep: int = 1,
) -> Sharded:
    """Returns the shard of a layer that is made without a description; `ep` groups of ranks share its experts."""
    method = setting.method()
    linear = LinearSpec(
        name=setting.prefix,
        in_features=side_size(in_),
        segments=tuple((part.name, part.size) for part in out),
        dtype=dtype_name(setting.dtype or torch.get_default_dtype()),
        embedding=embedding,
    )
    params = method.parameters(linear, setting.bias)
    spec = LayerSpec(path=setting.prefix, out=out, in_=in_, forms=forms, params=params, experts=experts)
    (layer,) = divide_layers([(spec, forms[0])], setting.place.size, ep=ep)
    return Sharded(
        layer=layer,
        rank=setting.place.rank,
        method=method,
        device=setting.device,
        dtype=linear.dtype,
        linear=linear,
    )
