"""What all layers with parameters have in common: their shard, its quant method, and loading by the one plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from tpkit.distributed.group import TensorParallel
from tpkit.division import DividedLayer, divide_layers
from tpkit.dtypes import dtype_name, torch_dtype
from tpkit.errors import PluginError
from tpkit.geometry import block_of_element
from tpkit.layout import LayerSpec, Source
from tpkit.params import Dim, LinearSpec
from tpkit.partition import Side, side_size
from tpkit.quant import QuantMethod, Unquantized
from tpkit.registry import Registry

__all__ = ["Setting", "Sharded", "ShardedModule", "sharded_alone"]


@dataclass(frozen=True, kw_only=True)
class Sharded:
    """A layer's shard on one rank: everything a module needs to be made.

    Attributes:
        layer: the layer and what every rank holds of it.
        rank: whose shard this is.
        method: computes with it; None for norms and other layers that do not multiply.
        device: where its parameters live.
        dtype: name of the dtype that the model computes in.
    """

    layer: DividedLayer
    rank: int
    method: QuantMethod | None = None
    device: torch.device | str | None = None
    dtype: str = "float32"


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
    setting: Setting, out: Side, in_: Side, forms: tuple[tuple[Source, ...], ...], *, embedding: bool = False
) -> Sharded:
    """Returns the shard of a layer that is made without a description."""
    method = setting.method()
    linear = LinearSpec(
        name=setting.prefix,
        in_features=side_size(in_),
        segments=tuple((part.name, part.size) for part in out),
        dtype=dtype_name(setting.dtype or torch.get_default_dtype()),
        embedding=embedding,
    )
    params = method.parameters(linear, setting.bias)
    spec = LayerSpec(path=setting.prefix, out=out, in_=in_, forms=forms, params=params)
    (layer,) = divide_layers([(spec, forms[0])], setting.place.size)
    return Sharded(layer=layer, rank=setting.place.rank, method=method, device=setting.device, dtype=linear.dtype)


class ShardedModule(nn.Module):
    """A module whose parameters are one rank's shard of a layer.

    Attributes:
        sharded: the shard; it knows the sizes of all ranks.
        tp: this rank's place.
        quant_method: computes with the parameters; None for layers that do not multiply.
        out_sizes, in_sizes: this rank's size of each segment of the output and of the input.

    Args:
        sharded: the shard.
        tp: this rank's place.
        tied: a module whose parameters it uses as its own (a tied head shares the embedding's shard).
    """

    bias: nn.Parameter | None
    weight: nn.Parameter

    def __init__(self, sharded: Sharded, tp: TensorParallel, *, tied: ShardedModule | None = None) -> None:
        super().__init__()
        self.tp = tp
        self.sharded = sharded
        self.quant_method = sharded.method
        layer, rank = sharded.layer, sharded.rank
        self.out_sizes = layer.sizes(layer.spec.out, rank)
        self.in_sizes = layer.sizes(layer.spec.in_, rank)
        self.out_features, self.in_features = sum(self.out_sizes), sum(self.in_sizes)
        divided = [any(p.axis and p.axis.divided for p in side) for side in (layer.spec.out, layer.spec.in_)]
        self.out_divided, self.in_divided = (flag and self.tp.size > 1 for flag in divided)
        #: whole tensors handed over as stored: parameter -> segment -> tensor
        self.blobs: dict[str, dict[str, torch.Tensor]] = {} if tied is None else tied.blobs
        self._make_parameters(tied)

    def _make_parameters(self, tied: ShardedModule | None) -> None:
        layer, rank = self.sharded.layer, self.sharded.rank
        self.register_parameter("bias", None)
        for name, spec in layer.spec.params:
            if any(dim.along == "blob" for dim in spec.dims):
                continue
            if name != "bias" and hasattr(self, name):
                raise PluginError(
                    f"{type(self.quant_method).__name__} names a parameter {name!r}, which a layer uses itself"
                )
            if tied is not None:
                self.register_parameter(name, getattr(tied, name))
                continue
            self._allocate(name, layer.geometry.local[rank][name].shape, torch_dtype(spec.dtype), self.sharded.device)

    def _allocate(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str | None
    ) -> None:
        made = torch.empty(shape, dtype=dtype, device=device)
        self.register_parameter(name, nn.Parameter(made, requires_grad=False))

    @property
    def output_offsets(self) -> list[int]:
        """Where each segment begins in this rank's output."""
        return [sum(self.out_sizes[:n]) for n in range(len(self.out_sizes))]

    def adopt(self, layer: DividedLayer) -> None:
        """Takes the layer as it is stored in another form: packed words and blocks may lie otherwise in this shard."""
        before, self.sharded = self.sharded.layer, replace(self.sharded, layer=layer)
        rank = self.sharded.rank
        for name, _ in layer.spec.params:
            shape = layer.geometry.local[rank][name].shape
            if shape != before.geometry.local[rank][name].shape:
                held: torch.Tensor = getattr(self, name)
                self._allocate(name, shape, held.dtype, held.device)

    def load(self, tensors: Mapping[str, torch.Tensor], *, sharded: bool = False) -> None:
        """Fills the parameters through the loader's own plan.

        Args:
            tensors: full tensors by name: ``weight``; for packed layers either each part (``q_proj.weight``) or the
                tensor fused on disk (``weight``), which is cut into its parts.
            sharded: each tensor already is this rank's piece.

        Raises:
            LoadError: unknown, missing, wrongly shaped or typed tensors (a ValueError).
        """
        from tpkit.checkpoint.load import load_layer

        load_layer(self, tensors, pieces=sharded)

    # what a quant method may use in process_weights_after_loading and apply

    def aligned(self, name: str) -> bool:
        """Says whether every cut of a parameter falls between its words, groups and blocks on this rank."""
        dims = [dim for dim in dict(self.sharded.layer.spec.params)[name].dims if dim.along in ("out", "in", "flat")]
        return all(
            pair == divmod(i, dim.per) for dim in dims if dim.per > 1 for i, pair in enumerate(self._blocks(dim))
        )

    def expand(self, name: str, value: torch.Tensor | None = None) -> torch.Tensor:
        """Returns one value per local element along every blocked dimension of a parameter (a scale per weight)."""
        tensor = getattr(self, name) if value is None else value
        return self._select(name, tensor, words=False)

    def trim(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Drops, from unpacked elements of a parameter, those that belong to a neighbour of this rank.

        Args:
            name: the parameter.
            value: its unpacked elements: every packed dimension has ``per`` elements for each stored word.
        """
        return self._select(name, value, words=True)

    def _select(self, name: str, value: torch.Tensor, words: bool) -> torch.Tensor:
        for position, dim in enumerate(dict(self.sharded.layer.spec.params)[name].dims):
            if dim.per > 1 and dim.along in ("out", "in", "flat") and dim.word == words:
                pairs = self._blocks(dim)
                index = [block * dim.per + place for block, place in pairs] if words else [block for block, _ in pairs]
                if index != list(range(value.shape[position])):
                    value = value.index_select(position, torch.tensor(index, dtype=torch.int64, device=value.device))
        return value

    def _blocks(self, dim: Dim) -> list[tuple[int, int]]:
        layer, rank = self.sharded.layer, self.sharded.rank
        out, in_ = layer.spec.out, layer.spec.in_
        return block_of_element(dim, out, in_, layer.form, layer.shares(out, rank), layer.shares(in_, rank))

    def segment_of_row(self) -> torch.Tensor:
        """Returns, for each local output row, the number of the segment it belongs to. ``[out]`` int64."""
        counts = torch.tensor(self.out_sizes, dtype=torch.int64)
        return torch.repeat_interleave(torch.arange(len(self.out_sizes)), counts)

    def extra_repr(self) -> str:
        layer = self.sharded.layer.spec
        full = f"{side_size(layer.in_)} -> {side_size(layer.out)}" if layer.in_ else f"{side_size(layer.out)}"
        return f"{full}, rank {self.sharded.rank}: {self.in_features} -> {self.out_features}"
